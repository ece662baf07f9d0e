"""How far an implementation of the broadcast pre may be from the exact maths: inputs, arms, a-priori bounds.

An *arm* is a way to the mixes (`repeat`: materialised streams; `fold`: the projection folded in fp32; `fold64`: folded
exactly and rounded once, `mhc.fold`) with an arithmetic of `mhc.arithmetic.project`. The bounds hold for every input,
not on average; notebook 02 derives them and draws them beside the measured errors.

Sources: Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1 and 4.2, for sums;
Birkhoff's contraction of the Hilbert metric for Sinkhorn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc import reference
from mhc.arithmetic import ARITHMETICS, U_BF16, U_FP32, U_TF32, depth, dot, project
from mhc.config import MHCConfig
from mhc.weights import fold

FOLDS = ("repeat", "fold", "fold64")
NORMS = ("spec", "analytic", "none")
TINY = 2.0**-120
"""Above anything that fp32 flushes or rounds in its subnormal range."""
CASES = ("gaussian", "cancelling", "large_base", "zero_rows", "tiny", "outliers", "aligned")


class Inputs(NamedTuple):
    """Arguments of a first-layer pre."""

    x: Tensor  # [T, H] bf16
    fn: Tensor  # [M, hc * H] fp32
    scale: Tensor  # [3] fp32
    base: Tensor  # [M] fp32
    norm_weight: Tensor  # [H] bf16


class Stages(NamedTuple):
    """Every intermediate result of a first-layer pre, in the dtype it was computed in."""

    mixes: Tensor  # [T, M]
    pre_sum: Tensor  # [T], P
    post: Tensor  # [T, hc]
    comb: Tensor  # [T, hc, hc]
    collapsed: Tensor  # [T, H], y before its rounding to bf16
    layer_input: Tensor  # [T, H]


class PreBound(NamedTuple):
    """Largest distances from the exact maths that rounding can cause."""

    mixes: Tensor  # [T, M], absolute
    post: Tensor  # [T, hc], absolute
    comb: Tensor  # [T], absolute, any entry
    collapsed: Tensor  # [T], relative, y before its rounding to bf16
    layer_input_ulp: Tensor  # [T], bf16 ulp of the exact value, final rounding included


def make_inputs(case: str, tokens: int, config: MHCConfig, seed: int, fn_std: float | None = None) -> Inputs:
    """Draw a first-layer problem.

    Args:
        case: `gaussian`: mixes of size 1. `cancelling`: the streams' weights cancel to one part in 10^5.
            `large_base`: base of +-8, so that gates saturate and comb nears a permutation. `zero_rows`: every other
            token is zero, and so is every third row of fn. `tiny`: embeddings of 1e-4, below the root of the eps.
            `outliers`: three channels of x a thousand times the rest, heavy-tailed fn. `aligned`: x is the signs of
            the first folded row, so that the errors of its truncated weights all add up.
        tokens: `T`.
        config: shapes.
        seed: of an own generator.
        fn_std: standard deviation of fn; by default `(hc * H)^-0.5`.

    Raises:
        ValueError: `case` is unknown.
    """
    if case not in CASES:
        raise ValueError(f"case must be one of {', '.join(CASES)}, got {case!r}")
    hc, hidden, rows = config.hc_mult, config.hidden_size, config.mix_rows
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    fn_std = (hc * hidden) ** -0.5 if fn_std is None else fn_std
    x, fn, base = randn(tokens, hidden), fn_std * randn(rows, hc, hidden), randn(rows)
    scale, norm_weight = 1 + 0.1 * randn(3), 1 + 0.1 * randn(hidden)
    if case == "cancelling":
        fn[:, -1] = 1e-5 * fn[:, -1] - fn[:, :-1].sum(1)
    elif case == "large_base":
        base = 8 * base.sign()
    elif case == "zero_rows":
        x[::2], fn[::3] = 0, 0
    elif case == "tiny":
        x *= 1e-4
    elif case == "outliers":
        x[:, :3] *= 1e3
        fn *= 1 / randn(rows, hc, hidden).abs().clamp(min=0.01)
    elif case == "aligned":
        x = fn[0].sum(0).sign().expand(tokens, hidden)
    return Inputs(x.to(torch.bfloat16), fn.flatten(1), scale, base, norm_weight.to(torch.bfloat16))


def exact(inputs: Inputs, config: MHCConfig) -> Stages:
    """The ground truth: repeated streams in fp64 and no rounding anywhere, not even the spec's bf16(y)."""
    x, fn, scale, base, norm_weight = (tensor.to(torch.float64) for tensor in inputs)
    r = reference.expand(x, config.hc_mult)
    mixes = reference.mixes(r.flatten(1), fn, config.rms_eps)
    pre, post, comb = reference.gates(mixes, scale, base, config)
    y = reference.collapse(r, pre)
    return Stages(mixes, pre.sum(-1), post, comb, y, reference.rms_norm(y, norm_weight, config.norm_eps))


def evaluate(inputs: Inputs, config: MHCConfig, how: str, arithmetic: str, norm: str = "spec") -> Stages:
    """One arm, in fp32 with the emulated projection.

    Args:
        inputs: the problem.
        config: shapes and constants.
        how: `repeat`, `fold` or `fold64`.
        arithmetic: of the projection, see `mhc.arithmetic.project`.
        norm: `spec` normalises bf16(y); `analytic` normalises P * x without that rounding; `none` returns y.

    Returns:
        Stages whose `layer_input` is bf16 and whose other members are fp32.

    Raises:
        ValueError: `how`, `norm` or `arithmetic` is unknown.
    """
    _one_of("how", how, FOLDS)
    _one_of("norm", norm, NORMS)
    x, fn, scale, base, norm_weight = inputs
    r = reference.expand(x, config.hc_mult)
    flat = r.flatten(1) if how == "repeat" else x
    width = flat.shape[1]
    weight = {"repeat": fn, "fold": reference.fold(fn, config.hc_mult), "fold64": fold(fn, config.hc_mult)}[how]
    squares = dot(flat.float().square(), torch.ones(1, width)) / width
    mixes = project(flat, weight, arithmetic) * torch.rsqrt(squares + config.rms_eps)
    pre, post, comb = reference.gates(mixes, scale, base, config)
    pre_sum = pre.sum(-1)
    y = reference.collapse(r, pre) if how == "repeat" else pre_sum.unsqueeze(-1) * x.float()
    out = y
    if norm == "analytic":
        out = reference.analytic_norm(x.float(), pre_sum, norm_weight, config.norm_eps)
    elif norm == "spec":
        out = reference.rms_norm(reference.round_bf16(y), norm_weight, config.norm_eps)
    return Stages(mixes, pre_sum, post, comb, y, out.to(torch.bfloat16))


def gamma(count: float, unit: float = U_FP32) -> float:
    """`count * u / (1 - count * u)`: the relative error of `count` roundings in a row (Higham, lemma 3.1)."""
    return count * unit / (1 - count * unit)


def pre_bound(
    inputs: Inputs, config: MHCConfig, how: str, arithmetic: str, norm: str = "spec", sum_depth: int | None = None
) -> PreBound:
    """What rounding can do to one arm, from its inputs alone: every error of `evaluate` lies below, for any input.

    Args:
        inputs, config, how, arithmetic, norm: as `evaluate`.
        sum_depth: roundings that a term of the projection meets at most; by default those of the emulation, for a
            kernel its terms per thread plus the levels of its reduction.

    Raises:
        ValueError: as `evaluate`.
    """
    _one_of("how", how, FOLDS)
    _one_of("norm", norm, NORMS)
    _one_of("arithmetic", arithmetic, ARITHMETICS)
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
    factor = torch.repeat_interleave(scale, torch.tensor([hc, hc, hc * hc]))
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
    return PreBound(mixes, post, comb, collapsed, 0.5 + (1 + U_BF16) * relative / U_BF16)


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
) -> PreBound:
    """How far the broadcast pre and the repeat may be apart: the two distances from the truth, added.

    Args:
        inputs: the problem.
        config: shapes and constants.
        arithmetic: of the broadcast pre.
        how: `fold64` (this package) or `fold`.
        baseline: arithmetic of the repeat; DeepGEMM's by default.

    Returns:
        PreBound of the difference; two layer inputs lie at most `layer_input_ulp` rounded down bf16 steps apart,
        give or take a power of two between them.
    """
    return PreBound(
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


def _one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
