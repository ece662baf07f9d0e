"""The ops as torch custom ops: one eager body for every device, one fake each.

This is how `torch.compile` and meta tensors see them; `mhc.ops` documents and checks the arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhc import cuda, reference
from mhc.checks import BF16, FP32
from mhc.config import MHCConfig

CHUNK_ROWS = 8192  # of an embedding at a time, on CPU


@torch.library.custom_op("mhc::pre", mutates_args=())
def _pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, constants: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    config = MHCConfig.from_constants(residual.shape[-1], constants)
    if residual.is_cuda:
        return cuda.pre(residual, fn, scale, base, norm_weight, config)
    _, post_mix, comb, y = reference.pre(residual, fn, scale, base, norm_weight, config)
    return post_mix.unsqueeze(-1), comb, y.to(BF16)


@_pre.register_fake
def _(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, constants: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hc, hidden = residual.shape
    return _mix_outputs(residual, tokens, hc, hidden)


@torch.library.custom_op("mhc::pre_broadcast", mutates_args=())
def _pre_broadcast(
    x: Tensor,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = MHCConfig.from_constants(x.shape[-1], constants)
    if x.is_cuda and impl != "reference":
        return cuda.pre_broadcast(x, fn_broadcast, scale, base, norm_weight, config, impl)
    _, post_mix, comb, y = reference.pre_broadcast(x, fn_broadcast, scale, base, norm_weight, config)
    return reference.expand(x, config.hc_mult), post_mix.unsqueeze(-1), comb, y.to(BF16)


@_pre_broadcast.register_fake
def _(
    x: Tensor,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (tokens, hidden), hc = x.shape, int(constants[0])
    return x.new_empty(tokens, hc, hidden), *_mix_outputs(x, tokens, hc, hidden)


@torch.library.custom_op("mhc::pre_collapsed", mutates_args=())
def _pre_collapsed(
    x: Tensor,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
    impl: str,
) -> tuple[Tensor, Tensor]:
    config = MHCConfig.from_constants(x.shape[-1], constants)
    if x.is_cuda and impl != "reference":
        return cuda.pre_collapsed(x, fn_broadcast, scale, base, norm_weight, config)
    _, post_mix, _, y = reference.pre_broadcast(x, fn_broadcast, scale, base, norm_weight, config)
    return post_mix.clone(), y.to(BF16)


@_pre_collapsed.register_fake
def _(
    x: Tensor,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
    impl: str,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], int(constants[0]), dtype=FP32), torch.empty_like(x)


@torch.library.custom_op("mhc::table_rows", mutates_args={"post", "comb", "factor"})
def _table_rows(
    embedding: Tensor,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    post: Tensor,
    comb: Tensor,
    factor: Tensor,
    constants: list[float],
) -> None:
    config = MHCConfig.from_constants(embedding.shape[-1], constants)
    if embedding.is_cuda:
        cuda.table_rows(embedding, fn_broadcast, scale, base, config, (post, comb, factor))
        return
    for start in range(0, embedding.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        x = embedding[rows]
        pre_mix, post_mix, comb_mix, _ = reference.pre_broadcast(x, fn_broadcast, scale, base, None, config)
        p = pre_mix.sum(-1)
        rstd = torch.rsqrt(p.square() * x.float().square().mean(-1) + config.norm_eps)
        post[rows], comb[rows], factor[rows] = post_mix, comb_mix.flatten(1), torch.stack((p, rstd), -1)


@_table_rows.register_fake
def _(
    embedding: Tensor,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    post: Tensor,
    comb: Tensor,
    factor: Tensor,
    constants: list[float],
) -> None:
    pass


@torch.library.custom_op("mhc::gather", mutates_args=())
def _gather(
    token_ids: Tensor,
    embedding: Tensor,
    post: Tensor,
    comb: Tensor,
    factor: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = MHCConfig.from_constants(embedding.shape[-1], constants)
    if token_ids.is_cuda:
        return cuda.gather(token_ids, embedding, (post, comb, factor), norm_weight, config)
    x, post_mix, comb_mix, y = _look_up(token_ids, embedding, (post, comb, factor), norm_weight)
    hc = config.hc_mult
    return reference.expand(x, hc), post_mix.unsqueeze(-1), comb_mix.view(-1, hc, hc), y


def _look_up(
    token_ids: Tensor, embedding: Tensor, table: tuple[Tensor, Tensor, Tensor], norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, H], post [T, hc], comb [T, hc * hc] and the layer input [T, H] of token ids, NaN for those outside."""
    known = (token_ids >= 0) & (token_ids < embedding.shape[0])
    rows, lost = token_ids.where(known, 0), ~known.unsqueeze(-1)
    x, post, comb, factor = (t[rows].masked_fill(lost, torch.nan) for t in (embedding, *table))
    y = reference.round_bf16(factor[:, :1] * x.float())
    if norm_weight is not None:
        y = y * factor[:, 1:] * norm_weight.float()
    return x, post, comb, y.to(BF16)


@_gather.register_fake
def _(
    token_ids: Tensor,
    embedding: Tensor,
    post: Tensor,
    comb: Tensor,
    factor: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, hidden, hc = token_ids.shape[0], embedding.shape[1], int(constants[0])
    return embedding.new_empty(tokens, hc, hidden), *_mix_outputs(embedding, tokens, hc, hidden)


@torch.library.custom_op("mhc::gather_collapsed", mutates_args=())
def _gather_collapsed(
    token_ids: Tensor,
    embedding: Tensor,
    post: Tensor,
    comb: Tensor,
    factor: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    if token_ids.is_cuda:
        config = MHCConfig.from_constants(embedding.shape[-1], constants)
        return cuda.gather_collapsed(token_ids, embedding, (post, comb, factor), norm_weight, config)
    x, post_mix, _, y = _look_up(token_ids, embedding, (post, comb, factor), norm_weight)
    return x, post_mix, y


@_gather_collapsed.register_fake
def _(
    token_ids: Tensor,
    embedding: Tensor,
    post: Tensor,
    comb: Tensor,
    factor: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden, hc = token_ids.shape[0], embedding.shape[1], int(constants[0])
    return (
        embedding.new_empty(tokens, hidden),
        post.new_empty(tokens, hc),
        embedding.new_empty(tokens, hidden),
    )


@torch.library.custom_op("mhc::post", mutates_args=())
def _post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    if residual.is_cuda:
        return cuda.post(output, residual, post, comb)
    return _post_map(output, residual, post, comb)


def _post_map(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    if comb is None:
        return reference.post_collapsed(output, residual, post).to(BF16)
    return reference.post(output, residual, post.squeeze(-1), comb).to(BF16)


@_post.register_fake
def _(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    return output.new_empty(output.shape[0], post.shape[1], output.shape[1])


@torch.library.custom_op("mhc::post_pre", mutates_args=())
def _post_pre(
    output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor | None,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = MHCConfig.from_constants(residual.shape[-1], constants)
    if residual.is_cuda:
        return cuda.post_pre(output, residual, post, comb, fn, scale, base, norm_weight, config)
    streams = _post_map(output, residual, post, comb)
    _, post_mix, new_comb, y = reference.pre(streams, fn, scale, base, norm_weight, config)
    return streams, post_mix.unsqueeze(-1), new_comb, y.to(BF16)


@_post_pre.register_fake
def _(
    output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor | None,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (tokens, hidden), hc = output.shape, int(constants[0])
    return output.new_empty(tokens, hc, hidden), *_mix_outputs(output, tokens, hc, hidden)


@torch.library.custom_op("mhc::head", mutates_args=())
def _head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, constants: list[float]) -> Tensor:
    config = MHCConfig.from_constants(residual.shape[-1], constants)
    if residual.is_cuda:
        return cuda.head(residual, fn, scale, base, config)
    return reference.head(residual, fn, scale, base, config).to(BF16)


@_head.register_fake
def _(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, constants: list[float]) -> Tensor:
    return residual.new_empty(residual.shape[0], residual.shape[2])


def _mix_outputs(like: Tensor, tokens: int, hc: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised post [T, hc, 1], comb [T, hc, hc] and layer_input [T, H]."""
    return (
        like.new_empty(tokens, hc, 1, dtype=FP32),
        like.new_empty(tokens, hc, hc, dtype=FP32),
        like.new_empty(tokens, hidden, dtype=BF16),
    )
