"""Random weights: for training from scratch, and for real shapes whose checkpoint is not at hand."""

from __future__ import annotations

import torch
from torch import nn

from mhc.dspark.block import V4Block
from mhc.dspark.config import V4Config

STD = 0.02
KEPT_FP32 = ("hc_", "attn_sink", "gate.bias", "confidence_head")


@torch.no_grad()
def initialise(module: nn.Module, config: V4Config, seed: int) -> nn.Module:
    """Fill every parameter; a target starts close to a plain pre-norm residual network.

    Matrices are normal with std 0.02, those that write to the streams (`wo_b`, `w2`) smaller by sqrt(2 * layers).
    mHC starts with comb near the identity, post at 1 and pre leaning on one stream a layer, so that the streams can
    differ (Hyper-Connections' own start); the mixes' input-dependent part starts small.

    Args:
        module: a `Target` or `DSparkDraft`, on any device but meta.
        seed: of the generator, on the module's device.
    """
    device = next(module.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    depth = sum(isinstance(part, V4Block) for part in module.modules()) or 1
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dim() < 2:
            parameter.fill_(0.1 if name.endswith("scale") else 0.0)
        else:
            narrow = name.endswith(("wo_b.weight", "w2.weight", "experts.w2"))
            parameter.normal_(0.0, STD / (2 * depth) ** 0.5 if narrow else STD, generator=generator)
    for index, block in enumerate(part for part in module.modules() if isinstance(part, V4Block)):
        _start_mixes(block, index, config)
    hook = getattr(module, "process_weights_after_loading", None)
    if hook is not None:
        hook()
    return module


def _start_mixes(block: V4Block, index: int, config: V4Config) -> None:
    hc = config.mhc.hc_mult
    for part in ("attn", "ffn"):
        base = block.get_parameter(f"hc_{part}_base")
        base[:hc] = -1.0
        base[index % hc] = 1.0
        base[2 * hc :] = (4.0 * torch.eye(hc, device=base.device) - 4.0).flatten()


def to_inference(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Cast in place to the dtype of inference; mHC weights, sinks, the routing bias and the confidence head stay fp32.

    Works on meta modules, so that real shapes are never held in fp32. Gradients are switched off.
    """
    for name, parameter in module.named_parameters():
        kept = any(part in name for part in KEPT_FP32)
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
        parameter.requires_grad_(False).grad = None
    hook = getattr(module, "process_weights_after_loading", None)
    if hook is not None:
        hook()
    return module.eval()
