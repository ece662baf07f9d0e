"""The draft under its checkpoint names: `mtp.{i}.*`, every name accounted for in both directions."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mhc.checkpoint import Checkpoint
from mhc.dspark.draft import DSparkDraft
from mhc.dspark.ffn import MoE
from mhc.dspark.target import SharedEmbeddings

FIRST_STAGE = ("main_proj.", "main_norm.")
LAST_STAGE = ("norm.", "hc_head_", "markov_head.", "confidence_head.")


def checkpoint_tensors(draft: DSparkDraft) -> dict[str, Tensor]:
    """Every weight of the draft under its DeepSeek-V4 name.

    Layer i is `mtp.{i}`; the context projection stands in stage 0, the final norm and the heads in the last stage.
    Stacked experts appear one by one. The tensors are views: writing to them writes to the draft, and `save_file` of
    their contiguous copies makes a checkpoint.
    """
    last = draft.config.draft_layers - 1
    named: dict[str, Tensor] = {}
    for name, parameter in draft.named_parameters():
        tensor = parameter.detach()
        if name.startswith("layers."):
            stage, inner = name.removeprefix("layers.").split(".", 1)
            if not inner.startswith("ffn.experts."):
                named[f"mtp.{stage}.{inner}"] = tensor
        elif name.startswith(FIRST_STAGE):
            named[f"mtp.0.{name}"] = tensor
        elif name.startswith(LAST_STAGE):
            named[f"mtp.{last}.{name}"] = tensor
        else:
            raise AssertionError(f"{name} has no checkpoint name")
    for layer, block in enumerate(draft.layers):
        if isinstance(block.ffn, MoE):
            experts = block.ffn.experts
            for index, (w13, w2) in enumerate(zip(experts.w13.detach(), experts.w2.detach(), strict=True)):
                w1, w3 = w13.chunk(2)
                stem = f"mtp.{layer}.ffn.experts.{index}"
                named |= {f"{stem}.w1.weight": w1, f"{stem}.w2.weight": w2, f"{stem}.w3.weight": w3}
    return named


def load_draft(draft: DSparkDraft, path: str | Path) -> None:
    """Fill a draft from a DeepSeek-V4 checkpoint and make its derived weight.

    Args:
        draft: on any device but meta; embeddings and output projection are not touched (`load_shared`).
        path: see `mhc.checkpoint.Checkpoint`; only `mtp.*` tensors are read, one at a time.

    Raises:
        FileNotFoundError: no checkpoint, or a shard is missing.
        ValueError: naming the tensor and the file: missing, unexpected, truncated, wrong shape, quantised, or stored in
            a dtype that would lose digits.
    """
    _fill(checkpoint_tensors(draft), Checkpoint(path), within=("mtp.",))
    draft.process_weights_after_loading()


def load_shared(shared: SharedEmbeddings, path: str | Path) -> None:
    """Fill embedding and output projection from a checkpoint's `embed.weight` and `head.weight`; raises as above."""
    named = {name: shared.get_parameter(name).detach() for name in ("embed.weight", "head.weight")}
    _fill(named, Checkpoint(path), within=("embed.", "head."))


def _fill(destinations: dict[str, Tensor], checkpoint: Checkpoint, within: tuple[str, ...]) -> None:
    _refuse_quantised(checkpoint, within)
    checkpoint.require(destinations, within)
    for name, destination in destinations.items():
        if destination.device.type == "meta":
            raise ValueError(f"{name} must be on a real device before loading: call to_empty(device=...) first")
        stored = checkpoint.check(name, tuple(destination.shape))
        if torch.promote_types(stored, destination.dtype) != destination.dtype:
            raise ValueError(
                f"{name} in {checkpoint.files[name]} is {stored}, the draft's is {destination.dtype}: "
                "cast one of them, loading never drops digits"
            )
    for name, destination in destinations.items():
        destination.copy_(checkpoint.read(name))


def _refuse_quantised(checkpoint: Checkpoint, within: tuple[str, ...]) -> None:
    # a quantised weight comes with a `.scale`, which would otherwise only be called unexpected
    for name, file in checkpoint.files.items():
        if name.startswith(within) and name.endswith(".scale"):
            raise ValueError(
                f"{name.removesuffix('.scale')}.weight in {file} is quantised (it comes with {name}): "
                "convert the checkpoint to bf16 first, fp8 and fp4 weights are not read"
            )
