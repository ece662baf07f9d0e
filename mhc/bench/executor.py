"""Where points run: in this process, or in one that sees other packages (a peer that needs another TileLang).

Both answer the same three calls, `prepare`, `sample` and `release`, so that a round can alternate between them; a
process leaves the GPU idle before it answers, so they never run at the same time. A remote one speaks JSON lines over
its standard input and output.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any, NamedTuple, Protocol

import torch

from mhc.bench import impls, machine, timing
from mhc.bench.inputs import VOCAB, Inputs
from mhc.bench.work import work
from mhc.config import MHCConfig

PUBLISHED_MS = (100.0, 500.0)  # warm-up and repeats of the published H20 figures
PUBLISHED_CALLS = 50


class Point(NamedTuple):
    """One thing to time. `timer` is a name of `timing.TIMERS`, or `published`: eager, by the published protocol."""

    op: str
    impl: str
    T: int
    H: int
    hc: int
    timer: str
    l2: str


class Executor(Protocol):
    """Runs points."""

    def prepare(self, point: Point) -> dict[str, Any]:
        """Check and set up; returns `status`, `reason`, `error` and `calls_per_sample`."""

    def sample(self, point: Point, n: int) -> list[float]:
        """n samples of a prepared point, us per call (the published protocol repeats for a time instead)."""

    def release(self) -> None:
        """Free what was prepared."""


class Local:
    """Runs points in this process, ours and peers' alike without gradients, as a server does.

    Args:
        seed: of the inputs.
        vocab: rows of the embedding that first-layer tokens are drawn from.
        device: `cuda`; `cpu` serves tests with timers of their own.
    """

    def __init__(self, seed: int, vocab: int = VOCAB, device: str = "cuda") -> None:
        self._seed, self._vocab, self._device = seed, vocab, device
        self._inputs: Inputs | None = None
        self._timers: dict[Point, timing.Timer] = {}
        self._checked: dict[tuple[str, str, int, int], tuple[list[timing.Call], float | None] | impls.Skip] = {}

    @torch.no_grad()
    def prepare(self, point: Point) -> dict[str, Any]:
        answer: dict[str, Any] = {"status": "ok", "reason": "", "error": None, "calls_per_sample": 1}
        try:
            calls, answer["error"] = self._calls(point)
            self._timers[point] = self._timer(point, calls)
        except impls.Skip as skip:
            return answer | {"status": skip.status, "reason": skip.reason}
        except Exception as error:  # out of memory, a capture that fails: recorded, and the sweep goes on
            return answer | {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        return answer | {"calls_per_sample": self._timers[point].calls_per_sample}

    @torch.no_grad()
    def sample(self, point: Point, n: int) -> list[float]:
        timer = self._timers[point]
        if point.timer == "published" and isinstance(timer, timing.EagerTimer):
            return timer.sample_for(*PUBLISHED_MS)
        return timer.sample(n)

    def release(self) -> None:
        self._timers.clear()
        self._checked.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _timer(self, point: Point, calls: Sequence[timing.Call]) -> timing.Timer:
        if point.timer == "published":
            return timing.EagerTimer(calls, PUBLISHED_CALLS)
        return timing.TIMERS[point.timer](calls)

    def _calls(self, point: Point) -> tuple[list[timing.Call], float | None]:
        if self._inputs is None or self._inputs.config.hidden_size != point.H:
            torch.compiler.reset()  # another H is compiled on its own, not as a dynamic shape
            self._inputs = None  # before the next embedding is made: it is large
            self._inputs = Inputs(MHCConfig(point.H, point.hc), self._seed, self._device, self._vocab)
        sets = 1
        if point.l2 == "cold":
            moved = work(point.op, point.impl, point.T, point.H, point.hc).bytes
            if not moved:
                raise impls.Skip("skipped", "an empty kernel reads nothing that could be cold")
            sets = timing.cold_sets(moved, torch.cuda.get_device_properties(0).L2_cache_size)
        key = (point.op, point.impl, point.T, sets)
        if key not in self._checked:
            try:
                self._checked[key] = impls.prepare(self._inputs, point.op, point.impl, point.T, sets)
            except impls.Skip as skip:
                self._checked[key] = skip
        found = self._checked[key]
        if isinstance(found, impls.Skip):
            raise found
        return found


class Remote:
    """Runs points in a process of its own.

    Args:
        seed, vocab: as for `Local`.
        python: its interpreter.
        site: folders that come first on its PYTHONPATH, such as a peer's packages.

    Raises:
        RuntimeError: the process ended or answered with an error.
    """

    def __init__(self, seed: int, vocab: int = VOCAB, python: str = sys.executable, site: Sequence[str] = ()) -> None:
        environment = os.environ | {"PYTHONPATH": machine.python_path(*site)}
        if site and "TILELANG_CACHE_DIR" in environment:  # two versions of TileLang must not share a cache
            environment["TILELANG_CACHE_DIR"] += "-peers"
        self._process = subprocess.Popen(
            [python, "-m", "mhc.bench.executor", str(seed), str(vocab)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def prepare(self, point: Point) -> dict[str, Any]:
        return self._ask("prepare", point)

    def sample(self, point: Point, n: int) -> list[float]:
        return self._ask("sample", point, n)

    def release(self) -> None:
        self._ask("release")

    def versions(self) -> dict[str, str]:
        """Package versions that the process sees, and what in them is a stub."""
        return self._ask("versions")

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, name: str, *args: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([name, *args]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the peers' process ended with status {process.wait()} during {name}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the peers' process failed in {name}: {answer['error']}")
        return answer["result"]


def serve(executor: Executor, commands: IO[str], answers: IO[str]) -> None:
    """Answer JSON lines `[name, *args]` until the input ends."""
    from mhc.bench import peers

    for line in commands:
        name, *args = json.loads(line)
        try:
            if name == "versions":
                result: Any = machine.versions() | peers.stubs()
            elif name == "release":
                executor.release()
                result = None
            elif name == "prepare":
                result = executor.prepare(Point(*args[0]))
            elif name == "sample":
                result = executor.sample(Point(*args[0]), args[1])
            else:
                raise ValueError(f"name must be prepare, sample, release or versions, got {name!r}")
            answer = {"result": result}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(argv: Sequence[str]) -> int:
    """The remote process: what libraries print goes to standard error, answers alone to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Local(int(argv[0]), int(argv[1])), sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
