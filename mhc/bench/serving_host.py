"""What the serving bench changes in vLLM beside the plugin: random weights, and what a host without a network lacks.

Nothing here belongs to the plugin, and a server never loads it. `install` runs in every worker process of the bench:

- vLLM's dummy weights are tiny and equal in kind; with them acceptance and routing degenerate, and 0.26.0 leaves the
  target's broadcast weight unset. `random_weights` takes their place. The draft's derived weight is left to the plugin.
- Without CuTe DSL (63 MiB that no other part needs) the compressor of head size 512 is vLLM's own Triton one.
- vLLM's start-up warm-ups are left out: the bench warms every shape that it times.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

SWITCH = "MHC_SERVING_HOST"  # environment variable, set by the bench for its workers
COMPRESSOR = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
COMMON_COMPRESSOR = "vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache"
WARM_UPS = (
    "sparse_mla_triton_warmup_if_needed",
    "flashinfer_sparse_mla_decode_autotune_warmup",
    "deepseek_v4_sparse_mla_attention_warmup",
    "deepseek_v4_mhc_warmup",
    "qwen_triton_warmup",
)
SCALE_EXPONENT = 121  # the E8M0 byte of 2^-6, the scale of every FP8 block


def install() -> None:
    """Change vLLM in this process; only where the bench asked for it."""
    if os.environ.get(SWITCH) != "1":
        return
    loader = importlib.import_module("vllm.model_executor.model_loader.dummy_loader").DummyModelLoader
    loader.load_weights = lambda self, model, model_config: random_weights(model)
    if importlib.util.find_spec("cutlass") is None:
        sys.modules[COMPRESSOR] = _triton_compressor()
    warm_up = importlib.import_module("vllm.model_executor.warmup.kernel_warmup")
    for name in WARM_UPS:
        if hasattr(warm_up, name):
            setattr(warm_up, name, lambda *args, **kwargs: None)


def _triton_compressor() -> ModuleType:
    module = ModuleType(COMPRESSOR)

    def compress(*, store_full_kv: bool = False, store_full_fp8: bool = False, fp8_scale: Any = None, **named: Any):  # type: ignore[no-untyped-def]
        if store_full_kv or store_full_fp8:
            raise ValueError("store_full_kv and store_full_fp8 must be False without CuTe DSL")
        return importlib.import_module(COMMON_COMPRESSOR).compress_norm_rope_store_triton(**named)

    module.compress_norm_rope_store_cutedsl = compress  # type: ignore[attr-defined]
    return module


@torch.no_grad()
def random_weights(model: nn.Module, seed: int = 1234) -> None:
    """Fill every parameter with finite random values of a trained model's size, the same in every process.

    Args:
        model: vLLM's target or draft, on its device; its own broadcast weight is derived afterwards.
        seed: of the device's generator.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta:
            _fill(name, parameter.data, generator)
    finalize = getattr(getattr(model, "model", None), "finalize_mhc_broadcast_weights", None)
    if finalize is not None:  # the target's; `load_weights` would have called it
        finalize()


def _fill(name: str, data: Tensor, generator: torch.Generator) -> None:
    def normal(shape: torch.Size, std: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=data.device, dtype=torch.float32) * std

    exponents = (torch.uint8, torch.float8_e8m0fnu)
    if data.dtype in exponents or "weight_scale" in name:
        if data.dtype in exponents:
            data.view(torch.uint8).fill_(SCALE_EXPONENT)
        else:
            data.fill_(2.0 ** (SCALE_EXPONENT - 127))
    elif data.dtype == torch.float8_e4m3fn:
        if data.dim() == 3:  # experts: four distinct ones, repeated, are as good as 256 and fast to make
            distinct = normal(torch.Size((min(4, data.shape[0]), *data.shape[1:])), 1.0).to(data.dtype)
            for expert in range(data.shape[0]):
                data[expert].copy_(distinct[expert % len(distinct)])
        else:
            data.copy_(normal(data.shape, 1.0).to(data.dtype))
    elif not data.is_floating_point():
        pass  # hash routing: vLLM's constructor made it
    elif "norm" in name:
        data.fill_(1.0)
    elif "hc_" in name:
        data.copy_(normal(data.shape, {"fn": 0.01, "base": 0.1}.get(name.rpartition("_")[2], 0.0)))
        if name.endswith("_scale"):
            data.fill_(0.1)
    elif "attn_sink" in name or "e_score_correction_bias" in name:
        data.zero_()
    elif "embed" in name:
        data.copy_(normal(data.shape, 1.0))
    else:
        data.copy_(normal(data.shape, data.shape[-1] ** -0.5 if data.dim() > 1 else 0.02))
