"""Check every op's kernels with compute-sanitizer on this GPU and print one table.

    python -m mhc bench sanitize                                     every op, memcheck and racecheck, H 4096, T 9
    python -m mhc bench sanitize --ops post_pre,head --tools racecheck --limit-s 300

The kernels are compiled first, on all cores. Then every op is called once under every tool, in a process of its own and
one after the other: racecheck has not ended in 90 s for some, nor for four at once in 40 s. One T and H reach few of an
op's kernels: at --T 300 a cluster has several tiles, --H 7168 takes the kernels of other sizes. Exits with 1 unless all
are clean. compute-sanitizer is part of the CUDA toolkit. Where `MHC_KERNELS` is set, kernels missing there are added to
it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mhc
from mhc import export, launch
from mhc.bench import machine
from mhc.bench.inputs import Buffers, Inputs
from mhc.bench.options import words
from mhc.bench.work import BLOCK_TOKENS
from mhc.config import MHCConfig

SANITIZER = "compute-sanitizer"
SANITIZER_WHEEL = "nvidia-cuda-sanitizer-api"
# an op's own failure is told apart from what the tool found by `RAN`, not by its exit status
COMMON = ("--check-exit-code", "no", "--print-limit", "20", "--error-exitcode", "1")
RAN = "the op ran"
VOCAB = 64  # rows of the embedding and its table


class Tool(NamedTuple):
    """A tool of compute-sanitizer: its options, and what its last line counts."""

    options: tuple[str, ...]
    summary: str
    counted: str


TOOLS = {
    "memcheck": Tool((), r"ERROR SUMMARY: (\d+) error", "error"),
    "racecheck": Tool(("--racecheck-report", "all"), r"RACECHECK SUMMARY: (\d+) hazard", "hazard"),
}


class Row(NamedTuple):
    """One op under one tool."""

    op: str
    tool: str
    verdict: str
    is_clean: bool


def _first(inputs: Inputs) -> tuple[Any, ...]:
    w = inputs.first
    return w.fn_broadcast, w.scale, w.base, w.norm_weight, inputs.config


def _next(inputs: Inputs) -> tuple[Any, ...]:
    w = inputs.next
    return w.fn, w.scale, w.base, w.norm_weight, inputs.config


def _look_up(inputs: Inputs, b: Buffers) -> tuple[Any, ...]:
    return b.token_ids, inputs.embedding, inputs.table, inputs.first.norm_weight, inputs.config


def _build(inputs: Inputs, b: Buffers) -> tuple[Any, ...]:
    w = inputs.first
    return mhc.TokenTable.build, b.x, w.fn_broadcast, w.scale, w.base, inputs.config


def _head(inputs: Inputs, b: Buffers) -> tuple[Any, ...]:
    w, hc = inputs.next, inputs.config.hc_mult
    return mhc.head, b.streams, w.fn[:hc], w.scale[:1], w.base[:hc], inputs.config


def _streams(b: Buffers) -> tuple[Any, ...]:
    return b.output, b.streams, b.post, b.comb


def _embeddings(b: Buffers) -> tuple[Any, ...]:
    return b.output, b.x, b.post.squeeze(-1), None


# a function and its arguments, for each op in each form that has a kernel of its own
OPS: dict[str, Callable[[Inputs, Buffers], tuple[Any, ...]]] = {
    "pre_broadcast": lambda i, b: (mhc.pre_broadcast, b.x, *_first(i)),
    "pre_broadcast-collapsed": lambda i, b: (partial(mhc.pre_broadcast, collapse=True), b.x, *_first(i)),
    "pre_broadcast-two_launch": lambda i, b: (partial(mhc.pre_broadcast, impl="two_launch"), b.x, *_first(i)),
    "pre_noise_rows": lambda i, b: (mhc.pre_noise_rows, b.anchors, b.noise, BLOCK_TOKENS, *_first(i)),
    "pre_from_table": lambda i, b: (mhc.pre_from_table, *_look_up(i, b)),
    "pre_from_table-collapsed": lambda i, b: (partial(mhc.pre_from_table, collapse=True), *_look_up(i, b)),
    "table_build": _build,
    "pre": lambda i, b: (mhc.pre, b.streams, *_next(i)),
    "post": lambda i, b: (mhc.post, *_streams(b)),
    "post-collapsed": lambda i, b: (mhc.post, *_embeddings(b)),
    "post_pre": lambda i, b: (mhc.post_pre, *_streams(b), *_next(i)),
    "post_pre-collapsed": lambda i, b: (mhc.post_pre, *_embeddings(b), *_next(i)),
    "head": _head,
}


def call(op: str, config: MHCConfig, tokens: int, device: str) -> Any:
    """Call an op of `OPS` once on random inputs of T = `tokens`; returns what it returns.

    Inputs are drawn on the CPU: on the GPU hardly anything but the op's own kernels runs, and is watched.
    """
    inputs = Inputs(config, seed=0, device="cpu", vocab=VOCAB)
    (buffers,) = inputs.buffers(tokens, sets=1)

    def moved(value: Any) -> Any:
        if isinstance(value, mhc.TokenTable):
            post, comb, factor = (tensor.to(device) for tensor in value.tensors)
            return mhc.TokenTable(post, comb, factor, value.config)
        return value.to(device) if isinstance(value, Tensor) else value

    with torch.no_grad():
        function, *arguments = OPS[op](inputs, buffers)
        return function(*map(moved, arguments))


def find_sanitizer() -> str:
    """compute-sanitizer: on PATH, in the toolkit that `CUDA_HOME` or `CUDA_PATH` names, beside nvcc, or from its wheel.

    Raises:
        RuntimeError: it is in none of them.
    """
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        homes.append(Path(nvcc).resolve().parents[1])
    folders = [os.environ.get("PATH", os.defpath), *(str(home / sub) for home in homes for sub in ("bin", SANITIZER))]
    try:
        wheel = importlib.metadata.files(SANITIZER_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        wheel = []
    folders += [str(Path(str(file.locate())).parent) for file in wheel if file.name == SANITIZER]
    found = shutil.which(SANITIZER, path=os.pathsep.join(folders))
    if not found:
        raise RuntimeError(
            f"{SANITIZER} is neither on PATH nor beside nvcc: `pip install {SANITIZER_WHEEL}`, in the version of your "
            "CUDA toolkit, or set CUDA_HOME to a toolkit that has it"
        )
    return found


def watch(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """Run a command into a log that begins with it; returns its exit status, or None after `limit_s` seconds.

    It and what it started are killed then, and where the wait is interrupted.
    """
    with log.open("w") as file:
        print("$", shlex.join(command), file=file, flush=True)
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def verdict(tool: Tool, output: str, status: int) -> tuple[str, bool]:
    """What a tool found, and whether that is nothing; where the tool or the op failed, what it said last.

    Args:
        tool: of `TOOLS`.
        output: of the tool and the op together.
        status: exit status; not 0 where the tool found something either.
    """
    counts = re.findall(tool.summary, output)
    count = int(counts[-1]) if counts else 0
    if count or (counts and status == 0 and RAN in output):
        return f"{count} {tool.counted}{'' if count == 1 else 's'}", count == 0
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith("=====")]  # the op's, not the tool's
    return f"failed: {(own or lines or [f'exit status {status}'])[-1]}", False


def sanitize(op: str, tool: str, args: argparse.Namespace, sanitizer: str, environment: Mapping[str, str]) -> Row:
    """Run one op under one tool, in a process of its own."""
    options = ("--tool", tool, *TOOLS[tool].options, *COMMON)
    child = (sys.executable, "-m", "mhc.bench.sanitize", op, str(args.H), str(args.T))
    log = args.out / f"{op}-{tool}.log"
    status = watch([sanitizer, *options, *child], environment, log, args.limit_s)
    if status is None:
        return Row(op, tool, f"did not end in {args.limit_s:g} s", False)
    output = log.read_text(errors="replace").partition("\n")[2]
    return Row(op, tool, *verdict(TOOLS[tool], output, status))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--T", type=int, default=9, help="tokens (default: %(default)s)")
    parser.add_argument("--H", type=int, default=4096, help="hidden size (default: %(default)s)")
    parser.add_argument("--ops", type=words, default=tuple(OPS), help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument("--tools", type=words, default=tuple(TOOLS), help=f"of {', '.join(TOOLS)} (default: both)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for each process (default: %(default)g)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/sanitize"),
        help="folder of the logs, one a process (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    config = MHCConfig(args.H)  # refuses an H that no kernel takes
    for option, known in (("ops", OPS), ("tools", TOOLS)):
        if unknown := [word for word in getattr(args, option) if word not in known]:
            raise ValueError(f"--{option} must be of {', '.join(known)}, got {unknown[0]!r}")
    if args.T < 1:
        raise ValueError(f"--T must be at least 1, got {args.T}")
    if not args.limit_s > 0:
        raise ValueError(f"--limit-s must be above 0, got {args.limit_s:g}")
    if not torch.cuda.is_available():
        print("mhc bench sanitize: no CUDA GPU here; without one, `make test` runs the kernels on the CPU",
              file=sys.stderr)  # fmt: skip
        return 2
    sanitizer, arch = find_sanitizer(), launch.target(0)["arch"]
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mhc-kernels-") as fresh:
        # or the sanitizer would watch nvcc for a minute
        folder, started = Path(os.environ.get(export.FOLDER) or fresh), time.perf_counter()
        kernels = export.export_kernels(folder, config, args.T, arch, os.cpu_count() or 1)
        print(f"{len(kernels)} kernels compiled in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        rows = _sanitize_all(args, sanitizer, _environment(folder))
    print(table(rows))
    unclean = sum(not row.is_clean for row in rows)
    print(f"{unclean} of {len(rows)} are not clean; logs in {args.out}" if unclean else f"all {len(rows)} are clean")
    return 1 if unclean else 0


def _sanitize_all(args: argparse.Namespace, sanitizer: str, environment: Mapping[str, str]) -> list[Row]:
    rows: list[Row] = []
    pairs = [(op, tool) for op in args.ops for tool in args.tools]
    for number, (op, tool) in enumerate(pairs, 1):
        started = time.perf_counter()
        rows.append(sanitize(op, tool, args, sanitizer, environment))
        print(f"{number}/{len(pairs)} {op} {tool}: {rows[-1].verdict}, {time.perf_counter() - started:.0f} s",
              file=sys.stderr, flush=True)  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> str:
    """op, tool and verdict as aligned columns."""
    cells = [("op", "tool", "verdict"), *(row[:3] for row in rows)]
    op, tool = (max(len(line[i]) for line in cells) for i in range(2))
    return "\n".join(f"{line[0]:{op}}  {line[1]:{tool}}  {line[2]}" for line in cells)


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": machine.python_path(),
        export.FOLDER: str(folder.resolve()),
        # a tensor is then an allocation of its own, whose end memcheck knows
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }


def main(argv: Sequence[str]) -> int:
    """The process that is watched: op, H and T."""
    op, hidden, tokens = argv
    call(op, MHCConfig(int(hidden)), int(tokens), "cuda")
    torch.cuda.synchronize()
    print(RAN)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
