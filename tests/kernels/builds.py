"""Kernels built ahead, two processes at a time: lowered, compiled for the CPU, compiled for sm_90a.

`conftest.py` begins with the session; a test's parameter with a method `begin(builds)` says what the test will need.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cuda_on_cpu.compile import Usage, compile_sources
from cuda_on_cpu.lowering import SIMT, Lowered, lower_cached
from cuda_on_cpu.runner import Emulated

from mhc import cuda, launch
from mhc.config import MHCConfig
from mhc.kernels.parts import PASS_CONFIGS
from mhc.kernels.quad_dot import TILE

from .table import Op, problem

CONFIGS = {**PASS_CONFIGS, **SIMT}  # SIMT changes nothing about our kernels, which a test shows
FEWEST = {"streams": 2, "quad": TILE}  # tokens at a time, for many steps
Variant = tuple[Any, ...]  # name of the kernel, arguments of its factory


@contextlib.contextmanager
def one_cluster() -> Iterator[None]:
    """Every launch has a single cluster that takes few tokens at a time, two, `quad` eight: many steps."""

    def pick(config: MHCConfig, tokens: int) -> launch.Variant:
        return launch.Variant(math.inf, 2, 1)

    def pick_of_streams(config: MHCConfig, tokens: int, has_norm: bool, source: str) -> Variant:
        name = launch.of_streams(config, tokens, has_norm, source)[0]
        tile = () if name == "quad" else (FEWEST[name],)
        return name, config, *tile, 1, has_norm, source

    prepared = functools.cache(cuda.prepared.__wrapped__)  # what is kept was picked otherwise
    with mock.patch.multiple(cuda, one_stream=pick, of_streams=pick_of_streams, prepared=prepared):
        yield


def variants(op: Op, config: MHCConfig, tokens: Iterable[int]) -> list[Variant]:
    """The kernels that `op` launches for these numbers of tokens, found by calling it on meta tensors."""
    found: dict[Variant, None] = {}

    def note(device: int, *variant: Any) -> Callable[..., None]:
        found[variant] = None
        return lambda *tensors: None

    with mock.patch.object(launch, "kernel", note):
        most = problem(config, max(tokens, default=0), device="meta")
        for count in tokens:
            op.call(most.rows(count))
    return list(found)


@functools.cache
def _sources_digest() -> str:
    files = sorted(Path(launch.__file__).parent.glob("kernels/*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def lowered(variant: Variant) -> Lowered:
    """The kernel's CUDA, from the disk when the kernels' sources have not changed."""
    torch.set_num_threads(1)
    return lower_cached(_sources_digest() + repr(variant), lambda: launch.prim_func(*variant), CONFIGS)


def build_emulation(variant: Variant) -> None:
    """Leave the kernel's CPU library in the cache."""
    Emulated(lowered(variant))


def build_cubins(group: list[Variant]) -> list[tuple[Variant, list[Usage]]]:
    """Compile for sm_90a."""
    return list(zip(group, compile_sources([lowered(variant).source for variant in group]), strict=True))


class Builds:
    """Hands out built kernels, waiting where one is still being built."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[Any, Future[Any]] = {}
        self._emulated: dict[Variant, Emulated] = {}

    def submit(self, key: Any, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a job once."""
        if key not in self._futures:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(2, context, os.nice, (10,))  # the tests come first
            self._futures[key] = self._pool.submit(job, *arguments)
        return self._futures[key]

    def want(self, variant: Variant) -> None:
        """Begin to build an emulation."""
        self.submit(variant, build_emulation, variant)

    def emulated(self, variant: Variant) -> Emulated:
        """The emulation, built."""
        if variant not in self._emulated:
            if variant in self._futures:
                self._futures[variant].result()
            self._emulated[variant] = Emulated(lowered(variant))  # built here where no one began
        return self._emulated[variant]

    def close(self) -> None:
        """Drop what has not begun."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
