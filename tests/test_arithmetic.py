"""The emulated arithmetic against exhaustive tables and exact sums."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhc import arithmetic
from mhc.arithmetic import ARITHMETICS, U_FP32, U_TF32, depth, dot, project, split_bf16
from mhc.error import gamma

normal_fp32 = st.floats(min_value=2.0**-100, max_value=2.0**100, width=32).flatmap(lambda v: st.sampled_from([v, -v]))


def every_bf16() -> torch.Tensor:
    """All finite bf16 from 0 upwards, in order."""
    return torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)


def test_ulp_of_every_bf16_is_the_distance_to_the_next() -> None:
    line = every_bf16().double()
    assert torch.equal(arithmetic.ulp_bf16(line[:-1]), line.diff())
    assert torch.equal(arithmetic.ulp_bf16(-line[:-1]), line.diff())


def test_err_ulp_of_a_correct_rounding_is_at_most_a_half() -> None:
    value = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    error = arithmetic.err_ulp(value.to(torch.bfloat16), value)
    assert 0.499 < error.max() < 0.50002  # torch goes by way of fp32, which rounds first


def test_steps_count_the_numbers_between() -> None:
    line = torch.cat([-every_bf16().flip(0), every_bf16()[1:]])  # -0 stands for both zeros
    at = torch.randint(len(line), (10_000, 2), generator=torch.Generator().manual_seed(0))
    a, b = line[at[:, 0]], line[at[:, 1]]
    assert torch.equal(arithmetic.steps_bf16(a, b), (at[:, 0] - at[:, 1]).abs().int())
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    assert arithmetic.steps_bf16(zeros, zeros.flip(0)).sum() == 0
    with pytest.raises(ValueError, match=r"b must be bfloat16, got torch\.float32"):
        arithmetic.steps_bf16(zeros, zeros.float())


@settings(max_examples=300, deadline=None)
@given(normal_fp32)
def test_tf32_roundings(value: float) -> None:
    mantissa, exponent = np.frexp(np.float64(value))
    nearest = np.ldexp(np.round(mantissa * 2**11), exponent - 11)  # numpy rounds ties to even
    truncated = np.ldexp(np.trunc(mantissa * 2**11), exponent - 11)
    one = torch.tensor([value], dtype=torch.float32)
    assert arithmetic.nearest_tf32(one).item() == nearest
    assert arithmetic.truncate_tf32(one).item() == truncated
    assert abs(nearest - value) <= U_TF32 * abs(value)
    assert abs(truncated - value) < 2 * U_TF32 * abs(value)


def test_tf32_keeps_what_it_can_hold_and_the_non_finite() -> None:
    kept = torch.tensor([0.0, 1.0, -1.5, 1 + 2.0**-10, torch.inf, -torch.inf])
    assert torch.equal(arithmetic.nearest_tf32(kept), kept)
    assert torch.equal(arithmetic.truncate_tf32(kept), kept)
    assert arithmetic.nearest_tf32(torch.tensor([torch.nan])).isnan().all()


@settings(max_examples=300, deadline=None)
@given(normal_fp32)
def test_three_bf16_parts_are_exact_and_two_are_not(value: float) -> None:
    one = torch.tensor([value], dtype=torch.float32)
    parts = split_bf16(one)
    assert sum(Fraction(part.item()) for part in parts) == Fraction(value)
    assert all(torch.equal(part, part.to(torch.bfloat16).float()) for part in parts)
    two = sum(Fraction(part.item()) for part in split_bf16(one, 2))
    assert abs(two - Fraction(value)) <= abs(Fraction(value)) / 2**16


@pytest.mark.parametrize("width", [1, 5, 16, 17, 64, 1000, 4096])
def test_dot_is_within_its_depth(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, w = torch.randn(3, width, generator=generator), torch.randn(5, width, generator=generator)
    error = (dot(x, w).double() - x.double() @ w.double().T).abs()
    assert (error <= gamma(depth(width)) * (x.double().abs() @ w.double().abs().T)).all()
    assert depth(width) <= width


def test_dot_of_integers_is_exact() -> None:
    x, w = torch.randint(-9, 10, (4, 1000)).float(), torch.randint(-9, 10, (6, 1000)).float()
    assert torch.equal(dot(x, w).double(), x.double() @ w.double().T)


def test_depth_grows_with_the_logarithm() -> None:
    assert [depth(n) for n in (1, 16, 17, 32, 33, 4096, 16384)] == [1, 16, 17, 17, 18, 24, 26]


def test_arithmetics_rank_as_their_weights_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 1024, generator=generator).bfloat16(), torch.randn(64, 1024, generator=generator)
    exact = x.double() @ w.double().T
    rms = {name: (project(x, w, name) - exact).square().mean().sqrt().item() for name in ARITHMETICS}
    assert rms["tf32_truncate"] > 1.5 * rms["tf32_nearest"] > 100 * rms["fp32"]
    assert rms["bf16x3"] < 2 * rms["fp32"] < 1000 * U_FP32 * 1024


def test_project_refuses() -> None:
    x, w = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(24, 64)
    with pytest.raises(ValueError, match=r"arithmetic must be one of tf32_truncate, .*, got 'fp8'"):
        project(x, w, "fp8")
    with pytest.raises(ValueError, match=r"x must be bfloat16, got torch\.float32"):
        project(x.float(), w, "fp32")
