"""Losses: next tokens for the target; cross entropy, L1 and confidence for the draft.

Source: the DSpark paper's objective with DeepSpec's constants for blocks of 7.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

POSITION_DECAY = 4.0
CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0


def next_token_loss(logits: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of `-log p(ids[t + 1] | ids[: t + 1])`.

    Args:
        logits: [B, S, V].
        ids: [B, S] int64.
        weight: [B, S] float, of each id as a label (the first id is never one).
    """
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weight = weight[:, 1:].flatten().to(losses.dtype)
    return (losses * weight).sum() / weight.sum().clamp(min=1e-6)


def draft_losses(
    draft_logits: Tensor, target_logits: Tensor, labels: Tensor, confidence: Tensor, valid: Tensor
) -> dict[str, Tensor]:
    """The paper's losses over blocks of k rows.

    `w_i = exp(-i / 4)`; `L = 0.1 CE + 0.9 L1(p_draft, p_target) + 1.0 BCE(c, 1 - L1 / 2)`, each a weighted mean.

    Args:
        draft_logits: [N, k, V], the Markov correction included.
        target_logits: [N, k, V] of the target at the same places.
        labels: [N, k] int64, the tokens that followed.
        confidence: [N, k] logits.
        valid: [N, k] bool, a prefix of each block: rows whose label exists.

    Returns:
        `loss`, its parts `ce`, `l1`, `bce`, and `tau`: the acceptance length at temperature 1 expected from the blocks
        that are valid to their end, `1 + mean(sum_i prod_{j <= i} (1 - L1_j / 2))`.
    """
    draft_logits, target_logits = draft_logits.float(), target_logits.float()
    k = labels.shape[1]
    decay = torch.exp(-torch.arange(k, device=labels.device) / POSITION_DECAY)
    weight = valid * decay
    total = weight.sum().clamp(min=1e-6)

    def mean(values: Tensor) -> Tensor:
        return (values * weight).sum() / total

    cross_entropy = F.cross_entropy(draft_logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    l1 = (draft_logits.softmax(-1) - target_logits.softmax(-1)).abs().sum(-1)
    acceptance = (1 - l1 / 2).detach()
    bce = F.binary_cross_entropy_with_logits(confidence.float(), acceptance.clamp(0, 1), reduction="none")
    ce_mean, l1_mean, bce_mean = mean(cross_entropy), mean(l1), mean(bce)
    whole = valid.all(1)
    survival = acceptance.cumprod(1).sum(1)
    return {
        "loss": CE_WEIGHT * ce_mean + L1_WEIGHT * l1_mean + CONFIDENCE_WEIGHT * bce_mean,
        "ce": ce_mean.detach(),
        "l1": l1_mean.detach(),
        "bce": bce_mean.detach(),
        "tau": 1 + (survival * whole).sum() / whole.sum().clamp(min=1),
    }
