"""How far a first-layer pre may be from the exact maths: what is measured, and a-priori bounds for it.

The bounds hold for every input, not on average; notebook 02 derives them and draws them beside the measured errors.

Sources: Higham, Accuracy and Stability of Numerical Algorithms (2002), sections 3.1 and 4.2, for sums;
Birkhoff's contraction of the Hilbert metric for Sinkhorn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc.arithmetic import ARITHMETICS, U_BF16, U_FP32, U_TF32, depth, err_ulp
from mhc.arms import FOLDS, NORMS, Inputs, Stages, exact, one_of
from mhc.config import MHCConfig

TINY = 2.0**-120
"""Above anything that fp32 flushes or rounds in its subnormal range."""


class PreError(NamedTuple):
    """Distances from the exact maths: measured, or the largest that rounding can cause."""

    mixes: Tensor  # [T, M], absolute
    post: Tensor  # [T, hc], absolute
    comb: Tensor  # [T], largest, absolute
    collapsed: Tensor  # [T], largest, relative, y before its rounding to bf16
    layer_input_ulp: Tensor  # [T], largest, in bf16 ulp of the exact value, final rounding included


def measure(stages: Stages, truth: Stages, norm: str = "spec") -> PreError:
    """The errors of an evaluated arm; with norm `none` the layer input is held against y."""
    collapsed = (stages.collapsed - truth.collapsed).abs() / truth.collapsed.abs().clamp(min=TINY**2)
    layer_input = truth.collapsed if norm == "none" else truth.layer_input
    return PreError(
        (stages.mixes - truth.mixes).abs(),
        (stages.post - truth.post).abs(),
        (stages.comb - truth.comb).abs().amax((1, 2)),
        collapsed.amax(1),
        err_ulp(stages.layer_input, layer_input).amax(1),
    )


def gamma(count: float, unit: float = U_FP32) -> float:
    """`count * u / (1 - count * u)`: the relative error of `count` roundings in a row (Higham, lemma 3.1)."""
    return count * unit / (1 - count * unit)


def pre_bound(
    inputs: Inputs, config: MHCConfig, how: str, arithmetic: str, norm: str = "spec", sum_depth: int | None = None
) -> PreError:
    """What rounding can do to one arm, from its inputs alone: every error of `evaluate` lies below, for any input.

    Args:
        inputs, config, how, arithmetic, norm: as `evaluate`.
        sum_depth: roundings that a term of the projection meets at most; by default those of the emulation, for a
            kernel its terms per thread plus the levels of its reduction.

    Raises:
        ValueError: as `evaluate`.
    """
    one_of("how", how, FOLDS)
    one_of("norm", norm, NORMS)
    one_of("arithmetic", arithmetic, ARITHMETICS)
    hc, truth = config.hc_mult, exact(inputs, config)
    x, fn, scale, base = (tensor.to(torch.float64) for tensor in inputs[:4])
    streams = fn.view(-1, hc, x.shape[1])
    width = fn.shape[1] if how == "repeat" else x.shape[1]
    d = depth(width) if sum_depth is None else sum_depth

    # the projection: folding, the weights as stored, a sum of depth d (two more for the sum of three bf16 parts)
    apart = x.abs() @ streams.abs().sum(1).T  # [T, M]
    together = x.abs() @ streams.sum(1).abs().T
    folding = {"repeat": 0.0, "fold": gamma(hc - 1), "fold64": 0.0}[how] * apart
    if how == "fold64":
        folding = U_FP32 * together
    stored = {"tf32_truncate": 2 * U_TF32, "tf32_nearest": U_TF32}.get(arithmetic, 0.0)
    summing = 1.01 * gamma(d + 2 * (arithmetic == "bf16x3"))
    projection = (stored + summing) * (apart if how == "repeat" else together + folding) + folding
    mean_square = x.square().mean(-1, keepdim=True)
    norm_rel = gamma(d + 2) / 2 + 5 * U_FP32
    mixes = 1.001 * (projection * torch.rsqrt(mean_square + config.rms_eps) + truth.mixes.abs() * norm_rel)

    # z = m * scale + base, then gates whose slope s (1 - s) is at most its largest value within dz
    factor = torch.repeat_interleave(scale, torch.tensor([hc, hc, hc * hc], device=scale.device))
    z = truth.mixes * factor + base
    dz = factor.abs() * mixes + 1.001 * U_FP32 * (2 * (truth.mixes * factor).abs() + z.abs() + mixes)
    above, below = torch.sigmoid(z + dz)[:, : 2 * hc], torch.sigmoid(dz - z)[:, : 2 * hc]
    gate = dz[:, : 2 * hc] * torch.minimum(above, below).clamp(max=0.25) + 6 * U_FP32 * above + TINY
    pre_sum = gate[:, :hc].sum(-1) + gamma(hc + 1) * truth.pre_sum
    post = config.post_mult * (gate[:, hc:] + U_FP32)
    comb = sinkhorn_bound(z[:, 2 * hc :].view(-1, hc, hc), dz[:, 2 * hc :].amax(-1), config)
    collapsed = pre_sum / truth.pre_sum + gamma(hc + 1)

    # the norm forgets P up to norm_eps (claim 5); bf16(y) moves an element by u and the mean square by as much at worst
    power = truth.pre_sum.square() * mean_square.squeeze(-1)
    relative = 2 * collapsed * config.norm_eps / (power + config.norm_eps) + gamma(d + 4) / 2 + (8 + hc) * U_FP32
    if norm == "spec":
        relative = (1 + 2 * U_BF16) * (2 * U_BF16 + relative)
    elif norm == "none":
        relative = collapsed
    return PreError(mixes, post, comb, collapsed, 0.5 + (1 + U_BF16) * relative / U_BF16)


def sinkhorn_bound(logits: Tensor, off: Tensor, config: MHCConfig) -> Tensor:
    """Largest error of any comb entry when logits [T, hc, hc] are off by `off` [T] and every step rounds to fp32.

    Args:
        logits: [T, hc, hc] fp64, exact.
        off: [T], the largest error of a token's logits.
        config: iterations and eps.

    Returns:
        [T] fp64, absolute.

    The error is followed in the Hilbert metric, which ignores what a normalisation divides out. A half step contracts
    it by the Dobrushin coefficient of the matrix it normalises, at most tanh(diameter / 4), and adds what the logits
    are off by: e' = slope * e + 2 * off.
    """
    hc, halves, eps = config.hc_mult, 2 * config.sinkhorn_iters, config.sinkhorn_eps
    spread = logits.amax((1, 2)) - logits.amin((1, 2))
    # max, exp and eps of the softmax; then one division a half step
    entry = off + U_FP32 * (spread + 6 + halves)
    added = 2 * (entry + (hc + 1) * U_FP32)
    c = torch.softmax(logits, -1) + eps
    log = c.log()
    ratios = log.unsqueeze(2) - log.unsqueeze(1)  # [T, hc, hc, hc]
    birkhoff = torch.tanh((ratios.amax(-1) - ratios.amin(-1)).amax((1, 2)) / 4)
    error = added
    for half in range(halves - 1):
        axis = -2 if half % 2 == 0 else -1
        c = c / (c.sum(axis, keepdim=True) + eps)
        # the next step mixes errors along the other axis: distances in total variation between the lines c holds now
        lines = c.transpose(1, 2) if axis == -2 else c
        lines = lines / lines.sum(-1, keepdim=True)
        dobrushin = (lines.unsqueeze(2) - lines.unsqueeze(1)).abs().sum(-1).amax((1, 2)) / 2
        slope = torch.minimum(birkhoff, dobrushin + 2 * torch.tanh(error / 4))
        # (hc + 1) eps / sum: what a step remembers of its predecessor through eps
        error = slope * error + added + 2 * (hc + 1) * eps * (error + added)
    return torch.tanh((error + added) / 4) + (hc + 2) * U_FP32


def broadcast_bound(
    inputs: Inputs, config: MHCConfig, arithmetic: str, *, how: str = "fold64", baseline: str = "tf32_truncate"
) -> PreError:
    """How far the broadcast pre and the repeat may be apart: the two distances from the truth, added.

    Args:
        inputs: the problem.
        config: shapes and constants.
        arithmetic: of the broadcast pre.
        how: `fold64` (this package) or `fold`.
        baseline: arithmetic of the repeat; DeepGEMM's by default.

    Returns:
        PreError of the difference; two layer inputs lie at most `layer_input_ulp` rounded down bf16 steps apart,
        give or take a power of two between them.
    """
    return PreError(
        *map(torch.add, pre_bound(inputs, config, how, arithmetic), pre_bound(inputs, config, "repeat", baseline))
    )


def column_deficit(config: MHCConfig) -> float:
    """Claim 6: every column of comb sums to 1 - d with 0 < d <= this.

    The last step leaves d = eps / (S + eps), S the column's sum before it, and a row step before that cannot push S
    below 1 / (hc + 1): a row sums to at most hc.
    """
    hc, eps = config.hc_mult, config.sinkhorn_eps
    return 1 / (hc + 1) if config.sinkhorn_iters == 1 else eps * (hc + 1) * (1 + eps)


def collapse_bound(output: Tensor, x: Tensor, post_mix: Tensor, config: MHCConfig) -> Tensor:
    """What the column-sum collapse (claim 6) costs: `|post - post_collapsed|` before rounding to bf16, both in fp32.

    Args:
        output, x: [T, H], the sub-layer's output and the embedding.
        post_mix: [T, hc].
        config: constants.

    Returns:
        [T, hc, H] fp64, absolute. Relative to x it is (hc + 1) eps + O(u): 5e-6, or 0.0013 bf16 ulp of x.
    """
    hc = config.hc_mult
    x = x.to(torch.float64).abs().unsqueeze(1)
    written = (post_mix.to(torch.float64).unsqueeze(-1) * output.to(torch.float64).unsqueeze(1)).abs()
    return x * (column_deficit(config) + gamma(2 * hc + 2)) + 2 * gamma(2) * (written + x)
