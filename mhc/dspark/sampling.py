"""From logits to tokens: temperature, and sampling by one uniform number a row."""

from __future__ import annotations

import torch
from torch import Tensor


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature above 0. [..., V] -> fp32 [..., V]."""
    return torch.softmax(logits.to(torch.float32) / temperature, dim=-1)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token whose interval of the cumulative sum holds `uniform`.

    Args:
        weights: [..., V] >= 0, need not sum to one; a token of weight 0 is never picked.
        uniform: fp64 [...] in [0, 1).

    Returns:
        int64 [...].
    """
    cumulative = weights.to(torch.float64).cumsum(-1)
    # multiples of 2^-52 below 1 stay strictly below the total after this product
    level = uniform.unsqueeze(-1) * cumulative[..., -1:]
    # a row of NaN (a broken draft) must not point outside the vocabulary
    return torch.searchsorted(cumulative, level, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
