"""Bugs planted into the generated CUDA of a real kernel, to see that the emulator would notice them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from cuda_on_cpu.guarded import KernelError
from cuda_on_cpu.runner import Emulated
from torch import Tensor

from mhc import launch
from mhc.config import MHCConfig

from .builds import Builds, Variant, lowered, one_cluster, variants
from .conftest import EmulatedLaunch
from .table import op_named, problem

BARRIER = re.compile(
    # the one behind the initialisation of barriers is TileLang's own
    r"(?<!barrier_init\(\);\n  )__syncthreads\(\);|__syncwarp\(\);|tl::cluster_\w+\(\);"
    r"|tl::__sync_thread_partial\([^;]*\);|tl::__named_barrier_arrive\([^;]*\);"
    r"|\w+\[[^;{}]*\]\.wait\([^;]*\);|tl::cp_async_wait<\d+>\(\);"
)
SEEDS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Victim:
    """A kernel that is broken.

    Args:
        op: name of its op.
        hidden: H.
        tokens: as many as make many steps of one cluster.
        removed: what is removed, each alone.
        redundant: how many of these change nothing.
    """

    op: str
    hidden: int
    tokens: int
    removed: re.Pattern[str]
    redundant: int

    @property
    def config(self) -> MHCConfig:
        return MHCConfig(self.hidden)

    @property
    def variant(self) -> Variant:
        with one_cluster():
            return variants(op_named(self.op), self.config, (self.tokens,))[0]

    def begin(self, builds: Builds) -> None:
        builds.want(self.variant)

    def removals(self) -> list[tuple[int, int]]:
        """Spans of what is removed, each alone."""
        return [match.span() for match in self.removed.finditer(lowered(self.variant).source)]

    def __str__(self) -> str:
        return self.op


VICTIMS = (
    # a cluster's first meeting, of workers and of comb's warp; one warp's lanes, which its shuffles order here
    Victim("pre_broadcast-fused", 64, 11, BARRIER, 3),
    # two that hold the compiler back, one that only more steps than a batch would need, one warp's lanes, as above
    Victim("post_pre", 512, 47, BARRIER, 4),
)


def shifted(source: str, tensor: str) -> str:
    """The source with every store to `tensor` eight elements late."""
    source = source.replace(f"(&({tensor}[", f"(&({tensor}[8 + ")  # the target of a bulk copy or a cached store
    return re.sub(rf"(?m)^(\s*)\*\((\w+)\*\)\({tensor} \+ |^(\s*){tensor}\[", _eight_late(tensor), source)


def _eight_late(tensor: str) -> Callable[[re.Match[str]], str]:
    def replacement(match: re.Match[str]) -> str:
        if match[2]:
            return f"{match[1]}*({match[2]}*)({tensor} + 8 + "
        return f"{match[3]}{tensor}[8 + "

    return replacement


def verdict(victim: Victim, edit: tuple[int, int] | str) -> str:
    """Run the op with one bug planted.

    Args:
        victim: the kernel.
        edit: the span of source to remove, or the tensor whose stores to shift.

    Returns:
        How it was noticed, or `unnoticed`; and what the bug was.
    """
    kernel = lowered(victim.variant)
    source = kernel.source
    if isinstance(edit, str):
        bug, broken = f"stores to {edit}", Emulated(kernel, lambda text: shifted(text, edit))
    else:
        start, end = edit
        bug = f"line {source[:start].count(chr(10)) + 1}: {source[start:end]}"
        broken = Emulated(kernel, lambda text: text[:start] + text[end:])
    want = _wanted(victim)
    for seed in SEEDS:
        try:
            got = _outputs(victim, broken, seed)
        except (KernelError, AssertionError) as error:
            return f"{bug}: {error}"
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True)):
            return f"{bug}: wrong"
    return f"{bug}: unnoticed"


@functools.cache
def _wanted(victim: Victim) -> list[Tensor]:
    return _outputs(victim, Emulated(lowered(victim.variant)), 0)


class One:
    """Builds that know one kernel."""

    def __init__(self, emulated: Emulated) -> None:
        self._emulated = emulated

    def emulated(self, variant: object) -> Emulated:
        return self._emulated


def _outputs(victim: Victim, emulated: Emulated, seed: int) -> list[Tensor]:
    on_emulator = EmulatedLaunch(One(emulated))
    on_emulator.seed = seed
    with mock.patch.object(launch, "kernel", on_emulator.kernel):
        return [t.contiguous() for t in op_named(victim.op).call(problem(victim.config, victim.tokens))]
