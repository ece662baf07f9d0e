"""The phases of the serving bench, each a few calls on an engine and a point a finding.

- `replay`: the modes' captured steps, replayed in turn on the buffers of the last real step;
- `graph` and `eager`: batches of prompts served in shuffled rounds, tokens compared between modes;
- `refit`: other weights loaded into the draft, and loaded back.

Points have `op`, `impl` (a mode), `mode` (graph or eager), `batch` and `tp`, see `records.SERVING_FIELDS`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mhc.bench.records import Recorder
from mhc.bench.serving_engine import VERIFIED_TOKENS, Engine, Generated
from mhc.bench.serving_model import SPECULATIVE_TOKENS, prompts
from mhc.bench.timing import interleave

MODES = ("unpatched", "vllm_kernel", "mhc", "mhc_fused", "mhc_table", "mhc_post_pre")
PHASES = ("replay", "graph", "refit", "eager")
WARM_TOKENS = 24
LATE = "the time budget was used up"
FIRST_KERNELS = 8  # of a replayed step: the embedding, then the first pre


@dataclass(frozen=True)
class Plan:
    """Modes, phases and sizes; see `python -m mhc bench serving --help`."""

    modes: tuple[str, ...]
    phases: tuple[str, ...]
    batch: int
    tokens: int
    prompt_tokens: int
    rounds: int
    replay_batches: tuple[int, ...]
    replays: int
    tp: int
    seed: int

    def __post_init__(self) -> None:
        for name, given, known in (("modes", self.modes, MODES), ("phases", self.phases, PHASES)):
            if not given or set(given) - set(known) or len(set(given)) < len(given):
                raise ValueError(f"{name} must be different ones of {', '.join(known)}, got {', '.join(given)}")
        if "unpatched" not in self.modes:
            raise ValueError(f"modes must contain unpatched, got {', '.join(self.modes)}")
        for name in ("batch", "tokens", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rounds", "replays"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")


class Timetable:
    """When to stop.

    Args:
        started: `time.perf_counter()` at the start.
        budget_s: from then on.
    """

    def __init__(self, started: float, budget_s: float) -> None:
        self._started, self._budget_s = started, budget_s

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def has(self, time_s: float = 0.0) -> bool:
        """Whether something of this length still fits."""
        return self.elapsed_s() + time_s < self._budget_s


def measure(engine: Engine, plan: Plan, recorder: Recorder, times: Timetable) -> None:
    """Run the phases that are wanted, as far as the time goes; what is left out gets a point that says so."""
    phases: dict[str, Callable[..., None]] = {
        "replay": replay,
        "graph": lambda *rest: serve("graph", *rest),
        "refit": refit,
        "eager": lambda *rest: serve("eager", *rest),
    }
    names = []
    for name in plan.modes:
        reason = engine.call("mhc_available", name)
        if reason:
            _point(recorder, plan, "mode", name, "graph", plan.batch, status="absent", reason=reason)
        else:
            names.append(name)
    if set(plan.phases) - {"eager"}:
        for name in names:
            calls = engine.call("mhc_capture", name)
            _point(recorder, plan, "capture", name, "graph", plan.batch, first_pre_calls=calls)
            _say(times, f"captured {name}, first pre calls meanwhile {calls}")
    for phase in plan.phases:
        _say(times, phase)
        try:
            phases[phase](engine, plan, recorder, times, names)
        except Exception as error:  # recorded, and the phases after it are still worth their time
            traceback.print_exc()
            _point(recorder, plan, phase, "unpatched", "eager" if phase == "eager" else "graph", plan.batch,
                   status="failed", reason=f"{type(error).__name__}: {error}".splitlines()[0])  # fmt: skip


def replay(engine: Engine, plan: Plan, recorder: Recorder, times: Timetable, names: Sequence[str]) -> None:
    """Device time of whole draft and target steps, mode against mode."""
    for batch in plan.replay_batches:
        draft, target = SPECULATIVE_TOKENS * batch, VERIFIED_TOKENS * batch
        if not times.has():
            _point(recorder, plan, "draft_step_replay", "unpatched", "graph", batch, T=draft, samples_us=[],
                   status="skipped", reason=LATE)  # fmt: skip
            continue
        engine.call("mhc_switch", "unpatched", True)
        engine.generate(batch, WARM_TOKENS, plan.seed)
        samples = engine.call("mhc_replay", "draft", draft, list(names), plan.replays, plan.seed)
        proposed = engine.call("mhc_draft_tokens", draft, list(names))
        for name in names:
            kernels = engine.call("mhc_kernels", draft, name)
            _point(
                recorder, plan, "draft_step_replay", name, "graph", batch, T=draft, samples_us=_rounded(samples[name]),
                kernels=len(kernels), first_kernels=[[k, round(us, 2)] for k, us in kernels[:FIRST_KERNELS]],
                drafts_as_unpatched=_alike(proposed[name], proposed["unpatched"]),
            )  # fmt: skip
        both = [name for name in ("unpatched", "mhc_post_pre") if name in names]
        if len(both) == 2:
            samples = engine.call("mhc_replay", "target", target, both, plan.replays, plan.seed)
            for name in both:
                _point(recorder, plan, "target_step_replay", name, "graph", batch, T=target,
                       samples_us=_rounded(samples[name]))  # fmt: skip
        _say(times, f"replayed {draft} and {target} tokens")


def serve(mode: str, engine: Engine, plan: Plan, recorder: Recorder, times: Timetable, names: Sequence[str]) -> None:
    """Batches of prompts in shuffled rounds; then, once a mode, with events around every draft step."""
    graphs = mode == "graph"
    longest = 0.0
    for name in names:
        if not times.has():
            break
        engine.call("mhc_switch", name, graphs)
        engine.generate(plan.batch, WARM_TOKENS, plan.seed)
    first: dict[str, list[list[int]]] = {}
    for round_, order, name in interleave(list(names), plan.rounds, plan.seed):
        if not times.has(1.5 * longest):
            _point(recorder, plan, "serving", name, mode, plan.batch, round=round_, order=order, status="skipped",
                   reason=LATE)  # fmt: skip
            continue
        done, counted, accepted = _serve_once(engine, plan, name, graphs, timed=False)
        longest = max(longest, done.time_s)
        first.setdefault(name, done.tokens)
        _point(
            recorder, plan, "serving", name, mode, plan.batch, round=round_, order=order, tokens=plan.tokens,
            tok_s=[round(done.tok_s, 2)], latency_s=[round(done.time_s, 5)], token_sha256=_sha256(done.tokens),
            counted={k: v for k, v in counted.items() if k != "draft_us"}, accepted=accepted,
        )  # fmt: skip
    for name in names:
        if name in first and not times.has(1.5 * longest):
            _point(recorder, plan, "draft_forward", name, mode, plan.batch, samples_us=[], status="skipped",
                   reason=LATE)  # fmt: skip
        elif name in first:
            done, counted, _ = _serve_once(engine, plan, name, graphs, timed=True)
            step_us = done.time_s * 1e6 / max(1, counted["eager_steps"] + counted["graph_steps"])
            _point(recorder, plan, "draft_forward", name, mode, plan.batch, T=SPECULATIVE_TOKENS * plan.batch,
                   samples_us=_rounded(counted["draft_us"]), step_us=round(step_us, 1))  # fmt: skip
    _divergences(mode, engine, plan, recorder, first)
    _say(times, f"served {mode}")


def refit(engine: Engine, plan: Plan, recorder: Recorder, times: Timetable, names: Sequence[str]) -> None:
    """Other mixing weights in the draft: the derived weight and the captured graphs must follow, and return."""
    if not times.has():
        _point(recorder, plan, "refit", "unpatched", "graph", plan.batch, status="skipped", reason=LATE)
        return
    draft = SPECULATIVE_TOKENS * plan.batch
    engine.call("mhc_switch", "unpatched", True)
    engine.generate(plan.batch, WARM_TOKENS, plan.seed)
    before = engine.call("mhc_draft_tokens", draft, list(names))
    loaded = engine.call("mhc_refit", plan.seed + 1)
    after = engine.call("mhc_draft_tokens", draft, list(names))
    back = engine.call("mhc_refit", None)
    again = engine.call("mhc_draft_tokens", draft, list(names))
    for name in names:
        _point(
            recorder, plan, "refit", name, "graph", plan.batch, T=draft,
            follows=loaded["follows"] and back["follows"], same_storage=loaded["same_storage"] and back["same_storage"],
            error=max(loaded["error"], back["error"]),
            drafts_as_before=_alike(after[name], before[name]),
            drafts_as_unpatched=_alike(after[name], after["unpatched"]),
            drafts_restored=_alike(again[name], before[name]),
        )  # fmt: skip


def _serve_once(
    engine: Engine, plan: Plan, name: str, graphs: bool, timed: bool
) -> tuple[Generated, dict[str, Any], dict[str, float]]:
    engine.call("mhc_switch", name, graphs)
    engine.call("mhc_reset", timed)
    before = engine.accepted()
    done = engine.generate(plan.batch, plan.tokens, plan.seed)
    counted = engine.call("mhc_counted")
    return done, counted, {key: value - before.get(key, 0.0) for key, value in engine.accepted().items()}


def _divergences(mode: str, engine: Engine, plan: Plan, recorder: Recorder, first: dict[str, list[list[int]]]) -> None:
    """Where a mode's first tokens part from the unpatched ones, and how near a tie that place is."""
    for name, tokens in first.items():
        for request, (ours, theirs) in enumerate(zip(tokens, first.get("unpatched", tokens), strict=True)):
            if ours == theirs:
                continue
            position = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            engine.call("mhc_switch", "unpatched", mode == "graph")
            prompt = prompts(plan.batch, plan.prompt_tokens, plan.seed)[request]
            likely = engine.next_logprobs(prompt + theirs[:position])
            pair = [likely.get(theirs[position]), likely.get(ours[position])]
            _point(recorder, plan, "divergence", name, mode, plan.batch, request=request, position=position,
                   logprobs=pair)  # fmt: skip
            break


def _point(recorder: Recorder, plan: Plan, op: str, impl: str, mode: str, batch: int, **values: Any) -> None:
    fields = {"status": "ok", "reason": ""} | values
    recorder.point(op=op, impl=impl, mode=mode, batch=batch, tp=plan.tp, **fields)


def _alike(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The share of equal tokens."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(theirs)


def _sha256(tokens: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def _rounded(samples_us: Sequence[float]) -> list[float]:
    return [round(sample, 3) for sample in samples_us]


def _say(times: Timetable, text: str) -> None:
    print(f"{times.elapsed_s():6.1f} s  {text}", file=sys.stderr, flush=True)
