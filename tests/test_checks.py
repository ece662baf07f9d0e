"""The argument checks: every mismatch names the argument, what it must be and what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhc.checks import check

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16


def test_letters_bind_each_other_across_calls() -> None:
    dims: dict[str, int] = {}
    check(dims, CPU, a=(torch.zeros(3, 5), FP32, ("T", 5)), b=(torch.zeros(3, 7), FP32, ("T", "H")))
    assert dims == {"T": 3, "H": 7}
    check(dims, CPU, c=(torch.zeros(7), FP32, ("H",)))
    with pytest.raises(ValueError, match=r"d must be float32 \[3, 7\], got float32 \[3, 8\]"):
        check(dims, CPU, d=(torch.zeros(3, 8), FP32, ("T", "H")))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 4), r"x must be bfloat16 \[T, 4\], got float32 \[3, 4\]"),
        (torch.zeros(3, 5, dtype=BF16), r"x must be bfloat16 \[T, 4\], got bfloat16 \[3, 5\]"),
        (torch.zeros(4, dtype=BF16), r"x must be bfloat16 \[T, 4\], got bfloat16 \[4\]"),
        (torch.zeros(3, 4, 1, dtype=BF16), r"x must be bfloat16 \[T, 4\], got bfloat16 \[3, 4, 1\]"),
        (torch.zeros(4, 3, dtype=BF16).T, r"x must be contiguous, got strides \[1, 3\] for bfloat16 \[3, 4\]"),
        (torch.zeros(3, 4, dtype=BF16, device="meta"), "x must be on cpu, got meta"),
        ([[0.0] * 4], "x must be a tensor, got list"),
    ],
)
def test_refused(tensor: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check({}, CPU, x=(tensor, BF16, ("T", 4)))


def test_the_first_mismatch_is_the_one_named() -> None:
    with pytest.raises(ValueError, match=r"^b must"):
        check({}, CPU, a=(torch.zeros(2), FP32, (2,)), b=(torch.zeros(2), BF16, (2,)), c=(torch.zeros(3), FP32, (2,)))


@given(st.lists(st.integers(0, 4), max_size=4), st.lists(st.integers(0, 4), max_size=4))
def test_a_shape_of_numbers_fits_itself_alone(shape: list[int], other: list[int]) -> None:
    tensor = torch.zeros(shape)
    check({}, CPU, x=(tensor, FP32, tuple(shape)))
    letters = tuple("ABCD"[: len(shape)])
    dims: dict[str, int] = {}
    check(dims, CPU, x=(tensor, FP32, letters))
    assert dims == dict(zip(letters, shape, strict=True))
    if other != shape:
        with pytest.raises(ValueError, match="x must be float32"):
            check({}, CPU, x=(tensor, FP32, tuple(other)))
