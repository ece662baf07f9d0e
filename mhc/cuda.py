"""The ops on CUDA: allocate outputs and launch. The kernels' host stubs check; `mhc.ops` explains a refusal."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc import launch
from mhc.config import MHCConfig
from mhc.launch import PROJECT_TILE, of_streams, one_stream

Mixed = tuple[Tensor, Tensor, Tensor]  # post [T, hc, 1], comb [T, hc, hc], layer_input [T, H]


# In a call of 10 us it matters how: `x.new_empty(2, 3)` and `empty_like` take 0.8 us, `x.new_empty((2, 3))` 1.3 us, a
# `torch.empty` told dtype and device 1.5 us; a view takes 0.9 us, so kernels take tensors shaped as callers know them


def _mixes(scale: Tensor, tokens: int, hc: int) -> tuple[Tensor, Tensor]:
    """post [T, hc, 1] and comb [T, hc, hc], fp32 as `scale` is."""
    return scale.new_empty(tokens, hc, 1), scale.new_empty(tokens, hc, hc)


def pre_broadcast(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, hc = x.shape[0], config.hc_mult
    residual = x.new_empty(tokens, hc, config.hidden_size)
    post, comb = _mixes(scale, tokens, hc)
    layer_input = torch.empty_like(x)
    if tokens:
        device, has_norm = x.get_device(), norm_weight is not None
        weight = norm_weight if norm_weight is not None else x[0]  # a row of the right shape, never read
        if impl == "two_launch":
            part = scale.new_empty(1, 8, tokens, config.mix_rows + 1)
            launch.kernel(device, "project", config, PROJECT_TILE)(x, fn, part)
            run = launch.kernel(device, "finish", config, has_norm)
            run(x, part, scale, base, weight, residual, post, comb, layer_input)
        else:
            variant = one_stream(config, tokens)
            run = launch.kernel(device, "fused", config, variant.tile, variant.clusters, has_norm, "all")
            run(x, fn, scale, base, weight, residual, post, comb, layer_input)
    return residual, post, comb, layer_input


def pre_collapsed(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]
    post, layer_input = scale.new_empty(tokens, config.hc_mult), torch.empty_like(x)
    if tokens:
        variant = one_stream(config, tokens)
        weight = norm_weight if norm_weight is not None else x[0]
        run = launch.kernel(
            x.get_device(), "fused", config, variant.tile, variant.clusters, norm_weight is not None, "collapsed"
        )
        run(x, fn, scale, base, weight, post, layer_input)
    return post, layer_input


def table_rows(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write post [V, hc], comb [V, hc * hc] and factor [V, 2] of every embedding in x [V, H] into `out`."""
    if x.shape[0]:
        variant = one_stream(config, x.shape[0])
        run = launch.kernel(x.get_device(), "fused", config, variant.tile, variant.clusters, False, "table")
        run(x, fn, scale, base, *out)


def _id_dtype(ids: Tensor) -> str:
    """How the gather is compiled for these ids; others than int32 its host stub refuses unless they are int64."""
    return "int32" if ids.dtype == torch.int32 else "int64"


def gather(
    ids: Tensor,
    embedding: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, hc = ids.shape[0], config.hc_mult
    residual = embedding.new_empty(tokens, hc, config.hidden_size)
    post, comb = _mixes(table[0], tokens, hc)
    layer_input = embedding.new_empty(tokens, config.hidden_size)
    if tokens:
        weight = norm_weight if norm_weight is not None else embedding[0]
        run = launch.kernel(ids.get_device(), "gather", config, norm_weight is not None, False, _id_dtype(ids))
        run(ids, embedding, *table, weight, residual, post, comb, layer_input)
    return residual, post, comb, layer_input


def gather_collapsed(
    ids: Tensor,
    embedding: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden = ids.shape[0], config.hidden_size
    x, layer_input = embedding.new_empty(tokens, hidden), embedding.new_empty(tokens, hidden)
    post = table[0].new_empty(tokens, config.hc_mult)
    if tokens:
        weight = norm_weight if norm_weight is not None else embedding[0]
        run = launch.kernel(ids.get_device(), "gather", config, norm_weight is not None, True, _id_dtype(ids))
        run(ids, embedding, table[0], table[2], weight, x, post, layer_input)
    return x, post, layer_input


def pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> Mixed:
    tokens, hc = residual.shape[0], config.hc_mult
    post, comb = _mixes(scale, tokens, hc)
    layer_input = residual.new_empty(tokens, config.hidden_size)
    if tokens:
        weight = norm_weight if norm_weight is not None else layer_input[0]
        run = launch.kernel(residual.get_device(), *of_streams(config, tokens, norm_weight is not None, "pre"))
        run(residual, fn, scale, base, weight, post, comb, layer_input)
    return post, comb, layer_input


def post_pre(
    output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor | None,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, hc = output.shape[0], config.hc_mult
    out = output.new_empty(tokens, hc, config.hidden_size)
    new_post, new_comb = _mixes(scale, tokens, hc)
    layer_input = torch.empty_like(output)
    if tokens:
        weight = norm_weight if norm_weight is not None else output[0]
        source = "post_pre" if comb is not None else "post_pre_collapsed"
        run = launch.kernel(output.get_device(), *of_streams(config, tokens, norm_weight is not None, source))
        run(output, *_old(residual, post, comb), fn, scale, base, weight, out, new_post, new_comb, layer_input)
    return out, new_post, new_comb, layer_input


def post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    tokens, hidden = output.shape
    hc = post.shape[1]
    out = output.new_empty(tokens, hc, hidden)
    if tokens:
        run = launch.kernel(output.get_device(), "post", hidden, hc, comb is None)
        run(output, *_old(residual, post, comb), out)
    return out


def _old(residual: Tensor, post: Tensor, comb: Tensor | None) -> tuple[Tensor, ...]:
    """What a finished sub-layer left behind, as kernels take it; collapsed, there is no comb."""
    return (residual, post) if comb is None else (residual, post, comb)


def head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> Tensor:
    tokens = residual.shape[0]
    out = residual.new_empty(tokens, config.hidden_size)
    if tokens:
        run = launch.kernel(residual.get_device(), *of_streams(config, tokens, False, "head"))
        run(residual, fn, scale, base, out)
    return out
