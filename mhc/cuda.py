"""The ops on CUDA: allocate the outputs and launch. Arguments have been checked by `mhc.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc import launch
from mhc.config import MHCConfig
from mhc.launch import BF16, FP32, PROJECT_TILE, many_streams, one_stream

Mixed = tuple[Tensor, Tensor, Tensor]  # post [T, hc, 1], comb [T, hc, hc], layer_input [T, H]


def _outputs(like: Tensor, tokens: int, config: MHCConfig) -> Mixed:
    hc = config.hc_mult
    return (
        torch.empty((tokens, hc), dtype=FP32, device=like.device),
        torch.empty((tokens, hc * hc), dtype=FP32, device=like.device),
        torch.empty((tokens, config.hidden_size), dtype=BF16, device=like.device),
    )


def _shaped(post: Tensor, comb: Tensor, layer_input: Tensor, hc: int) -> Mixed:
    return post.view(-1, hc, 1), comb.view(-1, hc, hc), layer_input


def pre_broadcast(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, hc = x.shape[0], config.hc_mult
    residual = torch.empty((tokens, hc, config.hidden_size), dtype=BF16, device=x.device)
    post, comb, layer_input = _outputs(x, tokens, config)
    if tokens:
        device, has_norm = x.get_device(), norm_weight is not None
        weight = norm_weight if norm_weight is not None else x[0]  # a row of the right shape, never read
        if impl == "two_launch":
            part = torch.empty((1, 8, tokens, config.mix_rows + 1), dtype=FP32, device=x.device)
            launch.kernel(device, "project", config, PROJECT_TILE)(x, fn, part)
            run = launch.kernel(device, "finish", config, has_norm)
            run(x, part, scale, base, weight, residual, post, comb, layer_input)
        else:
            variant = one_stream(config, tokens)
            run = launch.kernel(device, "fused", config, variant.tile, variant.clusters, has_norm, "all")
            run(x, fn, scale, base, weight, residual, post, comb, layer_input)
    return residual, *_shaped(post, comb, layer_input, hc)


def pre_collapsed(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]
    if not fn.shape[0] == base.shape[0] == config.mix_rows:  # the kernel sees only those that it needs
        raise ValueError(f"fn and base must have {config.mix_rows} rows, got {fn.shape[0]} and {base.shape[0]}")
    post, _, layer_input = _outputs(x, tokens, config)
    if tokens:
        rows = 2 * config.hc_mult
        variant = one_stream(config, tokens)
        weight = norm_weight if norm_weight is not None else x[0]
        run = launch.kernel(
            x.get_device(), "fused", config, variant.tile, variant.clusters, norm_weight is not None, "collapsed"
        )
        run(x, fn[:rows], scale, base[:rows], weight, post, layer_input)
    return post, layer_input


def table_rows(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write post [V, hc], comb [V, hc * hc] and factor [V, 2] of every embedding in x [V, H] into `out`."""
    if x.shape[0]:
        variant = one_stream(config, x.shape[0])
        run = launch.kernel(x.get_device(), "fused", config, variant.tile, variant.clusters, False, "table")
        run(x, fn, scale, base, *out)


def gather(
    ids: Tensor,
    embedding: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor | None,
    config: MHCConfig,
    collapsed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, hc = ids.shape[0], config.hc_mult
    copies = 1 if collapsed else hc
    residual = torch.empty((tokens, copies, config.hidden_size), dtype=BF16, device=ids.device)
    post, comb, layer_input = _outputs(embedding, tokens, config)
    if tokens:
        weight = norm_weight if norm_weight is not None else embedding[0]
        run = launch.kernel(ids.get_device(), "gather", config, norm_weight is not None, collapsed)
        run(ids, embedding, *table, weight, residual, post, comb, layer_input)
    return residual, *_shaped(post, comb, layer_input, hc)


def pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> Mixed:
    tokens = residual.shape[0]
    post, comb, layer_input = _outputs(residual, tokens, config)
    if tokens:
        variant = many_streams(config, tokens)
        weight = norm_weight if norm_weight is not None else layer_input[0]
        run = launch.kernel(
            residual.get_device(), "streams", config, variant.tile, variant.clusters, norm_weight is not None, "pre"
        )
        run(residual, fn, scale, base, weight, post, comb, layer_input)
    return _shaped(post, comb, layer_input, config.hc_mult)


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
    out = torch.empty((tokens, hc, config.hidden_size), dtype=BF16, device=output.device)
    mixed = _outputs(output, tokens, config)
    if tokens:
        variant = many_streams(config, tokens)
        weight = norm_weight if norm_weight is not None else output[0]
        source = "post_pre" if comb is not None else "post_pre_collapsed"
        run = launch.kernel(
            output.get_device(), "streams", config, variant.tile, variant.clusters, norm_weight is not None, source
        )
        streams = residual.view(tokens, -1, config.hidden_size)
        old = (post.view(tokens, hc),) if comb is None else (post.view(tokens, hc), comb.view(tokens, hc * hc))
        run(output, streams, *old, fn, scale, base, weight, out, *mixed)
    return out, *_shaped(*mixed, hc)


def post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    tokens, hidden = output.shape
    hc = post.shape[1]
    out = torch.empty((tokens, hc, hidden), dtype=BF16, device=output.device)
    if tokens:
        run = launch.kernel(output.get_device(), "post", hidden, hc, comb is None)
        old = (post.view(tokens, hc),) if comb is None else (post.view(tokens, hc), comb.view(tokens, hc * hc))
        run(output, residual.view(tokens, -1, hidden), *old, out)
    return out


def head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> Tensor:
    tokens = residual.shape[0]
    out = torch.empty((tokens, config.hidden_size), dtype=BF16, device=residual.device)
    if tokens:
        variant = many_streams(config, tokens)
        run = launch.kernel(residual.get_device(), "streams", config, variant.tile, variant.clusters, False, "head")
        run(residual, fn, scale, base, out)
    return out
