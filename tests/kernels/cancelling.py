"""Streams that cancel, in a problem of the table, and the bound that the layer input of an op has to keep."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mhc import reference
from mhc.arithmetic import U_FP32
from mhc.cancellation import cancelling_streams, layer_input_bound
from mhc.config import MHCConfig

from .table import OPS, Op, Problem, problem

CANCELLED = [op for op in OPS if op.name in ("pre", "post_pre")]
KINDS = (1, 30, 300, None)  # about the condition number of a row's streams; None: r1 = -r0, all others zero
ROWS = 4  # of each kind, and of ordinary ones in between
PRE_OFF = 8 * U_FP32  # relative error of a sigmoid: exp to 2 ulp, a sum, a quotient, a sum


def cancelling(config: MHCConfig) -> Problem:
    """The table's problem with rows of every kind, and with weights known beforehand: pre is the sigmoid of `base`."""
    p = problem(config, (len(KINDS) + 1) * ROWS)
    p.scale[0], p.base[1] = 0, p.base[0]
    weights = pre_of(p).expand(ROWS, -1)
    for place, kappa in enumerate(KINDS):
        x = p.residual[rows(place), 0]
        p.residual[rows(place)] = (
            cancelling_streams(torch.full((ROWS,), float(kappa)), weights, config.hidden_size, seed=place)
            if kappa
            else torch.stack([x, -x, 0 * x, 0 * x], 1)
        )
    return through_post(p, p.residual)


def ordinary(p: Problem) -> Problem:
    """The same with no row that cancels."""
    return through_post(p, problem(p.config, len(p.x)).residual)


def through_post(p: Problem, residual: Tensor) -> Problem:
    """`pre` is given these streams, and `post_pre` makes them: the first is its output, the others are kept."""
    post, comb = torch.zeros_like(p.post), torch.eye(p.config.hc_mult).repeat(len(p.x), 1, 1)
    post[:, 0], comb[:, 0, 0] = 1, 0
    return replace(p, residual=residual, output=residual[:, 0].contiguous(), post=post, comb=comb)


def rows(place: int) -> Tensor:
    """[T] bool, those of a kind of `KINDS`, by its place; behind the last come ordinary ones."""
    return torch.arange((len(KINDS) + 1) * ROWS) % (len(KINDS) + 1) == place


def pre_of(p: Problem) -> Tensor:
    """[hc] fp64."""
    return torch.sigmoid(p.base[: p.config.hc_mult].double()) + p.config.pre_eps


def assert_layer_input_within_bound(op: Op, p: Problem, norm: str, got: tuple[Tensor, ...]) -> None:
    """Every row's layer input, the last output of `op`, against fp64 on the streams that it had."""
    r, weight = p.residual.to(got[-1].device), p.norm_weight.double()
    if op.name == "post_pre":
        assert torch.equal(got[0], r)
    pre = pre_of(p).expand(len(r), -1)
    truth = reference.rms_norm(reference.collapse(r, pre), weight, p.config.norm_eps)
    error = (got[-1].double() - truth).abs()
    bound = layer_input_bound(r, pre, weight, p.config, norm, PRE_OFF)
    for place, kappa in enumerate((*KINDS, "of ordinary rows")):
        chosen = rows(place).to(r.device)
        assert got[-1][chosen].isfinite().all(), kappa
        worst = (error / bound)[chosen].max().item()
        assert worst <= 1, f"condition {kappa}: {worst:.3g} times the bound"
