"""Other people's kernels, imported without the rest of their projects.

vLLM's mHC kernels need only its Python files, DeepGEMM's extension and the TileLang version that vLLM pins
(`python -m mhc bench wheels peers` makes such a set). vLLM's own compiled ops are not among what they call: an empty
module takes the place of `vllm._C_stable_libtorch` where that is absent.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mhc.config import MHCConfig

VLLM_OPS = "vllm._C_stable_libtorch"


class Absent(RuntimeError):
    """A peer is not here; the message says what is missing."""


@cache
def vllm() -> Any:
    """vLLM's module `vllm.model_executor.kernels.mhc.tilelang`.

    Raises:
        Absent: vLLM, TileLang or DeepGEMM cannot be imported, with the import's own message.
    """
    if importlib.util.find_spec("vllm") is None:
        raise Absent("vllm is not installed: see `python -m mhc bench wheels peers`")
    try:
        # before any of vLLM: the package imports its CUDA platform, and that its compiled ops
        for name in stubs():
            sys.modules.setdefault(name, types.ModuleType(name))
        module = importlib.import_module("vllm.model_executor.kernels.mhc.tilelang")
        importlib.import_module("vllm.model_executor.kernels.mhc.tilelang_kernels")
        supported = importlib.import_module("vllm.utils.deep_gemm").is_deep_gemm_supported()
    except Exception as error:  # a broken install fails in many ways, all of which mean that there is nothing to time
        raise Absent(f"vllm does not import: {type(error).__name__}: {error}") from error
    if not supported:
        raise Absent("vllm's vendored DeepGEMM does not load: its extension or a CUDA toolkit (CUDA_HOME) is missing")
    return module


def stubs() -> dict[str, str]:
    """The modules of vLLM that an empty one stands in for here, as they are named in a record beside its versions."""
    package = importlib.util.find_spec("vllm")
    if package is None or importlib.machinery.PathFinder.find_spec(VLLM_OPS, package.submodule_search_locations):
        return {}
    return {VLLM_OPS: "an empty module in its place"}


def _constants(config: MHCConfig) -> tuple[float, float, float, float, int]:
    """In vLLM's order: rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat."""
    return config.rms_eps, config.pre_eps, config.sinkhorn_eps, config.post_mult, config.sinkhorn_iters


def vllm_repeat(w: Any, config: MHCConfig) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """vLLM's draft as released: `unsqueeze.repeat`, then `mhc_pre_tilelang`. x [T, H] -> the four outputs."""
    pre, constants = vllm().mhc_pre_tilelang, _constants(config)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        streams = x.unsqueeze(1).repeat(1, config.hc_mult, 1)
        mixed = pre(streams, w.fn, w.scale, w.base, *constants, norm_weight=w.norm_weight, norm_eps=config.norm_eps)
        return streams, *mixed

    return call


def vllm_broadcast(w: Any, config: MHCConfig) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """vLLM's target as released: `mhc_pre_broadcast_tilelang`, whose projection is DeepGEMM's. x [T, H] -> four."""
    pre, constants = vllm().mhc_pre_broadcast_tilelang, _constants(config)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        return pre(
            x, w.fn, w.scale, w.base, *constants,
            norm_weight=w.norm_weight, norm_eps=config.norm_eps, fn_broadcast=w.fn_broadcast,
        )  # fmt: skip

    return call


def vllm_post_pre(w: Any, config: MHCConfig) -> Callable[..., tuple[Tensor, ...]]:
    """vLLM's `mhc_fused_post_pre_tilelang`. output, streams, post [T, hc, 1], comb -> the four outputs."""
    fused, constants = vllm().mhc_fused_post_pre_tilelang, _constants(config)

    def call(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor, ...]:
        return fused(
            output, streams, post, comb, w.fn, w.scale, w.base, *constants,
            norm_weight=w.norm_weight, norm_eps=config.norm_eps,
        )  # fmt: skip

    return call


def tilekernels_repeat(w: Any, config: MHCConfig) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """TileKernels' expand and fused pre; it has no RMSNorm, so torch's follows. x [T, H] -> the four outputs.

    Raises:
        Absent: tile_kernels cannot be imported.
    """
    try:
        expand = importlib.import_module("tile_kernels.modeling.mhc.ops.expand").expand_to_mhc
        pre = importlib.import_module("tile_kernels.modeling.mhc.ops.pre_big_fuse").mhc_pre_big_fuse
    except Exception as error:
        raise Absent(f"tile_kernels does not import: {type(error).__name__}: {error}") from error
    constants = _constants(config)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        streams = expand(x, config.hc_mult)
        post, comb, y = pre(streams, w.fn, w.scale, w.base, *constants)
        normed = torch.nn.functional.rms_norm(y, (config.hidden_size,), w.norm_weight, config.norm_eps)
        return streams, post, comb, normed

    return call
