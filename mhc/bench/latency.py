"""Time every implementation and every peer on this GPU and write one record.

    python -m mhc bench latency                                   this process alone
    python -m mhc bench latency --peers-site /opt/peers           vLLM's kernels in a process that sees /opt/peers first
    python -m mhc bench latency --timers published --T 1,64,256   eager, 100 ms of warm-up and 500 ms of repeats

Each point is checked against fp64, then timed in rounds that shuffle all points of one op and T. Peers that need
another TileLang run in a second process on the same GPU; the two alternate and never run at once.
"""

from __future__ import annotations

import argparse
import queue
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mhc.bench import hardware, records, summary
from mhc.bench.executor import Executor, Local, Point, Remote
from mhc.bench.inputs import VOCAB
from mhc.bench.options import ints, words
from mhc.bench.timing import interleave
from mhc.bench.work import IMPLS, OPS, work
from mhc.config import MHCConfig

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HIDDEN = (4096, 5120, 7168)
HC = 4
HOST_TIMERS = ("eager", "cpu_call", "published")
COMPILED_TOKENS = (1, 64, 256, 1024, 4096)  # torch.compile takes seconds a shape
HOST_TOKENS = 256  # above it an eager call is bound by the device, which the graph measures better
PEERS = ("vllm_repeat", "vllm_broadcast", "vllm_post_pre", "tilekernels_repeat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--T", type=ints, default=TOKENS, help="tokens, comma-separated (default: 1 to 8192)")
    parser.add_argument("--H", type=ints, default=HIDDEN, help="hidden sizes (default: 4096,5120,7168)")
    parser.add_argument("--ops", type=words, default=OPS, help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument("--impls", type=words, help="only these implementations")
    parser.add_argument(
        "--timers",
        type=words,
        default=("cuda_graph", "eager", "cpu_call"),
        help="of cuda_graph, eager, cpu_call, published (default: the first three)",
    )
    parser.add_argument("--l2", type=words, default=("warm", "cold"), help="L2 states (default: warm,cold)")
    parser.add_argument("--rounds", type=int, default=3, help="shuffled rounds, at least 3 (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=10, help="samples a point and round (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and orders (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="rows of the embedding (default: %(default)s)")
    parser.add_argument(
        "--budget-s", type=float, help="stop measuring so long after the first point; the rest is recorded as skipped"
    )
    parser.add_argument("--peers-site", action="append", default=[], help="folder first on the peers' PYTHONPATH")
    parser.add_argument("--peers-python", default=sys.executable, help="the peers' interpreter (default: this one)")
    parser.add_argument("--precompile", type=int, default=0, help="compile with this many processes before timing")
    parser.add_argument(
        "--out", type=Path, default=Path("notebooks/data"), help="folder of the record (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print("mhc bench latency: no CUDA GPU here; notebook 03 replays the records in notebooks/data", file=sys.stderr)
        return 2
    if args.rounds < 3:
        raise ValueError(f"--rounds must be at least 3, got {args.rounds}")
    if args.samples < 1:
        raise ValueError(f"--samples must be at least 1, got {args.samples}")
    started = time.perf_counter()
    groups = plan(args.ops, args.impls, args.T, args.H, args.timers, args.l2)
    if args.precompile:
        precompile([point for group in groups for point in group], args)
    executors: dict[str, Executor] = {"main": Local(args.seed, args.vocab)}
    extra: dict[str, Any] = {"processes": "one"}
    if args.peers_site:
        remote = Remote(args.seed, args.vocab, args.peers_python, args.peers_site)
        executors["peers"] = remote
        extra = {"processes": "two that alternate on one GPU", "peers_versions": remote.versions()}
    run_line = records.run_line("latency", seed=args.seed, limits=hardware.limits(), vocab=args.vocab, **extra)
    path = records.free_path(args.out, run_line)
    deadline = None if args.budget_s is None else time.perf_counter() + args.budget_s
    with records.Recorder(path, run_line) as recorder:
        for number, group in enumerate(groups, 1):
            first = group[0]
            print(f"{number}/{len(groups)} H={first.H} T={first.T} {first.op}: {len(group)} points, "
                  f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
            measure(group, executors, recorder, args.rounds, args.samples, args.seed, deadline)
    if args.peers_site:
        remote.close()
    print(summary.text(records.load(path)))
    print(path)
    return 0


def plan(
    ops: Sequence[str],
    impls: Sequence[str] | None,
    tokens: Sequence[int],
    hidden: Sequence[int],
    timers: Sequence[str],
    l2: Sequence[str],
) -> list[list[Point]]:
    """Points in groups that are measured together, one an (H, T, op).

    Host timers go up to T = 256, warm, first H; `torch_compile` has the T of `COMPILED_TOKENS` alone.

    Raises:
        ValueError: an op, impl, timer or L2 state is unknown, a T or H is impossible, or nothing is left to measure.
    """
    groups = []
    unknown = [op for op in ops if op not in OPS] + [t for t in timers if t not in ("cuda_graph", *HOST_TIMERS)]
    unknown += [i for i in impls or () if not any(i in of_op for of_op in IMPLS.values())]
    unknown += [state for state in l2 if state not in records.L2_STATES]
    if unknown:
        raise ValueError(f"unknown op, timer, impl or L2 state: {', '.join(unknown)}")
    if few := [t for t in tokens if t < 1]:
        raise ValueError(f"T must be at least 1, got {few[0]}")
    for h in hidden:
        MHCConfig(h, HC)  # refuses an H that no kernel takes
        for t in tokens:
            for op in ops:
                group = [
                    Point(op, impl, t, h, HC, timer, state)
                    for impl in IMPLS[op]
                    if (impls is None or impl in impls) and (impl != "torch_compile" or t in COMPILED_TOKENS)
                    for timer in timers
                    for state in (l2 if timer == "cuda_graph" else ("warm",))
                    if timer == "cuda_graph" or (t <= HOST_TOKENS and h == hidden[0] and not impl.startswith("floor"))
                ]
                if group:
                    groups.append(group)
    if not groups:
        raise ValueError("nothing to measure: these ops, impls and timers have no point in common")
    return groups


def measure(
    group: Sequence[Point],
    executors: dict[str, Executor],
    recorder: records.Recorder,
    rounds: int,
    samples: int,
    seed: int,
    deadline: float | None = None,
) -> None:
    """Prepare a group, time it in shuffled rounds, append a line a point and round.

    A point that is absent, wrong or out of time gets one line that says so. With two processes the floors are timed in
    both, so that a record shows what the second process itself changes.
    """
    ready: dict[tuple[str, Point], dict[str, Any]] = {}
    for process, point in ((name, p) for p in group for name in _processes(p, executors)):
        late = deadline is not None and time.perf_counter() > deadline
        answer = (
            {"status": "skipped", "reason": "the time budget was used up", "error": None, "calls_per_sample": 1}
            if late
            else executors[process].prepare(point)
        )
        if answer["status"] == "ok":
            ready[process, point] = answer
        else:
            recorder.point(**_line(point, process, answer, round_=0, order=0, samples_us=[]))
    # in its turn, the published protocol repeats for a time of its own
    for round_, order, (process, point) in interleave(list(ready), rounds, seed + hash(group[0][2:4]) % 2**16):
        measured = executors[process].sample(point, samples)
        line = _line(point, process, ready[process, point], round_, order, [round(us, 4) for us in measured])
        recorder.point(**line)
    for executor in executors.values():
        executor.release()


def precompile(points: Sequence[Point], args: argparse.Namespace) -> None:
    """Run every (op, impl, T, H) once in a pool of processes, which fills the compilers' caches on disk in parallel."""
    jobs = list({(p.op, p.impl, p.T, p.H): p._replace(timer="eager", l2="warm") for p in points}.values())
    jobs = [job for job in jobs if not job.impl.startswith("floor")]
    random.Random(args.seed).shuffle(jobs)  # neighbours in T share a kernel: spread them over time
    started = time.perf_counter()
    peers = [job for job in jobs if job.impl in PEERS]
    ours = [job for job in jobs if job.impl not in PEERS]
    threads = []
    for work_list, site in ((peers, args.peers_site), (ours, [])):
        waiting: queue.SimpleQueue[Point] = queue.SimpleQueue()
        for job in work_list:
            waiting.put(job)
        count = min(len(work_list), max(1, args.precompile * len(work_list) // max(1, len(jobs))))
        threads += [threading.Thread(target=_drain, args=(waiting, args, site)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"precompiled {len(jobs)} points in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def _drain(waiting: queue.SimpleQueue[Point], args: argparse.Namespace, site: Sequence[str]) -> None:
    remote = Remote(args.seed, 4096, args.peers_python if site else sys.executable, site)
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            break
        answer = remote.prepare(job)
        if answer["status"] == "failed":
            print(f"precompile {job.op} {job.impl} T={job.T} H={job.H}: {answer['reason']}", file=sys.stderr)
        remote.release()
    remote.close()


def _processes(point: Point, executors: dict[str, Executor]) -> list[str]:
    if "peers" not in executors:
        return ["main"]
    if point.impl.startswith("floor"):
        return ["main", "peers"]
    return ["peers" if point.impl in PEERS else "main"]


def _line(
    point: Point, process: str, answer: dict[str, Any], round_: int, order: int, samples_us: list[float]
) -> dict[str, Any]:
    counted = work(point.op, point.impl, point.T, point.H, point.hc)
    published = point.timer == "published"
    return {
        **point._asdict(),
        "timer": "eager" if published else point.timer,
        "protocol": "published" if published else "rounds",
        "dtype": "bf16",
        "process": process,
        "round": round_,
        "order": order,
        "calls_per_sample": answer["calls_per_sample"],
        "bytes": counted.bytes,
        "flops": counted.flops,
        "status": answer["status"],
        "reason": answer["reason"],
        "error": answer["error"],
        "samples_us": samples_us,
    }
