"""Serve with vLLM in several ways, in one engine, and write one record.

    python -m mhc bench serving                          one GPU: replays, CUDA graphs, refit, then eager
    python -m mhc bench serving --tp 2 --phases replay,graph

Needs vLLM (0.26.0 is what was tried) and about 85 GiB of one GPU. The model has real layer shapes, few layers and
random weights (`mhc/bench/serving_model.py`). Modes: `unpatched`, vLLM's own code; `vllm_kernel`, the plugin with
vLLM's broadcast kernel; `mhc`, with the kernels that the plugin chooses; `mhc_post_pre`, also with our post + pre in
target and draft; `mhc_fused` and `mhc_table`, one kernel of ours forced. Each mode has CUDA graphs of its own.

Throughput hardly resolves a first pre; replaying the captured draft steps in turn does, so that comes first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mhc.bench import records, serving_model
from mhc.bench.options import ints, words
from mhc.bench.serving_engine import ENVIRONMENT, Engine, Settings, VllmEngine
from mhc.bench.serving_phases import MODES, PHASES, Plan, Timetable, measure
from mhc.vllm_plugin import installed

DEFAULT_MODES = ("unpatched", "vllm_kernel", "mhc", "mhc_post_pre")
DEFAULT_BUDGET_S = 240.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", type=words, default=DEFAULT_MODES, help=f"of {', '.join(MODES)} (default: "
                        f"{','.join(DEFAULT_MODES)}); unpatched must be one")  # fmt: skip
    parser.add_argument("--phases", type=words, default=PHASES, help=f"in their order (default: {','.join(PHASES)})")
    parser.add_argument("--batch", type=int, default=16, help="prompts served at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=8, help="length of a prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="alternating repetitions (default: %(default)s)")
    parser.add_argument("--replay-batches", type=ints, default=(1, 16, 64),
                        help="requests of a replayed step, 7 draft tokens each (default: 1,16,64)")  # fmt: skip
    parser.add_argument("--replays", type=int, default=200, help="replays a mode and size (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs, with expert parallel (default: %(default)s)")
    parser.add_argument("--acceptance-length", type=float, default=0.0,
                        help="vLLM's synthetic acceptance; 0 verifies for real (default: %(default)s)")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=DEFAULT_BUDGET_S,
                        help="no new measurement after this time from the start; the rest is recorded as skipped "
                             "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of prompts and orders (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="where to write the model folder (default: a temporary one)")
    parser.add_argument(
        "--out", type=Path, default=Path("notebooks/data"), help="folder of the record (default: %(default)s)"
    )


def plan(args: argparse.Namespace) -> tuple[Settings, Plan]:
    """What the arguments ask for.

    Raises:
        ValueError: a mode or phase is unknown, or a number is too small.
    """
    graphs = bool({"replay", "graph", "refit"} & set(args.phases))
    settings = Settings(args.tp, tuple(sorted({*args.replay_batches, args.batch})), graphs, args.acceptance_length)
    return settings, Plan(
        modes=tuple(args.modes),
        phases=tuple(args.phases),
        batch=args.batch,
        tokens=args.tokens,
        prompt_tokens=args.prompt_tokens,
        rounds=args.rounds,
        replay_batches=tuple(args.replay_batches),
        replays=args.replays,
        tp=args.tp,
        seed=args.seed,
    )


def run(args: argparse.Namespace) -> int:
    import torch

    started = time.perf_counter()
    settings, wanted = plan(args)
    if installed.find() is None:
        print("mhc bench serving: vLLM is not installed here; notebook 05 replays the records in notebooks/data",
              file=sys.stderr)  # fmt: skip
        return 2
    if torch.cuda.device_count() < args.tp:
        print(f"mhc bench serving: needs {args.tp} CUDA GPUs, {torch.cuda.device_count()} are here; notebook 05 "
              "replays the records in notebooks/data", file=sys.stderr)  # fmt: skip
        return 2
    model = serving_model.write(args.model or Path(tempfile.mkdtemp(prefix="mhc-serving-")))
    engine = VllmEngine(model, settings, args.seed, args.prompt_tokens)
    path = record(engine, settings, wanted, args.out, started, args.budget_s)
    from mhc.bench import serving_stats

    print(serving_stats.text(records.load(path)))
    print(path)
    return 0


def record(engine: Engine, settings: Settings, wanted: Plan, out: Path, started: float, budget_s: float) -> Path:
    """Measure everything that is wanted with a running engine, into a new record in `out`; returns its path.

    Args:
        engine: the engine.
        settings: it was started with.
        wanted: modes, phases and sizes.
        out: a folder, made if missing.
        started: `time.perf_counter()` at the start of the process.
        budget_s: from then on.
    """
    found: dict[str, Any] = engine.call("mhc_start")
    run_line = records.run_line(
        "serving",
        seed=wanted.seed,
        model=serving_model.CONFIG,
        weights="random",
        load_format="dummy",
        engine=found,
        engine_start_s=round(time.perf_counter() - started, 1),
        tp=settings.tp,
        batches=list(settings.batches),
        acceptance_length=settings.acceptance_length,
        environment=ENVIRONMENT,
    )
    path = records.free_path(out, run_line)
    with records.Recorder(path, run_line) as recorder:
        measure(engine, wanted, recorder, Timetable(started, budget_s))
    return path
