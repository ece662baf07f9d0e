"""Every op that has kernels: how it is called, and its value in plain torch. A new kernel is one more row of `OPS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mhc import cuda, launch, reference
from mhc.config import MHCConfig

MOST_TOKENS = 600
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Problem:
    """Inputs of every op; the first rows of a larger problem are the smaller problem."""

    config: MHCConfig
    x: Tensor  # [T, H] bf16
    residual: Tensor  # [T, hc, H] bf16
    output: Tensor  # [T, H] bf16
    post: Tensor  # [T, hc, 1] fp32
    comb: Tensor  # [T, hc, hc] fp32, doubly stochastic
    fn: Tensor  # [M, hc * H] fp32
    scale: Tensor  # [3] fp32
    base: Tensor  # [M] fp32
    norm_weight: Tensor  # [H] bf16
    head_fn: Tensor  # [hc, hc * H] fp32
    head_scale: Tensor  # [1] fp32
    head_base: Tensor  # [hc] fp32

    PER_TOKEN = ("x", "residual", "output", "post", "comb")

    @property
    def fn_broadcast(self) -> Tensor:
        """[M, H], the folded `fn`."""
        return reference.fold(self.fn.double(), self.config.hc_mult).to(self.fn.dtype)

    def rows(self, tokens: int) -> Problem:
        """The first `tokens` rows."""
        return replace(self, **{name: getattr(self, name)[:tokens].clone() for name in self.PER_TOKEN})

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers in the dtype of a reference."""
        tensors = [f.name for f in fields(self) if f.name != "config"]
        return replace(self, **{name: getattr(self, name).to(dtype) for name in tensors})


def problem(config: MHCConfig, tokens: int = MOST_TOKENS, device: str = "cpu") -> Problem:
    """Random inputs of the size of a real layer's: streams of unit variance, mixes of order one."""
    hidden, hc, rows = config.hidden_size, config.hc_mult, config.mix_rows
    generator = None if device == "meta" else torch.Generator().manual_seed(hidden)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    fn_std = (hc * hidden) ** -0.5
    return Problem(
        config,
        x=normal(tokens, hidden).to(BF16),
        residual=normal(tokens, hc, hidden).to(BF16),
        output=normal(tokens, hidden).to(BF16),
        post=2 * torch.sigmoid(normal(tokens, hc, 1)),
        comb=reference.sinkhorn(normal(tokens, hc, hc), 20, 1e-6),
        fn=fn_std * normal(rows, hc * hidden),
        scale=1 + 0.1 * normal(3),
        base=0.5 * normal(rows),
        norm_weight=(1 + 0.1 * normal(hidden)).to(BF16),
        head_fn=fn_std * normal(hc, hc * hidden),
        head_scale=1 + 0.1 * normal(1),
        head_base=0.5 * normal(hc),
    )


@dataclass(frozen=True)
class Op:
    """One way to reach a kernel.

    `call` goes through `mhc.launch`, as CUDA tensors do. `value` is the same in torch, in the dtype of the problem it
    is given and with no rounding to bf16; what `call` returned comes along for ops whose later outputs build on
    earlier, rounded ones. `roundings` says, for each output, how many roundings to bf16 lie between it and its exact
    value: 0 is an fp32 output, None must match bit for bit. `launches` is what one call costs.
    """

    name: str
    call: Callable[[Problem], tuple[Tensor, ...]]
    value: Callable[[Problem, tuple[Tensor, ...]], tuple[Tensor, ...]]
    roundings: tuple[int | None, ...]
    launches: int = 1

    def __str__(self) -> str:
        return self.name


def _pre(p: Problem, r: Tensor, norm: bool) -> tuple[Tensor, Tensor, Tensor]:
    _, post, comb, y = reference.pre(r, p.fn, p.scale, p.base, None, p.config)
    return post.unsqueeze(-1), comb, reference.rms_norm(y, p.norm_weight, p.config.norm_eps) if norm else y


def _pre_broadcast(p: Problem, norm: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, post, comb, y = reference.pre_broadcast(p.x, p.fn_broadcast, p.scale, p.base, None, p.config)
    y = reference.rms_norm(y, p.norm_weight, p.config.norm_eps) if norm else y
    return reference.expand(p.x, p.config.hc_mult), post.unsqueeze(-1), comb, y


def broadcast_op(impl: str, norm: bool, launches: int) -> Op:
    return Op(
        f"pre_broadcast-{impl}{'' if norm else '-unnormed'}",
        lambda p: cuda.pre_broadcast(
            p.x, p.fn_broadcast, p.scale, p.base, p.norm_weight if norm else None, p.config, impl
        ),
        lambda p, _: _pre_broadcast(p, norm),
        (None, 0, 0, 2 if norm else 1),
        launches,
    )


def pre_op(norm: bool) -> Op:
    return Op(
        f"pre{'' if norm else '-unnormed'}",
        lambda p: cuda.pre(p.residual, p.fn, p.scale, p.base, p.norm_weight if norm else None, p.config),
        lambda p, _: _pre(p, p.residual, norm),
        (0, 0, 2 if norm else 1),
    )


def post_op(collapsed: bool) -> Op:
    return Op(
        f"post{'-collapsed' if collapsed else ''}",
        lambda p: (cuda.post(p.output, p.x if collapsed else p.residual, p.post, None if collapsed else p.comb),),
        lambda p, _: (_streams(p, collapsed),),
        (1,),
    )


def post_pre_op(collapsed: bool) -> Op:
    return Op(
        f"post_pre{'-collapsed' if collapsed else ''}",
        lambda p: cuda.post_pre(
            p.output,
            p.x if collapsed else p.residual,
            p.post,
            None if collapsed else p.comb,
            p.fn,
            p.scale,
            p.base,
            p.norm_weight,
            p.config,
        ),
        # the next pre reads the streams as they were rounded
        lambda p, got: (_streams(p, collapsed), *_pre(p, got[0].to(p.fn.dtype), True)),
        (1, 0, 0, 2),
    )


def _streams(p: Problem, collapsed: bool) -> Tensor:
    if collapsed:
        return reference.post_collapsed(p.output, p.x, p.post.squeeze(-1))
    return reference.post(p.output, p.residual, p.post.squeeze(-1), p.comb)


OPS = (
    broadcast_op("fused", True, 1),
    broadcast_op("fused", False, 1),
    broadcast_op("two_launch", True, 2),
    pre_op(True),
    pre_op(False),
    post_op(False),
    post_op(True),
    post_pre_op(False),
    post_pre_op(True),
    Op(
        "head",
        lambda p: (cuda.head(p.residual, p.head_fn, p.head_scale, p.head_base, p.config),),
        lambda p, _: (reference.head(p.residual, p.head_fn, p.head_scale, p.head_base, p.config),),
        (1,),
    ),
)
