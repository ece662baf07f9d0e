"""From an op to a running kernel: which kernel and variant, compiled once, called without Python in between.

`KERNELS` names every kernel with its factory; `variants` lists what can be reached for a config, so that `warmup` can
compile all of it and nothing is compiled later. A kernel is always called through its compiled host stub, which checks
dtypes, shapes, strides and devices itself; a call it refuses is explained by `mhc.checks` (see `mhc.ops`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhc.config import MHCConfig

BF16, FP32 = torch.bfloat16, torch.float32
# (most tokens, tile): the tile a cluster works on grows with T, so that weights are read for more tokens at a time.
FUSED_TILES = ((32, 1), (64, 2), (128, 4), (None, 8))
STREAM_TILES = ((16, 1), (64, 4), (None, 8))
CLUSTERS = 32  # 8 blocks each: two blocks on each of an H200's 132 multiprocessors


def _factories() -> dict[str, Callable[..., Any]]:
    from mhc.kernels.fused import fused
    from mhc.kernels.post import post_map
    from mhc.kernels.streams import streams
    from mhc.kernels.two_launch import finish, project_slices

    from mhc.kernels.gather import gather

    return {"fused": fused, "finish": finish, "gather": gather, "post": post_map, "project": project_slices, "streams": streams}


def prim_func(name: str, *args: Any) -> Any:
    """The TileLang function of kernel `name` (see `_factories`) for these factory arguments."""
    return _factories()[name](*args)


@functools.cache
def target(device: int) -> dict[str, str]:
    """TileLang's target for CUDA device `device`.

    Raises:
        RuntimeError: the device has no thread block clusters.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(f"the kernels need compute capability 9.0 (Hopper) or newer, {name} has {major}.{minor}")
    return {"kind": "cuda", "arch": f"sm_{major}{minor}a"}


@functools.cache
def kernel(device: int, name: str, *args: Any) -> Callable[..., None]:
    """The compiled entry point of a kernel on a device; compiles at most once a process."""
    import tilelang

    from mhc.kernels.parts import PASS_CONFIGS

    function = prim_func(name, *args)
    compiled = tilelang.compile(function, target=target(device), pass_configs=PASS_CONFIGS)
    # the host stub itself: JITKernel.__call__ would add 10 us of Python a call
    return compiled.adapter.get_exportable_executable()[function.attrs["global_symbol"]]


def _tile(tiles: tuple[tuple[int | None, int], ...], tokens: int) -> int:
    return next(tile for most, tile in tiles if most is None or tokens <= most)


def _mix_outputs(like: Tensor, tokens: int, config: MHCConfig) -> tuple[Tensor, Tensor, Tensor]:
    hc = config.hc_mult
    return (
        torch.empty((tokens, hc), dtype=FP32, device=like.device),
        torch.empty((tokens, hc * hc), dtype=FP32, device=like.device),
        torch.empty((tokens, config.hidden_size), dtype=BF16, device=like.device),
    )


def pre_broadcast(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, hc = x.shape[0], config.hc_mult
    residual = torch.empty((tokens, hc, config.hidden_size), dtype=BF16, device=x.device)
    post, comb, layer_input = _mix_outputs(x, tokens, config)
    if tokens:
        device, has_norm = x.get_device(), norm_weight is not None
        # without a norm the kernel never reads the weight: any row of H bf16 stands in
        weight = norm_weight if norm_weight is not None else x[0]
        if impl == "two_launch":
            part = torch.empty((1, 8, tokens, config.mix_rows + 1), dtype=FP32, device=x.device)
            kernel(device, "project", config, 4)(x, fn, part)
            finish = kernel(device, "finish", config, has_norm)
            finish(x, part, scale, base, weight, residual, post, comb, layer_input)
        else:
            tile = _tile(FUSED_TILES, tokens)
            run = kernel(device, "fused", config, tile, CLUSTERS, has_norm)
            run(x, fn, scale, base, weight, residual, post, comb, layer_input)
    return residual, post.view(tokens, hc, 1), comb.view(tokens, hc, hc), layer_input


def pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hc = residual.shape[0], config.hc_mult
    post, comb, layer_input = _mix_outputs(residual, tokens, config)
    if tokens:
        weight = norm_weight if norm_weight is not None else layer_input[0]
        tile = _tile(STREAM_TILES, tokens)
        run = kernel(residual.get_device(), "streams", config, tile, CLUSTERS, norm_weight is not None, "pre")
        run(residual, fn, scale, base, weight, post, comb, layer_input)
    return post.view(tokens, hc, 1), comb.view(tokens, hc, hc), layer_input


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
    new_post, new_comb, layer_input = _mix_outputs(output, tokens, config)
    if tokens:
        weight = norm_weight if norm_weight is not None else output[0]
        source = "post_pre" if comb is not None else "post_pre_collapsed"
        tile = _tile(STREAM_TILES, tokens)
        run = kernel(output.get_device(), "streams", config, tile, CLUSTERS, norm_weight is not None, source)
        mixed = (comb.view(tokens, hc * hc),) if comb is not None else ()
        streams = residual if comb is not None else residual.unsqueeze(1)
        post = post.view(tokens, hc)
        run(output, streams, post, *mixed, fn, scale, base, weight, out, new_post, new_comb, layer_input)
    return out, new_post.view(tokens, hc, 1), new_comb.view(tokens, hc, hc), layer_input


def post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    tokens, hidden = output.shape
    hc = post.shape[1]
    out = torch.empty((tokens, hc, hidden), dtype=BF16, device=output.device)
    if tokens:
        run = kernel(output.get_device(), "post", hidden, hc, comb is None)
        if comb is None:
            run(output, residual.unsqueeze(1), post.view(tokens, hc), out)
        else:
            run(output, residual, post.view(tokens, hc), comb.view(tokens, hc * hc), out)
    return out


def head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> Tensor:
    tokens = residual.shape[0]
    out = torch.empty((tokens, config.hidden_size), dtype=BF16, device=residual.device)
    if tokens:
        tile = _tile(STREAM_TILES, tokens)
        run = kernel(residual.get_device(), "streams", config, tile, CLUSTERS, False, "head")
        run(residual, fn, scale, base, out)
    return out
