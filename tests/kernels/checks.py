"""What the kernels have to hold on the emulator: each check runs in a process of the pool, beside the other tests.

A test names its check in its parameter, a `Case`, and waits for it; what an assertion of it says stands in the
traceback of the process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from mhc import launch
from mhc.config import MHCConfig

from .builds import FEWEST, Builds, Variant, one_cluster, variants
from .conftest import EmulatedLaunch
from .table import Op, Problem, assert_close_to_fp64, bits, problem

SMALL, REAL = 64, (4096, 5120, 7168)
SMALL_QUAD = 512  # the kernel of that name takes no 64; two of its 16 warps then have columns
SEEDS = (0, 1, 2)  # forward, backward, shuffled
FEW = (1, 3, 65)
EVERY_TILE = (1, 16, 40, 65, 121, 256)
STEPS = 6  # the last one not full: more than any kernel has buffers, so that each is used again
ANY = (*range(1, 150), 256, 600, 699)

Check = Callable[["Case", EmulatedLaunch], None]


@dataclass(frozen=True)
class Case:
    """A check of an op at one H and hc; `tokens` are the T it runs at, `scarce` says with a single cluster."""

    check: Check
    op: Op
    hidden: int
    tokens: tuple[int, ...]
    scarce: bool = False
    hc: int = 4

    @property
    def config(self) -> MHCConfig:
        return MHCConfig(self.hidden, self.hc)

    def variants(self) -> list[Variant]:
        with one_cluster() if self.scarce else contextlib.nullcontext():
            return variants(self.op, self.config, self.tokens)

    def begin(self, builds: Builds) -> None:
        for variant in self.variants():
            builds.want(variant)

    def begin_check(self, builds: Builds) -> Future[None]:
        return builds.submit(self, run, self)

    def __str__(self) -> str:
        return f"{self.op}-H{self.hidden}" + (f"-hc{self.hc}" if self.hc != 4 else "")


@functools.cache
def _own_builds() -> Builds:
    return Builds()


def run(case: Case) -> None:
    """A case's check, here."""
    on_emulator = EmulatedLaunch(_own_builds())
    with mock.patch.object(launch, "kernel", on_emulator.kernel):
        case.check(case, on_emulator)


@functools.cache
def inputs(config: MHCConfig) -> Problem:
    """As many rows as any check at this H takes."""
    return problem(config, EVERY_TILE[-1] if config.hidden_size in (SMALL, SMALL_QUAD) else FEW[-1])


def against_fp64(case: Case, on_emulator: EmulatedLaunch) -> None:
    """fp32 outputs are within twice the error of torch's own fp32, bf16 ones within their roundings."""
    op, all_rows = case.op, inputs(case.config)
    for tokens in FEW:
        p = all_rows.rows(tokens)
        first: tuple[Tensor, ...] = ()
        for seed in SEEDS:
            on_emulator.seed, on_emulator.launches = seed, 0
            got = op.call(p)
            assert on_emulator.launches == op.launches
            if first:
                for a, b in zip(first, got, strict=True):
                    assert torch.equal(bits(a), bits(b)), f"{op} depends on the order of threads, T = {tokens}"
            first = first or got
        assert_close_to_fp64(op, p, first)


def a_row_is_the_same_at_every_t(case: Case, on_emulator: EmulatedLaunch) -> None:
    """Bitwise, through every tile size, and so for any batch it may be part of."""
    assert set(variants(case.op, case.config, EVERY_TILE)) == set(variants(case.op, case.config, ANY))
    on_emulator.seed = 3
    largest = case.op.call(inputs(case.config).rows(EVERY_TILE[-1]))
    for tokens in EVERY_TILE[:-1]:
        got = case.op.call(inputs(case.config).rows(tokens))
        for a, b in zip(got, largest, strict=True):
            assert torch.equal(bits(a), bits(b[:tokens])), f"T = {tokens} differs from T = {EVERY_TILE[-1]}"


def a_cluster_takes_many_tiles(case: Case, on_emulator: EmulatedLaunch) -> None:
    """With bitwise the results of many clusters."""
    name = variants(case.op, case.config, (1,))[0][0]
    p = inputs(case.config).rows(STEPS * FEWEST.get(name, 2) - 1)
    plenty = case.op.call(p)
    for on_emulator.seed in (*SEEDS, 3):
        with one_cluster():
            got = case.op.call(p)
        for a, b in zip(got, plenty, strict=True):
            assert torch.equal(bits(a), bits(b)), f"order {on_emulator.seed}"


def comb_of_more_steps_than_a_batch(case: Case, on_emulator: EmulatedLaunch) -> None:
    p = problem(case.config, *case.tokens)
    with one_cluster():
        assert_close_to_fp64(case.op, p, case.op.call(p))


def a_nan_stays_in_its_row(case: Case, on_emulator: EmulatedLaunch) -> None:
    clean = inputs(case.config).rows(65)
    dirty = clean.with_nan(9)
    others = torch.arange(65) != 9
    for a, b in zip(case.op.call(clean), case.op.call(dirty), strict=True):
        assert torch.equal(bits(a[others]), bits(b[others]))
        assert b[9].isnan().all()
