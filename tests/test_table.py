"""The token table and the noise rows: what `pre_broadcast` says, row by row, in place and never out of bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.table import VOCAB, Problem, bits, problem
from torch import Tensor

import mhc
from mhc import MHCConfig, PreOutput, TokenTable, dispatch, pre_from_table, pre_noise_rows, reference
from mhc.arithmetic import steps_bf16

H = 64
CONFIG = MHCConfig(H)
shapes = st.tuples(st.integers(2, 8), st.integers(0, 9), st.booleans())  # hc, T, norm


def weights(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return p.fn_broadcast, p.scale, p.base


def table_of(p: Problem) -> TokenTable:
    return TokenTable.build(p.embedding, *weights(p), p.config)


def first_pre(x: Tensor, p: Problem, norm_weight: Tensor | None) -> PreOutput:
    """`mhc.pre_broadcast` with the problem's weights."""
    out = mhc.pre_broadcast(x, *weights(p), norm_weight, p.config)
    assert isinstance(out, PreOutput)
    return out


def assert_same(got: PreOutput, want: PreOutput) -> None:
    """The same rows, but for the layer input's one reduction less: a step of bf16."""
    assert torch.equal(got.residual, want.residual)
    torch.testing.assert_close(got.post, want.post, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got.comb, want.comb, rtol=1e-6, atol=1e-7)
    assert got.layer_input.shape == want.layer_input.shape
    assert not got.layer_input.numel() or steps_bf16(got.layer_input, want.layer_input).max() <= 1


# ---- the table ----


@pytest.mark.parametrize("hc", range(2, 9))
def test_the_table_against_fp64(hc: int) -> None:
    p = problem(MHCConfig(H, hc), 1)
    table = table_of(p)
    exact = p.to(torch.float64)
    pre, post, comb, _ = reference.pre_broadcast(exact.embedding, *weights(exact), None, p.config)
    total = pre.sum(-1)
    rstd = torch.rsqrt(total.square() * exact.embedding.square().mean(-1) + p.config.norm_eps)
    for got, want in zip(table.tensors, (post, comb.flatten(1), torch.stack((total, rstd), -1)), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-7)


def test_a_chunk_at_a_time_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(CONFIG, 1)
    whole = table_of(p)
    monkeypatch.setattr(dispatch, "CHUNK_ROWS", 5)  # 37 rows: seven chunks and a rest
    for a, b in zip(whole.tensors, table_of(p).tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hc", [2, 4, 8])
def test_nbytes(hc: int) -> None:
    table = table_of(problem(MHCConfig(H, hc), 1))
    assert table.nbytes == VOCAB * 4 * (hc + hc * hc + 2)
    assert hc != 4 or table.nbytes == 88 * VOCAB


def test_refresh_is_in_place_and_complete() -> None:
    p, other = problem(CONFIG, 1), problem(MHCConfig(H), 1)
    table = table_of(p)
    addresses = [t.data_ptr() for t in table.tensors]
    changed = (1.5 * other.fn_broadcast, 0.5 * other.scale, -other.base)
    table.refresh(-2 * p.embedding, *changed)
    assert [t.data_ptr() for t in table.tensors] == addresses
    for a, b in zip(table.tensors, TokenTable.build(-2 * p.embedding, *changed, CONFIG).tensors, strict=True):
        assert torch.equal(a, b)
    # embeddings that are no table rows take the new weights, too
    got = pre_from_table(None, p.embedding, table, None, CONFIG, inputs_embeds=p.x)
    assert torch.equal(got.post, mhc.pre_broadcast(p.x, *changed, None, CONFIG).post)


def test_born_in_inference_mode_refreshed_outside() -> None:
    p = problem(CONFIG, 1)
    with torch.inference_mode():
        table = table_of(p)
    table.refresh(p.embedding, *weights(p))


def test_a_table_of_trainable_weights_has_no_gradient() -> None:
    p = problem(CONFIG, 1)
    embedding, fn, scale, base = (torch.nn.Parameter(t) for t in (p.embedding, *weights(p)))
    table = TokenTable.build(embedding, fn, scale, base, CONFIG)
    table.refresh(embedding, fn, scale, base)
    assert not any(t.requires_grad for t in table.tensors)


def test_refresh_refuses_another_vocabulary() -> None:
    p = problem(CONFIG, 1)
    table = table_of(p)
    before = [t.clone() for t in table.tensors]
    with pytest.raises(ValueError, match=f"embedding must have the table's {VOCAB} rows, got {VOCAB - 1}"):
        table.refresh(p.embedding[:-1], *weights(p))
    with pytest.raises(ValueError, match="embedding must be on cpu, got meta"):
        table.refresh(p.embedding.to("meta"), *weights(p))
    assert all(torch.equal(a, b) for a, b in zip(before, table.tensors, strict=True))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda t: t.float(), r"embedding must be bfloat16 \[V, 64\], got float32 \[37, 64\]"),
        (0, lambda t: t[:, :32].contiguous(), r"embedding must be bfloat16 \[V, 64\], got bfloat16 \[37, 32\]"),
        (1, lambda t: t[:-1], r"fn_broadcast must be float32 \[24, 64\], got float32 \[23, 64\]"),
        (2, lambda t: t[:1], r"scale must be float32 \[3\], got float32 \[1\]"),
        (3, lambda t: t.repeat_interleave(2)[::2], r"base must be contiguous, got strides \[2\]"),
    ],
)
def test_build_refuses(place: int, change: Any, message: str) -> None:
    p = problem(CONFIG, 1)
    args: list[Any] = [p.embedding, *weights(p), CONFIG]
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=message):
        TokenTable.build(*args)


# ---- pre_from_table ----


@settings(max_examples=25, deadline=None)
@given(shapes)
def test_the_look_up_is_the_first_pre(shape: tuple[int, int, bool]) -> None:
    hc, tokens, norm = shape
    p = problem(MHCConfig(H, hc), tokens)
    weight = p.norm_weight if norm else None
    got = pre_from_table(p.ids, p.embedding, table_of(p), weight, p.config, check_ids=True)
    assert_same(got, first_pre(p.embedding[p.ids], p, weight))


@settings(max_examples=25, deadline=None)
@given(shapes)
def test_the_collapsed_look_up_keeps_the_embedding(shape: tuple[int, int, bool]) -> None:
    hc, tokens, norm = shape
    p = problem(MHCConfig(H, hc), tokens)
    weight, table = (p.norm_weight if norm else None), table_of(p)
    full = pre_from_table(p.ids, p.embedding, table, weight, p.config)
    got = pre_from_table(p.ids, p.embedding, table, weight, p.config, collapse=True)
    assert got.comb is None
    assert torch.equal(got.residual, p.embedding[p.ids])
    assert torch.equal(got.post, full.post.squeeze(-1))
    assert torch.equal(got.layer_input, full.layer_input)
    after = mhc.post_pre(
        p.output, got.residual, got.post, None, p.fn, p.scale, p.base, p.norm_weight, p.config
    )  # takes it as it comes
    assert after.residual.shape == (tokens, hc, H)


@pytest.mark.parametrize("collapse", [False, True])
def test_ids_of_either_dtype(collapse: bool) -> None:
    p = problem(CONFIG, 5)
    args = (p.embedding, table_of(p), p.norm_weight, CONFIG)
    ids = p.ids.clone()
    ids[2] = -1
    for a, b in zip(
        pre_from_table(ids.int(), *args, collapse=collapse), pre_from_table(ids, *args, collapse=collapse), strict=True
    ):
        assert a is b is None or torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("collapse", [False, True])
def test_inputs_embeds_take_pre_broadcast(collapse: bool) -> None:
    p = problem(CONFIG, 5)
    args = (p.embedding, table_of(p), p.norm_weight, CONFIG)
    got = pre_from_table(None, *args, inputs_embeds=p.x, collapse=collapse)
    want: Any = mhc.pre_broadcast(p.x, *weights(p), p.norm_weight, CONFIG, collapse=collapse)
    assert got.residual is p.x if collapse else torch.equal(got.residual, want.residual)
    assert torch.equal(got.post, want.post)
    assert torch.equal(got.layer_input, want.layer_input)
    assert (got.comb is None) == collapse


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0, 3, VOCAB - 1, VOCAB, -1, -VOCAB, 2**40, -(2**63)]), max_size=8), st.booleans())
def test_an_id_outside_the_vocabulary_is_a_row_of_nan(ids: list[int], collapse: bool) -> None:
    p = problem(CONFIG, 1)
    table, token_ids = table_of(p), torch.tensor(ids, dtype=torch.int64)
    bad = (token_ids < 0) | (token_ids >= VOCAB)
    out = pre_from_table(token_ids, p.embedding, table, p.norm_weight, CONFIG, collapse=collapse)
    for t in (t for t in out if t is not None):
        assert torch.equal(t.isnan().flatten(1).all(1), bad)
        assert torch.equal(t.isnan().flatten(1).any(1), bad)
    if bad.any():
        outside = f"token_ids must lie in .0, {VOCAB}., got {int(bad.sum())} outside, from {min(ids)} to {max(ids)}"
        with pytest.raises(ValueError, match=outside):
            pre_from_table(token_ids, p.embedding, table, None, CONFIG, check_ids=True)
    else:
        table.check_ids(token_ids)


def test_both_or_neither_of_ids_and_embeddings() -> None:
    p = problem(CONFIG, 2)
    args = (p.embedding, table_of(p), None, CONFIG)
    for ids, embeds in ((None, None), (p.ids, p.x)):
        with pytest.raises(ValueError, match="exactly one of token_ids and inputs_embeds"):
            pre_from_table(ids, *args, inputs_embeds=embeds)


@pytest.mark.parametrize("check_ids", [False, True])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ids", lambda t: t.short(), r"token_ids must be int64 or int32 \[T\], got int16 \[4\]"),
        ("ids", lambda t: t.view(2, 2), r"token_ids must be int64 or int32 \[T\], got int64 \[2, 2\]"),
        ("ids", lambda t: t.repeat_interleave(2)[::2], r"token_ids must be contiguous, got strides \[2\]"),
        ("ids", lambda t: t.to("meta"), "token_ids must be on cpu, got meta"),
        ("embedding", lambda t: t.float(), r"embedding must be bfloat16 \[V, 64\], got float32 \[37, 64\]"),
        ("embedding", lambda t: t[:-1], r"table\.post must be float32 \[36, 4\], got float32 \[37, 4\]"),
        ("norm_weight", lambda t: t.float(), r"norm_weight must be bfloat16 \[64\], got float32 \[64\]"),
    ],
)
def test_pre_from_table_refuses(name: str, change: Any, message: str, check_ids: bool) -> None:
    p = problem(CONFIG, 4)
    table = table_of(p)
    args = {"ids": p.ids, "embedding": p.embedding, "norm_weight": p.norm_weight}
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=message):
        pre_from_table(args["ids"], args["embedding"], table, args["norm_weight"], CONFIG, check_ids=check_ids)


def test_a_table_of_another_config_is_refused() -> None:
    p, other = problem(CONFIG, 4), problem(MHCConfig(H, 2), 4)
    with pytest.raises(ValueError, match=r"table\.post must be float32 \[37, 4\], got float32 \[37, 2\]"):
        pre_from_table(p.ids, p.embedding, table_of(other), None, CONFIG)


# ---- noise rows ----


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 8), st.integers(0, 4), st.integers(1, 5), st.booleans())
def test_noise_rows_are_the_first_pre_of_the_whole_block(hc: int, requests: int, block_size: int, norm: bool) -> None:
    p = problem(MHCConfig(H, hc), 5)
    anchors, noise = p.x[:requests], p.x[4]
    weight = p.norm_weight if norm else None
    block = torch.cat((anchors.unsqueeze(1), noise.expand(requests, block_size - 1, H)), 1).flatten(0, 1)
    got = pre_noise_rows(anchors, noise, block_size, *weights(p), weight, p.config)
    assert_same(got, first_pre(block, p, weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"anchors": torch.zeros(2, H)}, r"anchors must be bfloat16 \[R, 64\], got float32 \[2, 64\]"),
        ({"noise": torch.zeros(1, H).bfloat16()}, r"noise must be bfloat16 \[64\], got bfloat16 \[1, 64\]"),
        ({"noise": torch.zeros(H).bfloat16().to("meta")}, "noise must be on cpu, got meta"),
        ({"scale": torch.zeros(1)}, r"scale must be float32 \[3\], got float32 \[1\]"),
    ],
)
def test_noise_rows_refuse(change: dict[str, Any], message: str) -> None:
    p = problem(CONFIG, 3)
    args: dict[str, Any] = {"anchors": p.x[:2], "noise": p.x[2], "block_size": 3, "norm_weight": None, "config": CONFIG}
    args |= {"fn_broadcast": p.fn_broadcast, "scale": p.scale, "base": p.base}
    with pytest.raises(ValueError, match=message):
        pre_noise_rows(**(args | change))
