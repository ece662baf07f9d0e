"""The public ops: values, layouts on real and meta tensors, whole-graph compilation, the custom ops' own checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.table import Problem, problem
from ops_tools import CALLS, CONFIG, H, layout, pre_broadcast, tensors
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mhc
from mhc import MHCConfig, reference
from mhc.checks import BF16, FP32


def assert_close_to_fp64(got: Any, want: list[Tensor]) -> None:
    """fp32 to a few of its steps, bf16 to the two roundings between it and the exact value."""
    for a, b in zip(tensors(got), want, strict=True):
        assert a is not None
        rtol, atol = (1e-5, 1e-6) if a.dtype == FP32 else (2 * 2.0**-8, 2.0**-16)
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol)


# ---- values ----


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.integers(0, 6), st.booleans())
def test_values_against_fp64(hc: int, tokens: int, norm: bool) -> None:
    p = problem(MHCConfig(H, hc), tokens)
    exact, weight = p.to(torch.float64), p.norm_weight if norm else None
    norm64 = exact.norm_weight if norm else None

    def mixed(r: Tensor) -> list[Tensor]:
        _, post, comb, y = reference.pre(r, exact.fn, exact.scale, exact.base, norm64, p.config)
        return [post.unsqueeze(-1), comb, y]

    args, args64 = (p.fn, p.scale, p.base, weight, p.config), (exact.scale, exact.base, norm64, p.config)
    got: Any = mhc.pre(p.residual, *args)
    assert got.residual is p.residual
    assert_close_to_fp64(got[1:], mixed(exact.residual))

    _, post, comb, y = reference.pre_broadcast(exact.x, exact.fn_broadcast, *args64)
    broadcast = (p.x, p.fn_broadcast, p.scale, p.base, weight, p.config)
    got = mhc.pre_broadcast(*broadcast)
    assert torch.equal(got[0], reference.expand(p.x, hc))
    assert_close_to_fp64(got[1:], [post.unsqueeze(-1), comb, y])
    assert_close_to_fp64(mhc.pre_broadcast(*broadcast, collapse=True), [post, y])

    mix64 = exact.post.squeeze(-1)
    finished: list[tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]] = [
        ((p.residual, p.post, p.comb), reference.post(exact.output, exact.residual, mix64, exact.comb)),
        ((p.x, p.post.squeeze(-1), None), reference.post_collapsed(exact.output, exact.x, mix64)),
    ]
    for (r, post_mix, comb_mix), want in finished:
        streams = mhc.post(p.output, r, post_mix, comb_mix)
        assert_close_to_fp64(streams, [want])
        both = mhc.post_pre(p.output, r, post_mix, comb_mix, *args)
        assert torch.equal(both.residual, streams)
        assert_close_to_fp64(both[1:], mixed(streams.double()))

    head = mhc.head(p.residual, p.head_fn, p.head_scale, p.head_base, p.config)
    head64 = (exact.head_fn, exact.head_scale, exact.head_base)
    assert_close_to_fp64(head, [reference.head(exact.residual, *head64, p.config)])


@pytest.mark.parametrize("impl", ["fused", "two_launch", "reference"])
def test_every_impl_is_the_reference_on_cpu(impl: str) -> None:
    p = problem(CONFIG, 5)
    for a, b in zip(pre_broadcast(p, impl=impl), pre_broadcast(p), strict=True):
        assert torch.equal(a, b)


# ---- shapes and dtypes ----


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("hc", [2, 4, 7])
@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_have_the_layout_of_real_ones(name: str, hc: int, tokens: int) -> None:
    config = MHCConfig(H, hc)
    real = CALLS[name](problem(config, tokens))
    meta = CALLS[name](problem(config, tokens, device="meta"))
    assert all(t is None or t.is_contiguous() for t in tensors(real))
    assert layout(meta) == layout(real)


def test_the_documented_shapes() -> None:
    p = problem(MHCConfig(H, 3), 5)
    full = [((5, 3, H), BF16), ((5, 3, 1), FP32), ((5, 3, 3), FP32), ((5, H), BF16)]
    for name in ("pre", "pre_broadcast", "post_pre", "post_pre-collapsed", "table"):
        assert [(tuple(t.shape), t.dtype) for t in CALLS[name](p)] == full
    collapsed = [(tuple(t.shape), t.dtype) for t in CALLS["pre_broadcast-collapse"](p)]
    assert collapsed == [((5, 3), FP32), ((5, H), BF16)]
    assert CALLS["post"](p).shape == (5, 3, H)
    assert CALLS["head"](p).shape == (5, H)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_whole(name: str) -> None:
    torch.compiler.reset()
    p, call = problem(CONFIG, 3), CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got, want = compiled(p), call(p)
    assert layout(got) == layout(want)
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert a is b if a is None or b is None else torch.equal(a, b)


def test_one_graph_for_every_number_of_tokens() -> None:
    torch.compiler.reset()
    p = problem(CONFIG, 9)
    fn_broadcast = p.fn_broadcast

    def layer(x: Tensor) -> Tensor:
        weights = (p.scale, p.base, p.norm_weight, CONFIG)
        first: Any = mhc.pre_broadcast(x, fn_broadcast, *weights)
        second = mhc.post_pre(first.layer_input, first.residual, first.post, first.comb, p.fn, *weights)
        return mhc.post(second.layer_input, *second[:3])

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for tokens in (9, 4, 2):
        x = p.x[:tokens].clone()  # a view would be guarded together with its base
        torch._dynamo.mark_dynamic(x, 0)  # an error if anything here needs to know T
        assert torch.equal(compiled(x), layer(x))
    assert backend.frame_count == 1


OP_ARGS: dict[str, Callable[[Problem, list[float]], tuple[Any, ...]]] = {
    "pre": lambda p, c: (p.residual, p.fn, p.scale, p.base, p.norm_weight, c),
    "pre_broadcast": lambda p, c: (p.x, p.fn_broadcast, p.scale, p.base, None, c, "auto"),
    "pre_collapsed": lambda p, c: (p.x, p.fn_broadcast, p.scale, p.base, p.norm_weight, c, "auto"),
    "post": lambda p, c: (p.output, p.residual, p.post, p.comb),
    "post_pre": lambda p, c: (p.output, p.x, p.post.squeeze(-1), None, p.fn, p.scale, p.base, p.norm_weight, c),
    "head": lambda p, c: (p.residual, p.head_fn, p.head_scale, p.head_base, c),
    "gather": lambda p, c: (p.ids, p.embedding, p.table_post, p.table_comb, p.table_factor, p.norm_weight, c),
    "gather_collapsed": lambda p, c: (p.ids, p.embedding, p.table_post, p.table_comb, p.table_factor, None, c),
    "table_rows": lambda p, c: (
        p.embedding,
        p.fn_broadcast,
        p.scale,
        p.base,
        p.table_post,
        p.table_comb,
        p.table_factor,
        c,
    ),
}


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("name", OP_ARGS)
def test_opcheck(name: str, tokens: int) -> None:
    args = OP_ARGS[name](problem(CONFIG, tokens), CONFIG.constants())
    torch.library.opcheck(getattr(torch.ops.mhc, name).default, args)
