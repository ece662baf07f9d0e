"""The norm of streams that cancel: the bound holds, adversaries come near it, a planted error breaks it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mhc import MHCConfig, cancellation, reference
from mhc.arithmetic import U_BF16, U_FP32
from mhc.cancellation import (
    NORMS,
    cancelling_streams,
    condition,
    factor_bound,
    factor_error,
    harmless_condition,
    inner_products,
    layer_input_bound,
    mean_square,
)

CONFIG = MHCConfig(hidden_size=512)
KAPPA = torch.logspace(0, 4.5, 64)


def problem(seed: int, hc: int = 4) -> tuple[Tensor, Tensor]:
    """Streams [T, hc, H] of every condition number, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    pre = torch.sigmoid(torch.randn(len(KAPPA), hc, generator=generator)) + CONFIG.pre_eps
    return cancelling_streams(KAPPA, pre, CONFIG.hidden_size, seed), pre


def layer_input(r: Tensor, pre: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    """The kernels' last steps, given what they have for mean(y^2)."""
    y = reference.round_bf16(reference.collapse(r, pre))
    return (y * torch.rsqrt(mean + CONFIG.norm_eps).unsqueeze(-1) * weight.float()).bfloat16()


@pytest.mark.parametrize("hc", [3, 4])
def test_the_problem_spans_all_condition_numbers(hc: int) -> None:
    r, pre = problem(0, hc)
    kappa = condition(r, pre)
    assert kappa[0] < 1 + 1e-4
    assert (kappa >= 1).all()
    assert ((kappa / KAPPA).log2().abs() < 1).all()
    assert (reference.collapse(r, pre.double()).square().mean(-1) - 1).abs().max() < 0.3


def test_condition_of_known_streams() -> None:
    x, half = torch.eye(4).repeat_interleave(64, 1).bfloat16(), torch.full((1, 4), 0.5)
    assert condition(x[None], half).item() == pytest.approx(2)  # orthogonal
    assert condition(x[:1].expand(1, 4, -1), half).item() == 1
    opposite = torch.stack([x[0], -x[0], x[1], 0 * x[1]])[None]
    assert condition(opposite, half).item() == pytest.approx(3)
    assert condition(opposite[:, :2], half[:, :2]).isinf()


@pytest.mark.parametrize("norm", NORMS)
def test_the_factor_stays_below_its_bound(norm: str) -> None:
    for seed in range(3):
        r, pre = problem(seed)
        for scale in (1.0, 2.0**-12):  # streams of unit size for some, far below the root of eps for others
            error, bound = factor_error(scale * r, pre, CONFIG, norm), factor_bound(scale * r, pre, CONFIG, norm)
            assert (error <= bound).all()
            assert bound.max() <= 1.1 * CONFIG.norm_eps**-0.5


def test_inner_products_lose_the_square_of_the_condition_and_two_passes_do_not() -> None:
    r, pre = problem(1)
    kappa = condition(r, pre)
    some = (kappa > 3) & (
        kappa < 3000
    )  # where the error is neither that of the last roundings nor as large as the mean
    inner, two = (factor_error(r, pre, CONFIG, norm) for norm in ("inner_products", "two_passes"))
    slope = np.polyfit(kappa[some].log(), inner[some].log(), 1)[0]
    assert 1.5 < slope < 2.5
    assert (two < U_BF16).all()
    assert inner[kappa > 5000].max() > 100 * U_BF16
    bound = factor_bound(r, pre, CONFIG, "inner_products")
    harmless = kappa <= harmless_condition(512)
    assert bound[harmless].max() <= U_BF16 + 6 * U_FP32 < bound[~harmless].min()


def test_an_adversary_comes_near_the_bound() -> None:
    """Of every 16 columns 15 have squares that end just below where the largest ends."""
    x = torch.full((1, 1, 512), 1.4140625 * 2.0**-12)
    x[..., ::16] = 1
    r, pre = x.expand(1, 4, -1).bfloat16(), torch.full((1, 4), 0.5)
    tiny = replace(CONFIG, norm_eps=1e-30)
    error, bound = factor_error(r, pre, tiny, "inner_products"), factor_bound(r, pre, tiny, "inner_products")
    assert bound / 3 < error
    assert error <= bound


def test_inner_products_of_integers_are_exact() -> None:
    r = torch.randint(-9, 10, (3, 4, 1024), generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(inner_products(r), torch.einsum("tih,tjh->tij", r.float(), r.float()))


def test_streams_that_cancel_exactly_have_the_factor_of_eps() -> None:
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    r, pre = torch.stack([x, -x, 0 * x, 0 * x], 1), torch.tensor([[0.7, 0.7, 0.3, 0.6]]).expand(8, 4)
    mean = mean_square(r, pre, "inner_products")
    assert (mean >= 0).all()
    weight = torch.ones(512).bfloat16()
    error = layer_input(r, pre, weight, mean).double().abs()
    assert (error <= layer_input_bound(r, pre, weight, CONFIG, "inner_products")).all()
    assert (error < 1e-3).all()


@pytest.mark.parametrize("pair", [*itertools.combinations_with_replacement(range(4), 2)], ids=str)
def test_an_inner_product_counted_once_too_little_breaks_the_bound(pair: tuple[int, int]) -> None:
    x = torch.randn(1, 1, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    r, pre, weight = x.expand(1, 4, -1), torch.full((1, 4), 0.5), torch.ones(512).bfloat16()
    bound = layer_input_bound(r, pre, weight, CONFIG, "inner_products")
    truth = reference.rms_norm(reference.collapse(r, pre.double()), weight, CONFIG.norm_eps)
    mean = mean_square(r, pre, "inner_products")
    lost = inner_products(r)[:, pair[0], pair[1]] * 0.25 / 512
    right, wrong = (layer_input(r, pre, weight, m).double() for m in (mean, mean - lost))
    assert ((right - truth).abs() <= bound).all()
    assert ((wrong - truth).abs() > bound).any()


@pytest.mark.parametrize("norm", NORMS)
def test_the_layer_input_stays_below_its_bound(norm: str) -> None:
    r, pre = problem(2)
    weight = (1 + 0.1 * torch.randn(512, generator=torch.Generator().manual_seed(0))).bfloat16()
    truth = reference.rms_norm(reference.collapse(r, pre.double()), weight, CONFIG.norm_eps)
    error = (layer_input(r, pre, weight, mean_square(r, pre, norm)).double() - truth).abs()
    bound = layer_input_bound(r, pre, weight, CONFIG, norm)
    assert (error <= bound).all()
    # at condition 1 little more than its own rounding, that of y, and that of y in the mean
    assert (bound[0] <= {"inner_products": 2.05, "two_passes": 3.05}[norm] * U_BF16 * truth[0].abs()).all()


def test_refusals() -> None:
    r, pre = problem(0)
    with pytest.raises(ValueError, match="norm must be one of inner_products, two_passes, got 'one_pass'"):
        mean_square(r, pre, "one_pass")
    with pytest.raises(ValueError, match="norm must be one of"):
        factor_bound(r, pre, CONFIG, "one_pass")
    with pytest.raises(ValueError, match="H must be a multiple of 256, got 320"):
        cancellation.inner_products(r[..., :320])
