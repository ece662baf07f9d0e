"""Three clocks, never mixed: device time of a graph's replay, eager time between events, host time of a call.

A *case* is a list of closures that do the same work on different buffers. With warm L2 the list has one closure and
everything it reads stays in L2; with cold L2 the closures rotate over more than three L2 sizes, so that each finds
its buffers evicted. Every sample is kept, in microseconds per call.

Clocks are measured in rounds: `interleave` gives every case a turn a round, in an order drawn anew each round, so that
a drift of clocks or temperature hits all alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key")

COLD_FACTOR = 3  # buffers of a cold case, in L2 sizes
MIN_CALLS, MAX_CALLS = 20, 400  # calls a graph holds with warm L2
TARGET_US = 400.0  # length of a replay: long against the 2 us that an event pair can be off
WARM_UP = 3


class Timer(Protocol):
    """Measures one case; made once, sampled in every round."""

    calls_per_sample: int

    def sample(self, n: int) -> list[float]:
        """n samples, us per call."""


class GraphTimer:
    """Device time: `calls` captured back to back in one CUDA graph, replayed between two events.

    Each sample follows an untimed replay that is still running when the timed one is enqueued: the host's launch cost
    hides behind it, and the caches are in the state in which the graph itself leaves them.

    Args:
        calls: the closures of a case. Outputs of several are kept, so that rotating calls write different memory; those
            of one are freed before it is called again, so that it writes where it did before, as a floor does.
        repeats: how often the list is captured; `None` aims at `TARGET_US` a replay.
    """

    def __init__(self, calls: Sequence[Call], repeats: int | None = None) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._calls = calls  # what they read must outlive the graph
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        if repeats is None and len(calls) == 1:
            self._capture(calls, MIN_CALLS)
            repeats = calls_for(min(self.sample(3)))
        self._capture(calls, repeats or 1)

    def _capture(self, calls: Sequence[Call], repeats: int) -> None:
        self.calls_per_sample = repeats * len(calls)
        self._graph = torch.cuda.CUDAGraph()
        self._outputs: list[object] = []
        with torch.cuda.graph(self._graph):
            for _ in range(repeats):
                self._outputs.clear()
                self._outputs += [call() for call in calls]
        if len(calls) == 1:
            self._outputs.clear()
        self._graph.replay()
        torch.cuda.synchronize()

    def sample(self, n: int) -> list[float]:
        start, end = self._events
        samples = []
        for _ in range(n):
            self._graph.replay()
            start.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / self.calls_per_sample)
        return samples


class EagerTimer:
    """What a caller sees: eager calls one after the other between two events, us per call.

    On a stream that the host cannot keep busy this is the host's time to get through a call.

    Args:
        calls: the closures of a case.
        calls_per_sample: calls between a pair of events; one pair a call would cost as much host time as a short call.
    """

    def __init__(self, calls: Sequence[Call], calls_per_sample: int = 10) -> None:
        self._calls, self.calls_per_sample = calls, calls_per_sample
        for _ in range(WARM_UP):
            calls[0]()
        torch.cuda.synchronize()

    def sample(self, n: int) -> list[float]:
        count = self.calls_per_sample
        batches = [[self._calls[(i * count + j) % len(self._calls)] for j in range(count)] for i in range(n)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        torch.cuda.synchronize()
        for batch, (start, end) in zip(batches, events, strict=True):
            start.record()
            for call in batch:
                call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / count for start, end in events]

    def sample_for(self, warm_up_ms: float, repeat_ms: float) -> list[float]:
        """The protocol of the published figures: eager, warm up for a time, then repeat for a time."""
        samples: list[float] = []
        for duration_ms in (warm_up_ms, repeat_ms):
            deadline, samples = time.perf_counter() + duration_ms * 1e-3, []
            while time.perf_counter() < deadline:
                samples += self.sample(10)
        return samples


class HostTimer:
    """Host cost of a call: the wall clock around a few calls, begun on an idle device, so that none waits for a queue.

    Args:
        calls: the closures of a case.
    """

    calls_per_sample = 10  # few enough that their launches never fill the stream's queue

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        for _ in range(WARM_UP):
            calls[0]()
        _synchronize()

    def sample(self, n: int) -> list[float]:
        count, samples = self.calls_per_sample, []
        for i in range(n):
            batch = [self._calls[(i * count + j) % len(self._calls)] for j in range(count)]
            _synchronize()
            start = time.perf_counter_ns()
            for call in batch:
                call()
            samples.append((time.perf_counter_ns() - start) * 1e-3 / count)
        _synchronize()
        return samples


TIMERS: dict[str, Callable[[Sequence[Call]], Timer]] = {
    "cuda_graph": GraphTimer,
    "eager": EagerTimer,
    "cpu_call": HostTimer,
}


def calls_for(estimate_us: float) -> int:
    """Calls a graph should hold so that a replay takes about `TARGET_US`."""
    return max(MIN_CALLS, min(MAX_CALLS, round(TARGET_US / max(estimate_us, 1e-3))))


def cold_sets(bytes_a_call: int, l2_bytes: int, most: int = 16384) -> int:
    """Buffer sets that a cold case rotates over: more than `COLD_FACTOR` L2 sizes in all, at least 2.

    Raises:
        ValueError: it would take more than `most` sets; each is one node of the graph.
    """
    sets = max(2, COLD_FACTOR * l2_bytes // bytes_a_call + 1)
    if sets > most:
        raise ValueError(f"bytes_a_call must be at least {COLD_FACTOR * l2_bytes // most} for a cold L2 of "
                         f"{l2_bytes} bytes, got {bytes_a_call}")  # fmt: skip
    return sets


def interleave(keys: Sequence[Key], rounds: int, seed: int) -> Iterator[tuple[int, int, Key]]:
    """(round, position in the round, key) with every key once a round, each round in its own random order."""
    generator = random.Random(seed)
    for round_ in range(rounds):
        order = list(keys)
        generator.shuffle(order)
        for position, key in enumerate(order):
            yield round_, position, key


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
