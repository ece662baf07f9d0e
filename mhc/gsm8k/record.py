"""The recorded evaluation of the miniature pair: every arm on every test question, one JSONL file.

Order: temperature 1 in each arm, by draft length and by confidence threshold; greedy against plain decoding;
calibration and the arms' first differences; tokens a second, variants interleaved. Every line is in the file as soon
as it is measured, so an interrupted record holds what was done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mhc.bench.records import free_path, run_line
from mhc.dspark import generate
from mhc.dspark.artifacts import Pair, load_pair, read_card
from mhc.dspark.corpus import Sample
from mhc.dspark.expansion import EXPANSIONS
from mhc.gsm8k.analysis import calibration, differences
from mhc.gsm8k.data import SHA256, Problem
from mhc.gsm8k.journal import Journal
from mhc.gsm8k.mini import Arm, Outcome, encode_prompts, equality, on_cuda, run_arm, synchronise
from mhc.gsm8k.prompts import MAX_TOKENS, Rule

ARMS = ("repeat", "broadcast")  # the A and the B; further expansions take part where that is cheap
OTHERS = tuple(expansion for expansion in EXPANSIONS if expansion != "repeat")
EXACT = "_fp64"
SPEED_QUESTIONS = 2  # at least so many are timed, one batch after the other


@dataclass(frozen=True)
class Scope:
    """What is measured, and how much of it.

    Args:
        k: draft length of the main arms; the sweep takes every shorter one.
        thresholds: confidence thresholds of the truncation curve.
        speed_requests: batch sizes whose tokens a second are measured.
        graphs: replay rounds as CUDA graphs, where there is CUDA.
        speed_rounds: interleaved repetitions of each, at most.
        speed_tokens: of an answer while speed is measured, at most `max_tokens`.
        speed_s: no further round of a batch size and launch once these took so many seconds; one is always recorded.
        max_tokens: of an answer.
        seed: of sampling.
        rule: by which answers are judged.
    """

    k: int = 7
    thresholds: tuple[float, ...] = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
    speed_requests: tuple[int, ...] = (1, 64)
    speed_rounds: int = 3
    speed_tokens: int = 96
    speed_s: float = 6.0
    graphs: bool = True
    max_tokens: int = MAX_TOKENS
    seed: int = 0
    rule: Rule = "vllm"


def record(folder: str | Path, out: str | Path, problems: Sequence[Problem], scope: Scope, device: str) -> Path:
    """Measure everything and return the record's path.

    Args:
        folder: of the trained pair.
        out: folder of the new record.
        problems: the test questions.
        scope: what to measure.
        device: `cpu` or `cuda`.

    Raises:
        FileNotFoundError, ValueError: as `load_pair` and `run_arm`.
    """
    pair = load_pair(folder, device)
    header = run_line(
        "gsm8k",
        seed=scope.seed,
        engine="mini",
        model_sha256=read_card(folder)["sha256"],
        data_sha256=SHA256["test"],
        questions=len(problems),
        shots=0,
        rule=scope.rule,
        max_tokens=scope.max_tokens,
        k=scope.k,
    )
    started = time.perf_counter()
    prompts = encode_prompts(pair, problems)
    with Journal(free_path(out, header), header) as journal:

        def run(arm: Arm, with_pair: Pair = pair) -> Outcome:
            outcome = run_arm(
                with_pair,
                problems,
                prompts,
                arm,
                rule=scope.rule,
                seed=scope.seed,
                max_tokens=scope.max_tokens,
                capture=scope.graphs,
            )
            for row in outcome.rows:
                journal.append(row.record(), sync=False)
            journal.append(outcome.total)
            length = f", mean length {outcome.total['mean_length']:.3f}" if "mean_length" in outcome.total else ""
            tqdm.write(f"{arm.name} k={arm.k} temperature {arm.temperature:g}: {outcome.total['wall_s']} s{length}")
            return outcome

        arms = tqdm(list(_sampled(scope)), desc="temperature 1", unit="arm")
        outcomes = {(arm.name, arm.k): run(arm) for arm in arms}
        _greedy(run, scope, folder, device, journal)
        sampled = outcomes["broadcast", scope.k]
        texts = [
            Sample((*head, *tokens), len(head)) for head, tokens in zip(prompts, sampled.tokens, strict=True)
        ]  # fmt: skip
        for line in (*calibration(pair, texts), *differences(pair, texts, "repeat", OTHERS)):
            journal.append(line)
        for line in throughput(pair, prompts, scope):
            journal.append(line)
        journal.append({"record": "end", "wall_s": round(time.perf_counter() - started, 1)})
        return journal.path


def _sampled(scope: Scope) -> Iterator[Arm]:
    """Every arm of temperature 1: the expansions at full length, shorter drafts, truncated drafts."""
    for expansion in EXPANSIONS:
        yield Arm(expansion, scope.k, 1.0)
    for k in range(1, scope.k):
        yield Arm("broadcast", k, 1.0)
    for threshold in scope.thresholds:
        yield Arm("broadcast", scope.k, 1.0, threshold)


def _greedy(run: Any, scope: Scope, folder: str | Path, device: str, journal: Journal) -> None:
    """Greedy texts of each arm against plain decoding, question by question, in bf16 and in fp64.

    In bf16 the plain steps have the shapes of verification (`width`), so that both round alike. fp64 checks the
    algorithm, for the A and the B alone: rounding there is too small to turn a near-tie.
    """
    for dtype, suffix, expansions in ((torch.bfloat16, "", EXPANSIONS), (torch.float64, EXACT, ARMS)):
        pair = load_pair(folder, device, dtype)
        plain = run(Arm(None, 0, 0.0, width=scope.k + 1, suffix=suffix), pair)
        for expansion in tqdm(expansions, desc=f"greedy{suffix}", unit="arm"):
            arm = Arm(expansion, scope.k, 0.0, suffix=suffix)
            journal.append(equality(arm, run(arm, pair), plain))


def throughput(pair: Pair, prompts: Sequence[Sequence[int]], scope: Scope) -> Iterator[dict[str, Any]]:
    """Tokens a second, plain against both arms, greedy, on the same first questions; rounds interleave the variants.

    Yields:
        `throughput` records: arm, requests, launch (`cuda_graph` or `eager`), tokens, `wall_s` of each round (prefill
        and, for graphs, the capture included). A first, unrecorded round warms everything up. Bounded by `scope`'s
        `speed_tokens` and `speed_s`.
    """
    variants = [(None, "plain"), *((expansion, expansion) for expansion in ARMS)]
    for requests in [size for size in scope.speed_requests if size <= len(prompts)]:
        for capture in (True, False) if on_cuda(pair) and scope.graphs else (False,):
            walls: dict[str, list[float]] = {name: [] for _, name in variants}
            tokens: dict[str, int] = {}
            began = time.perf_counter()
            for number in tqdm(range(scope.speed_rounds + 1), desc=f"speed, {requests} requests", unit="round"):
                if number > 1 and time.perf_counter() - began > scope.speed_s:
                    break
                for expansion, name in variants:
                    synchronise(pair)
                    start = time.perf_counter()
                    done = generate(
                        pair.target,
                        prompts[: max(requests, SPEED_QUESTIONS)],
                        min(scope.speed_tokens, scope.max_tokens),
                        draft=pair.draft if expansion else None,
                        block_size=scope.k if expansion else None,
                        expansion=expansion or "broadcast",
                        batch_size=requests,
                        capture=capture,
                    )
                    synchronise(pair)
                    if number:
                        walls[name].append(round(time.perf_counter() - start, 5))
                    tokens[name] = sum(len(completion.tokens) for completion in done)
            for _, name in variants:
                yield {
                    "record": "throughput",
                    "arm": name,
                    "k": 0 if name == "plain" else scope.k,
                    "temperature": 0.0,
                    "requests": requests,
                    "launch": "cuda_graph" if capture else "eager",
                    "tokens": tokens[name],
                    "wall_s": walls[name],
                }
