"""The reference maths: against explicit loops, an independent implementation, and the properties it must have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mhc import MHCConfig, reference
from mhc.error import column_deficit

H = 64
seeds = st.integers(0, 10**6)
streams = st.integers(2, 8)


class Problem(NamedTuple):
    config: MHCConfig
    x: Tensor  # [T, H]
    r: Tensor  # [T, hc, H]
    fn: Tensor  # [M, hc * H]
    scale: Tensor
    base: Tensor
    weight: Tensor


def problem(seed: int = 0, hc: int = 4, tokens: int = 5) -> Problem:
    """fp64, with a stream-dependent offset so that a swapped stream shows."""
    config = MHCConfig(hidden_size=H, hc_mult=hc)
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    r = randn(tokens, hc, H) + torch.arange(hc, dtype=torch.float64).view(hc, 1)
    fn = randn(config.mix_rows, hc * H) * (hc * H) ** -0.5
    return Problem(config, randn(tokens, H), r, fn, 1 + randn(3), randn(config.mix_rows), 1 + 0.1 * randn(H))


def close(a: Tensor, b: Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


# ---- against loops and against an independent implementation ----


def test_formulas_against_loops() -> None:
    p = problem(hc=3, tokens=2)
    hc, config = 3, p.config
    pre, post, comb, y = reference.pre(p.r, p.fn, p.scale, p.base, None, config)
    streams_out = reference.post(p.x[:2], p.r, post, comb)
    for t in range(2):
        flat = p.r[t].reshape(-1)
        rstd = (sum(float(v) ** 2 for v in flat) / len(flat) + config.rms_eps) ** -0.5
        m = torch.tensor([float(row @ flat) * rstd for row in p.fn], dtype=torch.float64)
        for j in range(hc):
            close(pre[t, j], 1 / (1 + torch.exp(-(m[j] * p.scale[0] + p.base[j]))) + config.pre_eps)
            close(post[t, j], 2 / (1 + torch.exp(-(m[hc + j] * p.scale[1] + p.base[hc + j]))))
        c = (m[2 * hc :] * p.scale[2] + p.base[2 * hc :]).view(hc, hc).exp()
        c = torch.stack([row / row.sum() for row in c]) + config.sinkhorn_eps
        for step in range(2 * config.sinkhorn_iters - 1):
            for line in c.unbind(1 if step % 2 == 0 else 0):  # views: columns first
                line /= line.sum().item() + config.sinkhorn_eps
        close(comb[t], c)
        close(y[t], sum(pre[t, j] * p.r[t, j] for j in range(hc)))
        for k in range(hc):
            close(streams_out[t, k], post[t, k] * p.x[t] + sum(comb[t, j, k] * p.r[t, j] for j in range(hc)))
    close(reference.rms_norm(y, p.weight, 1e-6)[0], y[0] / (sum(y[0] ** 2) / H + 1e-6) ** 0.5 * p.weight)


@pytest.fixture(scope="module")
def oracle():
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4


def test_pre_and_head_agree_with_transformers(oracle) -> None:
    p = problem()
    config = SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=H)
    module, head = oracle.DeepseekV4HyperConnection(config), oracle.DeepseekV4HyperHead(config)
    with torch.no_grad():
        module.fn.copy_(p.fn), module.base.copy_(p.base), module.scale.copy_(p.scale)
        head.hc_fn.copy_(p.fn[:4]), head.hc_base.copy_(p.base[:4]), head.hc_scale.copy_(p.scale[:1])
        post, comb, collapsed = module(p.r.float().unsqueeze(0))
        hidden = head(p.r.float().unsqueeze(0))
    _, post_ref, comb_ref, y = reference.pre(p.r, p.fn, p.scale, p.base, None, p.config)
    close(post[0].double(), post_ref, rtol=1e-5)
    close(comb[0].double(), comb_ref, rtol=1e-5)
    close(collapsed[0].double(), y, rtol=1e-5)
    h = reference.head(p.r, p.fn[:4], p.scale[:1], p.base[:4], p.config)
    close(hidden[0].double(), h, rtol=1e-5)


# ---- the broadcast case ----


@settings(max_examples=40, deadline=None)
@given(seeds, streams)
def test_pre_broadcast_is_pre_of_the_repeat(seed: int, hc: int) -> None:
    p = problem(seed, hc)
    r = reference.expand(p.x, hc)
    assert r.shape == (5, hc, H)
    assert all(torch.equal(stream, p.x) for stream in r.unbind(1))
    for weight in (None, p.weight):
        repeated = reference.pre(r, p.fn, p.scale, p.base, weight, p.config)
        broadcast = reference.pre_broadcast(p.x, reference.fold(p.fn, hc), p.scale, p.base, weight, p.config)
        for a, b in zip(repeated[:3], broadcast[:3], strict=True):
            close(a, b, rtol=1e-11)
        # between the collapse and the norm lies bf16, which may fall either way
        close(repeated[3], broadcast[3], rtol=1e-11 if weight is None else 2.0**-7)


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(1e-3, 1e3), st.floats(-4, 4))
def test_the_analytic_norm_and_its_scale_invariance(seed: int, size: float, log_p: float) -> None:
    p = problem(seed)
    x, pre_sum = size * p.x, torch.full((5,), 10.0**log_p, dtype=torch.float64)
    normed = reference.analytic_norm(x, pre_sum, p.weight, 1e-6)
    close(normed, reference.rms_norm(pre_sum.unsqueeze(1) * x, p.weight, 1e-6))
    ratio = normed / reference.rms_norm(x, p.weight, 1e-6)
    mean_square = x.square().mean(1, keepdim=True)
    close(ratio, ((mean_square + 1e-6) / (mean_square + 1e-6 / 100**log_p)).sqrt().expand_as(x))


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(-8, 8))
def test_mixes_ignore_the_scale_of_the_streams(seed: int, power: int) -> None:
    p = problem(seed)
    flat = p.r.flatten(1)
    close(reference.mixes(2.0**power * flat, p.fn, 0.0), reference.mixes(flat, p.fn, 0.0))
    assert not torch.equal(reference.mixes(2.0**power * flat, p.fn, 1.0), reference.mixes(flat, p.fn, 0.0))


@settings(max_examples=40, deadline=None)
@given(seeds, streams)
def test_the_collapsed_post_differs_by_the_column_deficit(seed: int, hc: int) -> None:
    p = problem(seed, hc)
    _, post, comb, _ = reference.pre_broadcast(p.x, reference.fold(p.fn, hc), p.scale, p.base, None, p.config)
    output = p.r[:, 0]
    full = reference.post(output, reference.expand(p.x, hc), post, comb)
    collapsed = reference.post_collapsed(output, p.x, post)
    lost = (collapsed - full) / p.x.unsqueeze(1)
    assert lost.min() > 0
    assert lost.max() <= column_deficit(p.config) + 1e-9  # cancellation in the quotient


# ---- Sinkhorn ----


def logits(seed: int, hc: int, size: float) -> Tensor:
    return size * torch.randn(3, hc, hc, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(seeds, streams, st.floats(0, 3), st.integers(1, 30))
def test_comb_is_positive_and_its_columns_sum_to_one(seed: int, hc: int, size: float, iters: int) -> None:
    comb = reference.sinkhorn(logits(seed, hc, size), iters, 1e-6)
    assert comb.min() > 0
    config = MHCConfig(hidden_size=H, hc_mult=hc, sinkhorn_iters=iters)
    assert (1 - comb.sum(-2)).abs().max() <= column_deficit(config)
    if iters == 30 and size <= 1:
        assert (1 - comb.sum(-1)).abs().max() < 1e-4


@settings(max_examples=60, deadline=None)
@given(seeds, streams)
def test_sinkhorn_commutes_with_permutations_and_ignores_row_shifts(seed: int, hc: int) -> None:
    z = logits(seed, hc, 2)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(hc, generator=generator), torch.randperm(hc, generator=generator)
    comb = reference.sinkhorn(z, 20, 1e-6)
    close(reference.sinkhorn(z[:, rows][:, :, columns], 20, 1e-6), comb[:, rows][:, :, columns])
    close(reference.sinkhorn(z + torch.randn(3, hc, 1, dtype=torch.float64), 20, 1e-6), comb)


def test_sinkhorn_leaves_doubly_stochastic_matrices() -> None:
    mixed = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]], dtype=torch.float64)
    close(reference.sinkhorn(mixed.log(), 20, 0.0), mixed)


# ---- permutations, rows, dtypes ----


@settings(max_examples=40, deadline=None)
@given(seeds, streams)
def test_permuting_the_streams_permutes_what_belongs_to_them(seed: int, hc: int) -> None:
    p = problem(seed, hc)
    order = torch.randperm(hc, generator=torch.Generator().manual_seed(seed))
    # rows that write a stream and columns that read it move together
    comb_rows = (2 * hc + hc * order.unsqueeze(1) + order).flatten()
    rows = torch.cat([order, hc + order, comb_rows])
    fn = p.fn.view(-1, hc, H)[:, order].flatten(1)[rows]
    pre, post, comb, y = reference.pre(p.r, p.fn, p.scale, p.base, p.weight, p.config)
    moved = reference.pre(p.r[:, order], fn, p.scale, p.base[rows], p.weight, p.config)
    close(moved[0], pre[:, order])
    close(moved[1], post[:, order])
    close(moved[2], comb[:, order][:, :, order])
    close(moved[3], y, rtol=2.0**-7)
    written = reference.post(p.x, p.r[:, order], moved[1], moved[2])
    close(written, reference.post(p.x, p.r, post, comb)[:, order])


def test_rows_do_not_see_each_other() -> None:
    p = problem()
    p.r[2] = torch.nan
    outputs = reference.pre(p.r, p.fn, p.scale, p.base, p.weight, p.config)
    for output in outputs:
        finite = output.isfinite().flatten(1).all(1)
        assert finite.tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1])
def test_dtypes_and_no_tokens(dtype: torch.dtype, tokens: int) -> None:
    p = Problem(*(t.to(dtype) if isinstance(t, Tensor) else t for t in problem(tokens=tokens)))
    pre, post, comb, y = reference.pre(p.r.bfloat16(), p.fn, p.scale, p.base, p.weight, p.config)
    assert {t.dtype for t in (pre, post, comb, y)} == {dtype}
    assert (pre.shape, post.shape, comb.shape, y.shape) == ((tokens, 4), (tokens, 4), (tokens, 4, 4), (tokens, H))
    assert reference.post(p.x, p.r, post, comb).shape == (tokens, 4, H)
    assert reference.head(p.r, p.fn[:4], p.scale[:1], p.base[:4], p.config).shape == (tokens, H)


def test_the_delayed_pre_collapses_with_what_it_is_given() -> None:
    p = problem()
    now = reference.pre(p.r, p.fn, p.scale, p.base, None, p.config)
    same = reference.pre_delayed(p.r, now[0], p.fn, p.scale, p.base, None, p.config)
    assert all(torch.equal(a, b) for a, b in zip(now, same, strict=True))
    first = torch.eye(4, dtype=torch.float64)[:1].expand(5, 4)
    delayed = reference.pre_delayed(p.r, first, p.fn, p.scale, p.base, None, p.config)
    assert torch.equal(delayed[3], p.r[:, 0])
    assert torch.equal(delayed[2], now[2])
