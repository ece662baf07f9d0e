"""The norm of a layer input whose streams cancel: two ways to it, and how far each may be off.

`reference.pre` and the kernel `streams` sum up the squares of y = sum_j pre_j r_j. The kernel `quad` never exchanges y:
with G the streams' inner products, mean(y^2) = pre' G pre / H. Where the weighted streams nearly cancel, a small number
is made of large ones: its relative error grows with the square of `condition`, that of a sum of squares does not.

Letters as in `mhc.reference`; `r` [T, hc, H] bf16, `pre` [T, hc] the weights as a kernel holds them, fp32.

Sources: Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1, for sums. For those of tensor cores
Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores (2021): products are exact, cut off where
fp32 of the largest ends, added up without further error, and the sum is cut off again.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from mhc import reference
from mhc.arithmetic import U_BF16, U_FP32, dot
from mhc.arms import one_of
from mhc.config import MHCConfig
from mhc.error import TINY, gamma

NORMS = ("inner_products", "two_passes")
COLUMNS = 16  # of one sum on a tensor core
BLOCKS = 16  # that split a row


def cancelling_streams(kappa: Tensor, pre: Tensor, hidden: int, seed: int) -> Tensor:
    """Streams whose weighted sum has unit variance, however large they are themselves.

    All are y / sum(pre), most of them with noise on top; one stream takes up that noise, another its rounding to bf16.

    Args:
        kappa: [T], about the `condition` of each token, from 1, where all streams are alike, to some 10^5.
        pre: [T, hc], hc at least 3.
        hidden: H.
        seed: of an own generator.

    Returns:
        [T, hc, H] bf16.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, hc = pre.shape
    weights = pre.to(torch.float64)
    noisy = weights[:, :-2]
    noise = (kappa.square() - 1).sqrt() / (noisy.sum(-1) + noisy.square().sum(-1).sqrt())
    y = torch.randn(tokens, hidden, generator=generator).to(torch.float64)
    r = (y / weights.sum(-1, keepdim=True)).unsqueeze(1).repeat(1, hc, 1)
    r[:, :-2] += noise.view(-1, 1, 1) * torch.randn(tokens, hc - 2, hidden, generator=generator)
    r[:, :-2] = reference.round_bf16(r[:, :-2])
    for j in (hc - 1, hc - 2):
        missing = y - reference.collapse(r, weights)
        r[:, j] = reference.round_bf16(r[:, j] + missing / weights[:, j : j + 1])
    return r.to(torch.bfloat16)


def condition(r: Tensor, pre: Tensor) -> Tensor:
    """`kappa = sum_j pre_j |r_j| / |y|`, norms over the row. -> [T] fp64.

    1 where all streams point the same way, sqrt(hc) where they are orthogonal and weigh alike, without end where they
    cancel.
    """
    size, summed = _sizes(r, pre)
    return summed / size


def inner_products(r: Tensor) -> Tensor:
    """G as `quad` adds it up: 16 columns on a tensor core, then over a block's warps, then over blocks. -> [T, hc, hc].

    A tensor core keeps no bits beyond those of fp32 here, a real one may keep a few: the bounds need none.

    Raises:
        ValueError: H cannot be split among blocks and tensor cores.
    """
    tokens, hc, hidden = r.shape
    if hidden % (BLOCKS * COLUMNS):
        raise ValueError(f"H must be a multiple of {BLOCKS * COLUMNS}, got {hidden}")
    cols = r.to(torch.float64).view(tokens, hc, BLOCKS, -1, COLUMNS)
    out = torch.empty(tokens, hc, hc)
    for i, j in itertools.combinations_with_replacement(range(hc), 2):
        warps = _tensor_core_sum(cols[:, i] * cols[:, j])
        out[:, i, j] = out[:, j, i] = _serial_sum(_serial_sum(warps))
    return out


def mean_square(r: Tensor, pre: Tensor, norm: str) -> Tensor:
    """mean(y^2) as a kernel computes it. -> [T] fp32.

    Args:
        r: [T, hc, H] bf16.
        pre: [T, hc] fp32.
        norm: `inner_products`, as in `quad`, or `two_passes`: y, rounded to bf16, is squared and summed.

    Raises:
        ValueError: `norm` is unknown; as `inner_products`.
    """
    one_of("norm", norm, NORMS)
    hidden = r.shape[-1]
    if norm == "two_passes":
        y = reference.round_bf16(reference.collapse(r, pre))
        return dot(y.square(), y.new_ones(1, hidden)).squeeze(-1) / hidden
    products = inner_products(r)
    terms = torch.zeros(len(pre), COLUMNS)  # places of a half warp
    pairs = itertools.combinations_with_replacement(range(pre.shape[1]), 2)
    for place, (i, j) in enumerate(pairs):
        terms[:, place] = products[:, i, j] * pre[:, i] * pre[:, j] * (1 if i == j else 2)
    while terms.shape[1] > 1:
        upper, lower = terms.chunk(2, 1)
        terms = upper + lower
    return terms.squeeze(1).clamp(min=0) / hidden


def factor_error(r: Tensor, pre: Tensor, config: MHCConfig, norm: str) -> Tensor:
    """Relative error of `rsqrt(mean_square + norm_eps)`, against y in fp64 and without its rounding. -> [T] fp64."""
    size, _ = _sizes(r, pre)
    truth = torch.rsqrt(size.square() + config.norm_eps)
    return (torch.rsqrt(mean_square(r, pre, norm) + config.norm_eps) - truth).abs() / truth


def roundings(hidden: int) -> int:
    """c, such that `inner_products` errs by at most gamma_c sum_ij pre_i pre_j |r_i| |r_j| / H.

    On a tensor core each of 16 products is cut by up to 2 u of the largest, and their sum by 2 u of itself. A term then
    meets H / 256 - 1 roundings among a block's warps, 15 among blocks, two products with pre, four levels of a sum over
    the pairs of streams, and the division by H.
    """
    return 2 * (COLUMNS + 1) + hidden // (BLOCKS * COLUMNS) - 1 + BLOCKS - 1 + 2 + 4 + 1


def harmless_condition(hidden: int) -> float:
    """Up to which `condition` inner products move the norm's factor by at most 2^-8, as rounding y may an element."""
    return ((1 - (1 + U_BF16) ** -2) / gamma(roundings(hidden))) ** 0.5


def factor_bound(r: Tensor, pre: Tensor, config: MHCConfig, norm: str, pre_off: float = 0.0) -> Tensor:
    """Largest relative error of the norm's factor, `rsqrt(mean(y^2) + norm_eps)`, y before its rounding. -> [T] fp64.

    The mean is never below 0, neither in truth nor as computed, so that no factor is above rsqrt(norm_eps).

    Args:
        r, pre, norm: as `mean_square`; for `two_passes` the squares may be summed in any order.
        config: `norm_eps`.
        pre_off: largest relative error of what a kernel has for `pre`.
    """
    one_of("norm", norm, NORMS)
    hc, hidden, eps = r.shape[1], r.shape[2], config.norm_eps
    size, summed = _sizes(r, pre)
    mean = size.square()
    if norm == "inner_products":
        moved = pre_off * summed
        off = 2 * size * moved + moved.square() + gamma(roundings(hidden)) * ((1 + pre_off) * summed).square()
    else:
        moved = (pre_off + gamma(hc) * (1 + pre_off)) * summed
        moved = moved + U_BF16 * (size + moved)
        off = (2 * size * moved + moved.square()) * (1 + gamma(hidden)) + gamma(hidden) * mean
    above = torch.sqrt((mean + eps) / ((mean - off).clamp(min=0) + eps)) - 1
    below = 1 - torch.sqrt((mean + eps) / (mean + off + eps))
    relative = torch.maximum(above, below)
    return relative + 5 * U_FP32 * (1 + relative)  # eps, and the root to 2 ulp


def layer_input_bound(
    r: Tensor, pre: Tensor, norm_weight: Tensor, config: MHCConfig, norm: str, pre_off: float = 0.0
) -> Tensor:
    """Largest error of the normed layer input, its rounding to bf16 and that of y included. -> [T, H] fp64, absolute.

    Args:
        norm_weight: [H].
        r, pre, config, norm, pre_off: as `factor_bound`.
    """
    hc, weights = r.shape[1], pre.to(torch.float64)
    y = reference.collapse(r, weights)
    moved = (pre_off + gamma(hc) * (1 + pre_off)) * reference.collapse(r.abs(), weights)
    moved = moved + U_BF16 * (y.abs() + moved)
    factor = torch.rsqrt(y.square().mean(-1, keepdim=True) + config.norm_eps) * norm_weight.to(torch.float64).abs()
    relative = factor_bound(r, pre, config, norm, pre_off).unsqueeze(-1)
    off = factor * (moved * (1 + relative) + y.abs() * relative)
    return off + (U_BF16 + 2.1 * U_FP32) * (factor * y.abs() + off) + TINY


def _sizes(r: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean squares: of y, and of the weighted streams, added up. -> [T], [T] fp64."""
    weights = pre.to(torch.float64)
    y = reference.collapse(r, weights)
    streams = r.to(torch.float64).square().mean(-1).sqrt()
    return y.square().mean(-1).sqrt(), (weights * streams).sum(-1)


def _tensor_core_sum(products: Tensor) -> Tensor:
    """Sum over the last axis as a tensor core does it. fp64, exact products -> fp32."""
    _, exponent = torch.frexp(products.abs().amax(-1, keepdim=True))
    products = torch.ldexp(torch.ldexp(products, 24 - exponent).trunc(), exponent - 24)
    total = products.sum(-1)
    _, exponent = torch.frexp(total)
    return torch.ldexp(torch.ldexp(total, 24 - exponent).trunc(), exponent - 24).to(torch.float32)


def _serial_sum(values: Tensor) -> Tensor:
    """Sum over the last axis in order, each step rounded to fp32."""
    first, *rest = values.unbind(-1)
    return sum(rest, start=first)
