"""The ops on CUDA: allocate outputs and launch. The kernels' host stubs check; `mhc.ops` explains a refusal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, starmap
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhc import launch
from mhc.checks import BF16, FP32
from mhc.config import MHCConfig
from mhc.launch import PROJECT_TILE, of_streams, one_stream

# On an H200's host an eager `pre_broadcast` took 16 us when `new_empty` made its outputs (2 us each, `empty_strided`
# 2.4) and everything was worked out anew. Inductor's own allocation takes 1 us: it skips the dispatcher, the device is
# the current one. With that, and what is the same at every call kept, it took 12.9, 5.5 of them in the host stub. Since
# then, on a CPU with kernels that do nothing, 3.4 us became 2.8: no comparison of configs and none of `torch.device`
# in the look-up, no loop over four outputs, no Python in making a named tuple.
try:
    from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]
except ImportError:  # torch promises it to nobody
    _empty_strided_cuda = None

CALLS_KEPT = 16384  # of (op, config, T), 1.4 KB each; a new one costs 15 us

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class Plan(NamedTuple):
    """What a call launches and allocates."""

    kernel: tuple[Any, ...]  # its name, its factory's arguments
    outputs: tuple[Spec, ...]
    unread: Spec | None = None  # where there is no norm: the weight that the host stub still wants


@functools.lru_cache(CALLS_KEPT)
def prepared(
    kernel: Callable[..., Any], device: int, plan: Callable[..., Plan], tokens: int, *sizes: Any
) -> Callable[..., Any]:
    """The call of a kernel's inputs that returns a tuple of its outputs, each a tensor of its own.

    Args:
        kernel: `launch.kernel`, an argument so that a call prepared with another is not mistaken for it.
        device: where the inputs are, as `Tensor.get_device` says: a number is found faster than a `torch.device`.
        plan: what to do for these `tokens` and `sizes`; no tokens launch nothing.
    """
    name, outputs, unread = plan(tokens, *sizes)
    entry = kernel(device, *name) if tokens else _launch_nothing
    empty = allocator(device)

    if len(outputs) == 4:  # as most ops have
        first, second, third, fourth = outputs

        def call(*inputs: Any) -> tuple[Tensor, ...]:
            made = empty(*first), empty(*second), empty(*third), empty(*fourth)
            entry(*(inputs + made))
            return made

    else:

        def call(*inputs: Any) -> tuple[Tensor, ...]:
            made = tuple(starmap(empty, outputs))
            entry(*(inputs + made))
            return made

    if unread is None:
        return launch.with_current(device, call)

    def unnormed(*inputs: Any) -> tuple[Tensor, ...]:
        return call(*inputs[:-1], empty(*unread))  # the norm weight comes last, a None

    return launch.with_current(device, unnormed)


def _launch_nothing(*tensors: Tensor) -> None:
    pass


def allocator(device: int) -> Callable[..., Tensor]:
    """How to make a tensor of a `Spec` on a GPU, which is the current one, or on the CPU, which is -1."""
    if device >= 0 and _empty_strided_cuda:
        return _empty_strided_cuda
    where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=where)


def spec(dtype: torch.dtype, *shape: int) -> Spec:
    """Of a contiguous tensor."""
    return shape, tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1], dtype


def _outputs(tokens: int, config: MHCConfig) -> tuple[Spec, Spec, Spec, Spec]:
    """residual, post, comb and layer_input, see `mhc.ops.PreOutput`."""
    hc, hidden = config.hc_mult, config.hidden_size
    post, comb = spec(FP32, tokens, hc, 1), spec(FP32, tokens, hc, hc)
    return spec(BF16, tokens, hc, hidden), post, comb, spec(BF16, tokens, hidden)


def _collapsed(tokens: int, config: MHCConfig) -> tuple[Spec, Spec]:
    """post and layer_input, see `mhc.ops.CollapsedOutput`."""
    return spec(FP32, tokens, config.hc_mult), spec(BF16, tokens, config.hidden_size)


def _unread(config: MHCConfig, has_norm: bool) -> Spec | None:
    return None if has_norm else spec(BF16, config.hidden_size)


# ---- the first pre ----


def _fused(tokens: int, config: MHCConfig, has_norm: bool, collapse: bool) -> Plan:
    variant, made = one_stream(config, tokens), (_collapsed if collapse else _outputs)(tokens, config)
    name = ("fused", config, variant.tile, variant.clusters, has_norm, "collapsed" if collapse else "all")
    return Plan(name, made, _unread(config, has_norm))


def _project(tokens: int, config: MHCConfig) -> Plan:
    return Plan(("project", config, PROJECT_TILE), (spec(FP32, 1, 8, tokens, config.mix_rows + 1),))


def _finish(tokens: int, config: MHCConfig, has_norm: bool) -> Plan:
    return Plan(("finish", config, has_norm), _outputs(tokens, config), _unread(config, has_norm))


def pre_broadcast(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if impl != "two_launch":
        call = prepared(
            launch.kernel, x.get_device(), _fused, x.shape[0], config.shared, norm_weight is not None, False
        )
        return call(x, fn, scale, base, norm_weight)
    device, tokens = x.get_device(), x.shape[0]
    (part,) = prepared(launch.kernel, device, _project, tokens, config.shared)(x, fn)
    call = prepared(launch.kernel, device, _finish, tokens, config.shared, norm_weight is not None)
    return call(x, part, scale, base, norm_weight)


def pre_collapsed(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> tuple[Tensor, Tensor]:
    call = prepared(launch.kernel, x.get_device(), _fused, x.shape[0], config.shared, norm_weight is not None, True)
    return call(x, fn, scale, base, norm_weight)


def _table(tokens: int, config: MHCConfig) -> Plan:
    variant = one_stream(config, tokens)
    return Plan(("fused", config, variant.tile, variant.clusters, False, "table"), ())


def table_rows(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write post [V, hc], comb [V, hc * hc] and factor [V, 2] of every embedding in x [V, H] into `out`."""
    prepared(launch.kernel, x.get_device(), _table, x.shape[0], config.shared)(x, fn, scale, base, *out)


# ---- the first pre out of a table ----


def _gather(tokens: int, config: MHCConfig, has_norm: bool, collapse: bool, id_dtype: torch.dtype) -> Plan:
    # of ids that are neither, the int64 kernel's host stub says so
    name = ("gather", config, has_norm, collapse, "int32" if id_dtype == torch.int32 else "int64")
    made = (
        (spec(BF16, tokens, config.hidden_size), *_collapsed(tokens, config)) if collapse else _outputs(tokens, config)
    )
    return Plan(name, made, _unread(config, has_norm))


def gather(
    ids: Tensor,
    embedding: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (post, comb, factor), has_norm = table, norm_weight is not None
    call = prepared(launch.kernel, ids.get_device(), _gather, ids.shape[0], config.shared, has_norm, False, ids.dtype)
    return call(ids, embedding, post, comb, factor, norm_weight)


def gather_collapsed(
    ids: Tensor,
    embedding: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    (post, _, factor), has_norm = table, norm_weight is not None
    call = prepared(launch.kernel, ids.get_device(), _gather, ids.shape[0], config.shared, has_norm, True, ids.dtype)
    return call(ids, embedding, post, factor, norm_weight)


# ---- on materialised streams ----


def _pre(tokens: int, config: MHCConfig, has_norm: bool) -> Plan:
    name = of_streams(config, tokens, has_norm, "pre")
    return Plan(name, _outputs(tokens, config)[1:], _unread(config, has_norm))


def pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """post, comb and layer_input."""
    call = prepared(
        launch.kernel, residual.get_device(), _pre, residual.shape[0], config.shared, norm_weight is not None
    )
    return call(residual, fn, scale, base, norm_weight)


def _post_pre(tokens: int, config: MHCConfig, has_norm: bool, collapsed: bool) -> Plan:
    name = of_streams(config, tokens, has_norm, "post_pre_collapsed" if collapsed else "post_pre")
    return Plan(name, _outputs(tokens, config), _unread(config, has_norm))


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
    tokens, has_norm, collapsed = output.shape[0], norm_weight is not None, comb is None
    call = prepared(launch.kernel, output.get_device(), _post_pre, tokens, config.shared, has_norm, collapsed)
    if collapsed:
        return call(output, residual, post, fn, scale, base, norm_weight)
    return call(output, residual, post, comb, fn, scale, base, norm_weight)


def _post(tokens: int, hidden: int, hc: int, collapsed: bool) -> Plan:
    return Plan(("post", hidden, hc, collapsed), (spec(BF16, tokens, hc, hidden),))


def post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    tokens, hidden = output.shape
    call = prepared(launch.kernel, output.get_device(), _post, tokens, hidden, post.shape[1], comb is None)
    (out,) = call(output, residual, post) if comb is None else call(output, residual, post, comb)
    return out


def _head(tokens: int, config: MHCConfig) -> Plan:
    return Plan(of_streams(config, tokens, False, "head"), _outputs(tokens, config)[-1:])


def head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> Tensor:
    (out,) = prepared(launch.kernel, residual.get_device(), _head, residual.shape[0], config.shared)(
        residual, fn, scale, base
    )
    return out
