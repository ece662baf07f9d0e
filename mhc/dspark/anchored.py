"""Teacher-forced draft forward: many anchors of a known sequence at once, for training and analysis."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc.dspark.draft import DSparkDraft


class AnchoredOutput(NamedTuple):
    """Row i of block a stands at position `anchors[a] + i` and predicts the token at position `anchors[a] + i + 1`."""

    logits: Tensor  # [B, A, k, V] fp32, Markov-corrected by the true previous token
    confidence_logits: Tensor  # [B, A, k] fp32
    labels: Tensor  # [B, A, k] int64, the true next tokens (of no meaning where `valid` is false)
    rows: Tensor  # [B, A, k] int64, the sequence row whose target logits predict the same token, clamped to S - 1
    valid: Tensor  # [B, A, k] bool, the label lies inside the sequence


def anchored_forward(
    draft: DSparkDraft, token_ids: Tensor, aux: Tensor, anchors: Tensor, *, expansion: str = "broadcast"
) -> AnchoredOutput:
    """Draft a block from every anchor, as decoding would have if the target had emitted `token_ids`.

    A block sees the context rows before its anchor (within the window) and its own k rows; blocks do not see each
    other. Static shapes and no host sync: `torch.compile` and CUDA-graph capture take it.

    Args:
        draft: bound to its target.
        token_ids: [B, S] int64.
        aux: [B, S, m * H] of the target on the same tokens.
        anchors: [B, A] int64 positions in `token_ids`.
        expansion: see `mhc.dspark.expansion`.
    """
    size, length = draft.config.block_size, token_ids.shape[1]
    starts = torch.arange(length, device=token_ids.device)
    block_ids, positions = draft.block(token_ids.gather(1, anchors), anchors)
    features = draft.main_features(aux)
    rotation = draft.angles(starts.expand_as(token_ids))
    keys = [block.attn.latent(features, rotation) for block in draft.layers]
    mask = draft._visible(anchors.repeat_interleave(size, 1), starts)
    groups = anchors.shape[1]
    hidden = draft._backbone(block_ids.flatten(1), positions.flatten(1), keys, mask, groups, expansion)
    hidden = hidden.unflatten(1, (groups, size))

    rows = positions.clamp(max=length - 1)
    previous = token_ids.gather(1, rows.flatten(1)).view_as(rows)
    labels = token_ids.gather(1, (rows + 1).clamp(max=length - 1).flatten(1)).view_as(rows)
    embedded = draft.markov_head.embed(previous)
    return AnchoredOutput(
        logits=draft.base_logits(hidden) + draft.markov_head(embedded),
        confidence_logits=draft.confidence_head(hidden, embedded),
        labels=labels,
        rows=rows,
        valid=positions + 1 < length,
    )
