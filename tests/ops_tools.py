"""How the tests call every public op on one problem of `kernels.table`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from kernels.table import Problem
from torch import Tensor

import mhc
from mhc import MHCConfig, TokenTable

H = 64
CONFIG = MHCConfig(H)
Call = Callable[[Problem], Any]


def table_of(p: Problem) -> TokenTable:
    return TokenTable(p.table_post, p.table_comb, p.table_factor, p.config)


def pre(p: Problem) -> Any:
    return mhc.pre(p.residual, p.fn, p.scale, p.base, p.norm_weight, p.config)


def pre_broadcast(p: Problem, **options: Any) -> Any:
    return mhc.pre_broadcast(p.x, p.fn_broadcast, p.scale, p.base, p.norm_weight, p.config, **options)


def post_pre(p: Problem) -> Any:
    return mhc.post_pre(p.output, p.residual, p.post, p.comb, p.fn, p.scale, p.base, p.norm_weight, p.config)


def post_pre_collapsed(p: Problem) -> Any:
    post = p.post.squeeze(-1)
    return mhc.post_pre(p.output, p.x, post, None, p.fn, p.scale, p.base, p.norm_weight, p.config)


def unnormed(call: Call) -> Call:
    def without(p: Problem) -> Any:
        return call(dataclasses.replace(p, norm_weight=None))  # type: ignore[arg-type]

    return without


CALLS: dict[str, Call] = {
    "pre": pre,
    "pre_broadcast": pre_broadcast,
    "pre_broadcast-two_launch": lambda p: pre_broadcast(p, impl="two_launch"),
    "pre_broadcast-reference": lambda p: pre_broadcast(p, impl="reference"),
    "pre_broadcast-collapse": lambda p: pre_broadcast(p, collapse=True),
    "post": lambda p: mhc.post(p.output, p.residual, p.post, p.comb),
    "post-collapsed": lambda p: mhc.post(p.output, p.x, p.post.squeeze(-1), None),
    "post_pre": post_pre,
    "post_pre-collapsed": post_pre_collapsed,
    "head": lambda p: mhc.head(p.residual, p.head_fn, p.head_scale, p.head_base, p.config),
    "table": lambda p: mhc.pre_from_table(p.ids, p.embedding, table_of(p), p.norm_weight, p.config),
    "table-collapse": lambda p: mhc.pre_from_table(
        p.ids, p.embedding, table_of(p), p.norm_weight, p.config, collapse=True
    ),
    "noise_rows": lambda p: mhc.pre_noise_rows(
        p.x, p.norm_weight, 3, p.fn_broadcast, p.scale, p.base, p.norm_weight, p.config
    ),
}
CALLS |= {f"{name}-unnormed": unnormed(CALLS[name]) for name in ("pre", "pre_broadcast", "post_pre", "table")}


def every_kernel_call(p: Problem, fn_broadcast: Tensor, table: TokenTable) -> None:
    """Every op in every form that has a kernel: normed or not, collapsed or not."""
    post = p.post.squeeze(-1)
    for norm_weight in (p.norm_weight, None):
        rest = (p.scale, p.base, norm_weight, p.config)
        for options in ({"impl": "fused"}, {"impl": "two_launch"}, {"collapse": True}):
            mhc.pre_broadcast(p.x, fn_broadcast, *rest, **options)
        mhc.pre(p.residual, p.fn, *rest)
        mhc.post_pre(p.output, p.residual, p.post, p.comb, p.fn, *rest)
        mhc.post_pre(p.output, p.x, post, None, p.fn, *rest)
        for ids, collapse in itertools.product((p.ids, p.ids.int()), (False, True)):
            mhc.pre_from_table(ids, p.embedding, table, norm_weight, p.config, collapse=collapse)
    mhc.post(p.output, p.residual, p.post, p.comb)
    mhc.post(p.output, p.x, post, None)
    mhc.head(p.residual, p.head_fn, p.head_scale, p.head_base, p.config)
    TokenTable.build(p.x, fn_broadcast, p.scale, p.base, p.config)


def tensors(out: Any) -> list[Tensor | None]:
    return [out] if isinstance(out, Tensor) else list(out)


def layout(out: Any) -> list[Any]:
    return [t if t is None else (t.shape, t.dtype, t.stride()) for t in tensors(out)]
