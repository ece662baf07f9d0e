"""The maths of mHC in plain torch, one function per formula, any float dtype, any device.

Letters: `T` tokens, `H` hidden, `hc` streams, `M = hc * (hc + 2)` mixing rows. `r` [T, hc, H] streams,
`x` [T, H] an embedding, `fn` [M, hc * H], `fn_broadcast` [M, H], `scale` [3], `base` [M].

Every function computes in the dtype of `fn` (or of its first argument where it has none) and never rounds on
its own: called in fp64 it is the ground truth of this repository, in fp32 the formula that torch users write.
The one place where bf16 enters is `round_bf16`, which the spec puts between the collapse and the norm.

Source: the mHC paper and DeepSeek-V4's published modules; notebook 01 proves what the broadcast case adds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc.config import MHCConfig


def fold(fn: Tensor, hc_mult: int) -> Tensor:
    """Sum the streams' columns: `fn_b = fn.view(M, hc, H).sum(1)`. [M, hc * H] -> [M, H], same dtype."""
    rows, width = fn.shape
    return fn.view(rows, hc_mult, width // hc_mult).sum(1)


def expand(x: Tensor, hc_mult: int) -> Tensor:
    """The repeat: `r_j = x` for every stream j. [T, H] -> [T, hc, H]."""
    return x.unsqueeze(-2).repeat(1, hc_mult, 1)


def mixes(flat: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """`m = (flat @ fn.T) * rsqrt(mean(flat^2) + rms_eps)`. [T, K], [M, K] -> [T, M]."""
    flat = flat.to(fn.dtype)
    return (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)


def gates(m: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Split the mixes [T, M] into `pre` [T, hc], `post` [T, hc] and `comb` [T, hc, hc].

    pre  = sigmoid(m[0:hc] * scale[0] + base[0:hc]) + pre_eps
    post = post_mult * sigmoid(m[hc:2hc] * scale[1] + base[hc:2hc])
    comb = sinkhorn(m[2hc:] * scale[2] + base[2hc:])
    """
    hc = config.hc_mult
    scale, base = scale.to(m.dtype), base.to(m.dtype)
    pre = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + config.pre_eps
    post = config.post_mult * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    logits = m[:, 2 * hc :] * scale[2] + base[2 * hc :]
    return pre, post, sinkhorn(logits.view(-1, hc, hc), config.sinkhorn_iters, config.sinkhorn_eps)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Alternate row and column normalisation, ending on columns. [..., hc, hc] -> [..., hc, hc].

    c = softmax(logits, rows) + eps;  c /= colsum(c) + eps;
    (iters - 1) times: c /= rowsum(c) + eps, c /= colsum(c) + eps
    """
    c = torch.softmax(logits, dim=-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def collapse(r: Tensor, pre: Tensor) -> Tensor:
    """`y = sum_j pre_j * r_j`. [T, hc, H], [T, hc] -> [T, H] in the dtype of `pre`."""
    return (pre.unsqueeze(-1) * r.to(pre.dtype)).sum(-2)


def round_bf16(y: Tensor) -> Tensor:
    """Round to bf16 and back: the spec's `bf16(y)`, in the dtype of `y`."""
    return y.to(torch.bfloat16).to(y.dtype)


def rms_norm(y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`y * rsqrt(mean(y^2) + eps) * weight`. [T, H], [H] -> [T, H]."""
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(y.dtype)


def pre(
    r: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pre map on materialised streams.

    Returns `pre` [T, hc], `post` [T, hc], `comb` [T, hc, hc] and the layer input [T, H] (un-normed when
    `norm_weight` is None), all in the dtype of `fn` and not yet rounded to bf16.
    """
    pre_mix, post_mix, comb = gates(mixes(r.flatten(1), fn, config.rms_eps), scale, base, config)
    y = collapse(r, pre_mix)
    if norm_weight is not None:
        y = rms_norm(round_bf16(y), norm_weight, config.norm_eps)
    return pre_mix, post_mix, comb, y


def pre_broadcast(
    x: Tensor, fn_broadcast: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pre map of the first layer, where every stream is `x` [T, H]; returns as `pre` does.

    flat(r) @ fn.T = x @ fn_broadcast.T;  mean(flat(r)^2) = mean(x^2);  y = (sum_j pre_j) * x
    """
    pre_mix, post_mix, comb = gates(mixes(x, fn_broadcast, config.rms_eps), scale, base, config)
    y = pre_mix.sum(-1, keepdim=True) * x.to(pre_mix.dtype)
    if norm_weight is not None:
        y = rms_norm(round_bf16(y), norm_weight, config.norm_eps)
    return pre_mix, post_mix, comb, y


def analytic_norm(x: Tensor, pre_sum: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `P * x` with no second reduction: `mean((P * x)^2) = P^2 * mean(x^2)`. [T, H], [T], [H] -> [T, H]."""
    p = pre_sum.unsqueeze(-1)
    return p * x * torch.rsqrt(p.square() * x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def post(output: Tensor, r: Tensor, post_mix: Tensor, comb: Tensor) -> Tensor:
    """`r'[k] = post_k * o + sum_j comb[j, k] * r[j]`. [T, H], [T, hc, H], [T, hc], [T, hc, hc] -> [T, hc, H]."""
    dtype = post_mix.dtype
    mixed = torch.einsum("tjk,tjh->tkh", comb, r.to(dtype))
    return post_mix.unsqueeze(-1) * output.to(dtype).unsqueeze(-2) + mixed


def post_collapsed(output: Tensor, x: Tensor, post_mix: Tensor) -> Tensor:
    """`r'[k] = post_k * o + x`: the first post, its comb columns sum to 1 up to eps. -> [T, hc, H]."""
    dtype = post_mix.dtype
    return post_mix.unsqueeze(-1) * output.to(dtype).unsqueeze(-2) + x.to(dtype).unsqueeze(-2)


def head(r: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> Tensor:
    """`h = sum_j p_j r_j` with `p = sigmoid(mixes * scale + base) + pre_eps`. [T, hc, H] -> [T, H].

    `fn` [hc, hc * H], `scale` [1], `base` [hc]: the collapse before the final norm.
    """
    m = mixes(r.flatten(1), fn, config.rms_eps)
    return collapse(r, torch.sigmoid(m * scale.to(m.dtype) + base.to(m.dtype)) + config.pre_eps)


def pre_delayed(
    r: Tensor,
    previous_pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """DeepSeek-V4.1's delayed pre: the collapse uses the *previous* sub-layer's pre mix `previous_pre` [T, hc]."""
    pre_mix, post_mix, comb = gates(mixes(r.flatten(1), fn, config.rms_eps), scale, base, config)
    y = collapse(r, previous_pre.to(pre_mix.dtype))
    if norm_weight is not None:
        y = rms_norm(round_bf16(y), norm_weight, config.norm_eps)
    return pre_mix, post_mix, comb, y
