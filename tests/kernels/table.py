"""Every op that has kernels: how it is called, and its value in plain torch. A new kernel is one more row of `OPS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mhc import cuda, reference
from mhc.config import MHCConfig

MOST_TOKENS = 600
BF16 = torch.bfloat16
VOCAB = 37


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
    ids: Tensor  # [T] int64
    embedding: Tensor  # [V, H] bf16
    table_post: Tensor  # [V, hc] fp32
    table_comb: Tensor  # [V, hc * hc] fp32
    table_factor: Tensor  # [V, 2] fp32

    PER_TOKEN = ("x", "residual", "output", "post", "comb", "ids")

    @property
    def fn_broadcast(self) -> Tensor:
        """[M, H], the folded `fn`."""
        return reference.fold(self.fn.double(), self.config.hc_mult).to(self.fn.dtype)

    def rows(self, tokens: int) -> Problem:
        """The first `tokens` rows."""
        return replace(self, **{name: getattr(self, name)[:tokens].clone() for name in self.PER_TOKEN})

    def with_nan(self, row: int) -> Problem:
        """Another problem, every input of one row NaN, its id outside the vocabulary."""
        spoilt = self.rows(len(self.x))
        for name in ("x", "residual", "output"):
            getattr(spoilt, name)[row].fill_(torch.nan)
        spoilt.ids[row] = len(self.embedding)
        return spoilt

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers in the dtype of a reference."""
        tensors = [f.name for f in fields(self) if f.name not in ("config", "ids")]
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
        ids=torch.randint(VOCAB, (tokens,), generator=generator, device=device),
        embedding=normal(VOCAB, hidden).to(BF16),
        table_post=normal(VOCAB, hc),
        table_comb=normal(VOCAB, hc * hc),
        table_factor=1 + 0.1 * normal(VOCAB, 2),
    )


@dataclass(frozen=True)
class Op:
    """One way to reach a kernel.

    `call` goes through `mhc.cuda`, as CUDA tensors do. `value` is the same in torch, in the dtype of the problem it
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

    def __reduce__(self) -> tuple[Callable[[str], Op], tuple[str]]:
        return op_named, (self.name,)  # to other processes


def op_named(name: str) -> Op:
    """Of `OPS`."""
    return next(op for op in OPS if op.name == name)


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


def collapsed_op(norm: bool) -> Op:
    def value(p: Problem, _: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        post, y = _pre_broadcast(p, norm)[1::2]
        return post.squeeze(-1), y

    return Op(
        f"pre_collapsed{'' if norm else '-unnormed'}",
        lambda p: cuda.pre_collapsed(p.x, p.fn_broadcast, p.scale, p.base, p.norm_weight if norm else None, p.config),
        value,
        (0, 2 if norm else 1),
    )


def table_op(collapsed: bool) -> Op:
    """Rows of a table, gathered: the embedding is the problem's x, each token its own vocabulary entry."""

    def call(p: Problem) -> tuple[Tensor, ...]:
        vocab, hc = p.x.shape[0], p.config.hc_mult
        post, comb, factor = (p.x.new_empty(vocab, n, dtype=torch.float32) for n in (hc, hc * hc, 2))
        table = (post, comb, factor)
        cuda.table_rows(p.x, p.fn_broadcast, p.scale, p.base, p.config, table)
        ids = torch.arange(vocab, device=p.x.device)
        return (cuda.gather_collapsed if collapsed else cuda.gather)(ids, p.x, table, p.norm_weight, p.config)

    def value(p: Problem, _: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        residual, post, comb, y = _pre_broadcast(p, True)
        return (p.x, post.squeeze(-1), y) if collapsed else (residual, post, comb, y)

    return Op(
        f"table{'-collapsed' if collapsed else ''}", call, value, (None, 0, 2) if collapsed else (None, 0, 0, 2), 2
    )


def gather_op(norm: bool, collapsed: bool, id_dtype: torch.dtype = torch.int64) -> Op:
    def call(p: Problem) -> tuple[Tensor, ...]:
        table = (p.table_post, p.table_comb, p.table_factor)
        look_up = cuda.gather_collapsed if collapsed else cuda.gather
        return look_up(p.ids.to(id_dtype), p.embedding, table, p.norm_weight if norm else None, p.config)

    def value(p: Problem, _: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hc, x, factor = p.config.hc_mult, p.embedding[p.ids], p.table_factor[p.ids]
        y = factor[:, :1] * x * (factor[:, 1:] * p.norm_weight if norm else 1)
        post, comb = p.table_post[p.ids], p.table_comb[p.ids].view(-1, hc, hc)
        return (x, post, y) if collapsed else (reference.expand(x, hc), post.unsqueeze(-1), comb, y)

    kind = "" if id_dtype == torch.int64 else "-int32"
    name = f"gather{kind}{'-collapsed' if collapsed else ''}{'' if norm else '-unnormed'}"
    last = 2 if norm else 1
    return Op(name, call, value, (None, None, last) if collapsed else (None, None, None, last))


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
        lambda p: (cuda.post(p.output, *_old(p, collapsed)),),
        lambda p, _: (_streams(p, collapsed),),
        (1,),
    )


def post_pre_op(collapsed: bool) -> Op:
    return Op(
        f"post_pre{'-collapsed' if collapsed else ''}",
        lambda p: cuda.post_pre(
            p.output,
            *_old(p, collapsed),
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


def _old(p: Problem, collapsed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    return (p.x, p.post.squeeze(-1), None) if collapsed else (p.residual, p.post, p.comb)


def _streams(p: Problem, collapsed: bool) -> Tensor:
    if collapsed:
        return reference.post_collapsed(p.output, p.x, p.post.squeeze(-1))
    return reference.post(p.output, p.residual, p.post.squeeze(-1), p.comb)


OPS = (
    broadcast_op("fused", True, 1),
    broadcast_op("fused", False, 1),
    broadcast_op("two_launch", True, 2),
    broadcast_op("two_launch", False, 2),
    gather_op(True, False),
    gather_op(False, False),
    gather_op(True, True),
    gather_op(True, False, torch.int32),
    gather_op(True, True, torch.int32),
    collapsed_op(True),
    collapsed_op(False),
    table_op(False),
    table_op(True),
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


def assert_close_to_fp64(op: Op, p: Problem, got: tuple[Tensor, ...]) -> None:
    """fp32 outputs are within twice the error of torch's own fp32, bf16 ones within their roundings."""
    truth, torch32 = (op.value(p.to(dtype), got) for dtype in (torch.float64, torch.float32))
    for got_one, want, own, roundings in zip(got, truth, torch32, op.roundings, strict=True):
        assert got_one.shape == want.shape
        if not want.numel():
            continue
        error = (got_one.double() - want).abs()
        if roundings is None:
            assert torch.equal(got_one, want.to(got_one.dtype))
        elif roundings == 0:
            assert got_one.dtype == torch.float32
            assert error.max() <= 2 * (own.double() - want).abs().max() + 2**-21
        else:
            assert got_one.dtype == torch.bfloat16
            # half a step of bf16 is at most 2^-8 of the value; sums that cancel add an absolute error
            assert (error <= roundings * 2**-8 * 1.01 * want.abs() + 2**-18 * want.abs().max()).all()


def bits(tensor: Tensor) -> Tensor:
    """A tensor to compare bit for bit, NaN included."""
    return tensor.contiguous().view(torch.uint8)
