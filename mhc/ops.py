"""The public ops: on CPU the fp32 reference, on CUDA the kernels.

Every op is a torch custom op with a fake implementation, so `torch.compile(fullgraph=True)` and meta tensors work.
Eager CUDA calls skip the dispatcher and go straight to the compiled kernels (`mhc.launch`).

Shapes: `T` tokens (0 allowed), `H` hidden, `hc` streams, `M = hc * (hc + 2)`. Streams, embeddings and layer inputs are
bf16; `fn`, `scale`, `base`, `post` and `comb` are fp32; all contiguous, on one device. Bad arguments raise ValueError
naming the argument, its value and what is accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc import reference
from mhc.checks import check
from mhc.config import MHCConfig

BF16, FP32 = torch.bfloat16, torch.float32
IMPLS = ("auto", "two_launch", "reference")


class PreOutput(NamedTuple):
    """What a pre map returns."""

    residual: Tensor  # [T, hc, H] bf16, the streams
    post: Tensor  # [T, hc, 1] fp32
    comb: Tensor  # [T, hc, hc] fp32
    layer_input: Tensor  # [T, H] bf16


def pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> PreOutput:
    """Collapse materialised streams into a layer input.

    Args:
        residual: [T, hc, H] bf16.
        fn: [M, hc * H] fp32.
        scale: [3] fp32.
        base: [M] fp32.
        norm_weight: [H] bf16, the sub-layer's RMSNorm; None returns the un-normed layer input.
        config: shapes and constants.

    Returns:
        PreOutput whose `residual` is the argument itself.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit.

    Source: `reference.pre`.
    """
    _check_pre(residual.device, config, norm_weight, residual=residual, fn=fn, scale=scale, base=base)
    post, comb, layer_input = torch.ops.mhc.pre(residual, fn, scale, base, norm_weight, config.constants())
    return PreOutput(residual, post, comb, layer_input)


def pre_broadcast(
    x: Tensor,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    config: MHCConfig,
    *,
    impl: str = "auto",
) -> PreOutput:
    """The pre map of the first layer, whose streams are `x` repeated: no repeat is made to compute it.

    Args:
        x: [T, H] bf16, the embeddings.
        fn_broadcast: [M, H] fp32, `mhc.fold(fn)`.
        scale, base, norm_weight, config: as `pre`.
        impl: `auto` picks the fastest kernel on CUDA and the reference on CPU; `two_launch` and `reference` force one.

    Returns:
        PreOutput whose `residual` [T, hc, H] is exactly `x` repeated, as the first post map expects it.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or `impl` is unknown.

    Source: `reference.pre_broadcast`; notebook 01, claims 1 to 4.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    _check_pre(x.device, config, norm_weight, x=x, fn_broadcast=fn_broadcast, scale=scale, base=base)
    return PreOutput(
        *torch.ops.mhc.pre_broadcast(x, fn_broadcast, scale, base, norm_weight, config.constants(), impl)
    )


def post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sub-layer's output back into the streams.

    Args:
        output: [T, H] bf16, what attention or FFN returned.
        residual: [T, hc, H] bf16.
        post: [T, hc, 1] fp32.
        comb: [T, hc, hc] fp32, used transposed.

    Returns:
        [T, hc, H] bf16.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit.

    Source: `reference.post`.
    """
    _check_post(output, residual, post, comb)
    return torch.ops.mhc.post(output, residual, post, comb)


def post_pre(
    output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> PreOutput:
    """`post` then the next sub-layer's `pre`, which is what every layer runs twice.

    Arguments are those of `post` (the finished sub-layer) and `pre` (the next one). The new streams are rounded to
    bf16 before the next pre reads them, exactly as if the two ops had run one after the other.

    Returns:
        PreOutput whose `residual` [T, hc, H] holds the new streams.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit.
    """
    _check_post(output, residual, post, comb)
    _check_pre(output.device, config, norm_weight, residual=residual, fn=fn, scale=scale, base=base)
    return PreOutput(
        *torch.ops.mhc.post_pre(output, residual, post, comb, fn, scale, base, norm_weight, config.constants())
    )


def head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> Tensor:
    """Collapse the last layer's streams before the final norm.

    Args:
        residual: [T, hc, H] bf16.
        fn: [hc, hc * H] fp32.
        scale: [1] fp32.
        base: [hc] fp32.
        config: shapes and constants.

    Returns:
        [T, H] bf16.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit.

    Source: `reference.head`.
    """
    hc, hidden = config.hc_mult, config.hidden_size
    check(
        {},
        residual.device,
        residual=(residual, BF16, ("T", hc, hidden)),
        fn=(fn, FP32, (hc, hc * hidden)),
        scale=(scale, FP32, (1,)),
        base=(base, FP32, (hc,)),
    )
    return torch.ops.mhc.head(residual, fn, scale, base, config.constants())


def _check_pre(device: torch.device, config: MHCConfig, norm_weight: Tensor | None, **tensors: Tensor) -> None:
    hc, hidden, rows = config.hc_mult, config.hidden_size, config.mix_rows
    specs = {
        "residual": (BF16, ("T", hc, hidden)),
        "x": (BF16, ("T", hidden)),
        "fn": (FP32, (rows, hc * hidden)),
        "fn_broadcast": (FP32, (rows, hidden)),
        "scale": (FP32, (3,)),
        "base": (FP32, (rows,)),
        "norm_weight": (BF16, (hidden,)),
    }
    if norm_weight is not None:
        tensors["norm_weight"] = norm_weight
    check({}, device, **{name: (tensor, *specs[name]) for name, tensor in tensors.items()})


def _check_post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> None:
    check(
        {},
        output.device,
        output=(output, BF16, ("T", "H")),
        residual=(residual, BF16, ("T", "hc", "H")),
        post=(post, FP32, ("T", "hc", 1)),
        comb=(comb, FP32, ("T", "hc", "hc")),
    )


# ---- the custom ops: one eager body for every device, one fake ----


@torch.library.custom_op("mhc::pre", mutates_args=())
def _pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, constants: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    config = MHCConfig.from_constants(residual.shape[-1], constants)
    if residual.is_cuda:
        from mhc import launch

        return launch.pre(residual, fn, scale, base, norm_weight, config)
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
        from mhc import launch

        return launch.pre_broadcast(x, fn_broadcast, scale, base, norm_weight, config, impl)
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


@torch.library.custom_op("mhc::post", mutates_args=())
def _post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    if residual.is_cuda:
        from mhc import launch

        return launch.post(output, residual, post, comb)
    return reference.post(output, residual, post.squeeze(-1), comb).to(BF16)


@_post.register_fake
def _(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.empty_like(residual)


@torch.library.custom_op("mhc::post_pre", mutates_args=())
def _post_pre(
    output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = MHCConfig.from_constants(residual.shape[-1], constants)
    if residual.is_cuda:
        from mhc import launch

        return launch.post_pre(output, residual, post, comb, fn, scale, base, norm_weight, config)
    streams = reference.post(output, residual, post.squeeze(-1), comb).to(BF16)
    _, post_mix, new_comb, y = reference.pre(streams, fn, scale, base, norm_weight, config)
    return streams, post_mix.unsqueeze(-1), new_comb, y.to(BF16)


@_post_pre.register_fake
def _(
    output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(residual), *_mix_outputs(residual, *residual.shape)


@torch.library.custom_op("mhc::head", mutates_args=())
def _head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, constants: list[float]) -> Tensor:
    config = MHCConfig.from_constants(residual.shape[-1], constants)
    if residual.is_cuda:
        from mhc import launch

        return launch.head(residual, fn, scale, base, config)
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
