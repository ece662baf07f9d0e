"""The public ops: on CPU the fp32 reference, on CUDA the kernels.

Every op is a torch custom op with a fake implementation (`mhc.dispatch`), so `torch.compile(fullgraph=True)` and meta
tensors work. Eager CUDA calls skip the dispatcher and go straight to the compiled kernels, whose host stubs check the
arguments themselves: only a refused call is checked here, for a message that explains it.

Shapes: `T` tokens (0 allowed), `H` hidden, `hc` streams, `M = hc * (hc + 2)`. Streams, embeddings and layer inputs are
bf16; `fn`, `scale`, `base`, `post` and `comb` are fp32; all contiguous, on one device. Bad arguments raise ValueError
naming the argument, its value and what is accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from mhc import cuda, dispatch  # noqa: F401  (registers torch.ops.mhc)
from mhc.checks import check_head, check_post, check_post_pre, check_pre
from mhc.config import MHCConfig

PLAIN = (Tensor, Parameter)
named = tuple.__new__  # of a named tuple's class and its values: a third of what calling the class takes
IMPLS = ("auto", "fused", "two_launch", "reference")


class PreOutput(NamedTuple):
    """What a pre map returns."""

    residual: Tensor  # [T, hc, H] bf16, the streams
    post: Tensor  # [T, hc, 1] fp32
    comb: Tensor | None  # [T, hc, hc] fp32; None where the streams stayed one embedding
    layer_input: Tensor  # [T, H] bf16


class CollapsedOutput(NamedTuple):
    """What the first pre returns when the streams stay one embedding x, which the caller keeps."""

    post: Tensor  # [T, hc] fp32
    layer_input: Tensor  # [T, H] bf16


def pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> PreOutput:
    """Collapse materialised streams into a layer input.

    With hc 4 and H a multiple of 256 up to 4096, the CUDA kernel takes the norm from the streams' inner products, which
    costs less than rounding y to bf16 does unless the weighted streams nearly cancel; bounds are in `mhc.cancellation`.

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
    if _direct(residual, fn, scale, base, norm_weight):
        try:
            return named(PreOutput, (residual, *cuda.pre(residual, fn, scale, base, norm_weight, config)))
        except Exception:
            check_pre(residual.device, config, norm_weight, residual=residual, fn=fn, scale=scale, base=base)
            raise
    check_pre(residual.device, config, norm_weight, residual=residual, fn=fn, scale=scale, base=base)
    return PreOutput(residual, *torch.ops.mhc.pre(residual, fn, scale, base, norm_weight, config.constants()))


def pre_broadcast(
    x: Tensor,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    config: MHCConfig,
    *,
    impl: str = "auto",
    collapse: bool = False,
) -> PreOutput | CollapsedOutput:
    """The pre map of the first layer, whose streams are `x` repeated: no repeat is made to compute it.

    Args:
        x: [T, H] bf16, the embeddings.
        fn_broadcast: [M, H] fp32, `mhc.fold(fn)`.
        scale, base, norm_weight, config: as `pre`.
        impl: `fused` is one launch, `two_launch` needs no clusters, `reference` is torch; `auto` is `fused` on CUDA and
            `reference` on CPU.
        collapse: keep the streams as `x`: no residual, no comb and no Sinkhorn. `post` and `post_pre` then take `x` for
            `residual` and None for `comb`. Needs `auto`, `fused` or `reference`.

    Returns:
        PreOutput whose `residual` [T, hc, H] is exactly `x` repeated, as the first post map expects it; with `collapse`
        a CollapsedOutput.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or `impl` is unknown.

    Source: `reference.pre_broadcast`; notebook 01, claims 1 to 4 and 6.
    """
    if impl not in IMPLS or (collapse and impl == "two_launch"):
        accepted = [name for name in IMPLS if not (collapse and name == "two_launch")]
        raise ValueError(f"impl must be one of {', '.join(accepted)}, got {impl!r}")
    if impl != "reference" and _direct(x, fn_broadcast, scale, base, norm_weight):
        try:
            if collapse:
                return named(CollapsedOutput, cuda.pre_collapsed(x, fn_broadcast, scale, base, norm_weight, config))
            return named(PreOutput, cuda.pre_broadcast(x, fn_broadcast, scale, base, norm_weight, config, impl))
        except Exception:
            check_pre(x.device, config, norm_weight, x=x, fn_broadcast=fn_broadcast, scale=scale, base=base)
            raise
    check_pre(x.device, config, norm_weight, x=x, fn_broadcast=fn_broadcast, scale=scale, base=base)
    args = (x, fn_broadcast, scale, base, norm_weight)
    if collapse:
        return CollapsedOutput(*torch.ops.mhc.pre_collapsed(*args, config.constants(), impl))
    return PreOutput(*torch.ops.mhc.pre_broadcast(*args, config.constants(), impl))


def post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    """Write a sub-layer's output back into the streams.

    Args:
        output: [T, H] bf16, what attention or FFN returned.
        residual: [T, hc, H] bf16; the embeddings [T, H] where `comb` is None.
        post: [T, hc, 1] fp32; [T, hc] where `comb` is None.
        comb: [T, hc, hc] fp32, used transposed; None for the first post after a collapsed pre.

    Returns:
        [T, hc, H] bf16.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit.

    Source: `reference.post`.
    """
    if _direct(output, residual, post, comb):
        try:
            return cuda.post(output, residual, post, comb)
        except Exception:
            check_post(output, residual, post, comb)
            raise
    check_post(output, residual, post, comb)
    return torch.ops.mhc.post(output, residual, post, comb)


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
) -> PreOutput:
    """`post` then the next sub-layer's `pre`, which is what every layer runs twice.

    Arguments are those of `post` (the finished sub-layer) and `pre` (the next one). The new streams are rounded to
    bf16 before the next pre reads them, exactly as if the two ops had run one after the other. What `pre` says of
    streams that nearly cancel holds here.

    Returns:
        PreOutput whose `residual` [T, hc, H] holds the new streams.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit.
    """
    if _direct(output, residual, post, comb, fn, scale, base, norm_weight):
        try:
            return named(PreOutput, cuda.post_pre(output, residual, post, comb, fn, scale, base, norm_weight, config))
        except Exception:
            check_post_pre(output, residual, post, comb, fn, scale, base, norm_weight, config)
            raise
    args = (output, residual, post, comb, fn, scale, base, norm_weight)
    check_post_pre(*args, config)
    return PreOutput(*torch.ops.mhc.post_pre(*args, config.constants()))


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
    if _direct(residual, fn, scale, base):
        try:
            return cuda.head(residual, fn, scale, base, config)
        except Exception:
            check_head(residual, fn, scale, base, config)
            raise
    check_head(residual, fn, scale, base, config)
    return torch.ops.mhc.head(residual, fn, scale, base, config.constants())


def _direct(tensor: Tensor, *others: Tensor | None) -> bool:
    """Whether an eager CUDA call may skip the dispatcher: a kernel sees it, nobody traces it or wants a gradient.

    The dispatcher has no gradient either, but says so in backward; no kernel looks at the arguments of an empty call.
    """
    if is_dynamo_compiling() or _len_torch_dispatch_stack():  # all other tracing is done by such a mode
        return False
    if not (tensor.is_cuda and type(tensor) in PLAIN and tensor.numel()):
        return False
    if is_grad_enabled():
        if tensor.requires_grad:
            return False
        for other in others:  # a generator expression would cost a third of a microsecond
            if other is not None and other.requires_grad:
                return False
    return True
