"""The norm of streams that cancel, without a GPU: the kernels' layer inputs keep the bounds of `mhc.cancellation`."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from cuda_on_cpu.runner import Emulated

from mhc import launch
from mhc.cancellation import condition
from mhc.config import MHCConfig

from .builds import lowered, variants
from .cancelling import CANCELLED, KINDS, assert_layer_input_within_bound, cancelling, ordinary, pre_of, rows
from .conftest import EmulatedLaunch
from .mutants import One
from .table import Op, bits

# `quad`, and `streams`, which sums squares: at the sizes of the other tests, which have built them
NORMS = {512: "inner_products", 64: "two_passes"}
TWICE = r"(0x1p\+1f/\*2\.0+e\+00\*/|2\.0+e\+00f)(?! \*)"  # the 2 of 2 sigmoid(z) is multiplied at once


@pytest.mark.parametrize("hidden", NORMS)
@pytest.mark.parametrize("op", CANCELLED, ids=str)
def test_streams_that_cancel(op: Op, hidden: int, on_emulator: EmulatedLaunch) -> None:
    p = cancelling(MHCConfig(hidden))
    got = op.call(p)
    assert_layer_input_within_bound(op, p, NORMS[hidden], got)
    others = rows(len(KINDS))
    for a, b in zip(got, op.call(ordinary(p)), strict=True):
        assert torch.equal(bits(a[others]), bits(b[others]))


def test_an_inner_product_counted_once_instead_of_twice_is_noticed() -> None:
    """Of two streams, at place 13 of 16; streams that are alike show it."""
    op, p = CANCELLED[0], cancelling(MHCConfig(512))
    kernel = lowered(variants(op, p.config, (len(p.x),))[0])
    once = Emulated(kernel, lambda text: re.sub(TWICE, "((int)threadIdx.x % 16 == 13 ? 1.0f : 2.0f)", text))
    with mock.patch.object(launch, "kernel", EmulatedLaunch(One(once)).kernel):
        got = op.call(p)
    with pytest.raises(AssertionError, match=r"condition 1: \d"):
        assert_layer_input_within_bound(op, p, NORMS[512], got)


def test_the_problem_has_the_condition_numbers_it_names() -> None:
    p = cancelling(MHCConfig(512))
    found = condition(p.residual, pre_of(p).expand(len(p.residual), -1))
    for place, kappa in enumerate(KINDS):
        of_kind = found[rows(place)]
        assert (of_kind / kappa).log2().abs().max() < 0.5 if kappa else of_kind.isinf().all()
