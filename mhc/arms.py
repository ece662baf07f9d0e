"""Ways to compute a first-layer pre, and problems to compute it on.

An *arm* is a way to the mixes (`repeat`: materialised streams; `fold`: the projection folded in fp32; `fold64`: folded
exactly and rounded once, `mhc.fold`) with an arithmetic of `mhc.arithmetic.project` and a way to the norm. `exact` is
the truth that arms are held against; `mhc.error` bounds the distance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc import reference
from mhc.arithmetic import dot, project
from mhc.config import MHCConfig
from mhc.weights import fold

FOLDS = ("repeat", "fold", "fold64")
NORMS = ("spec", "analytic", "none")
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
    one_of("how", how, FOLDS)
    one_of("norm", norm, NORMS)
    x, fn, scale, base, norm_weight = inputs
    r = reference.expand(x, config.hc_mult)
    flat = r.flatten(1) if how == "repeat" else x
    width = flat.shape[1]
    weight = fn if how == "repeat" else (fold if how == "fold64" else reference.fold)(fn, config.hc_mult)
    squares = dot(flat.float().square(), fn.new_ones(1, width)) / width
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


def one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is accepted."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
