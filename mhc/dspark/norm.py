"""RMSNorm, learned and unweighted, computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last dimension, rounded once to `x`'s dtype."""
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)  # one kernel, fp32 inside
    wide = F.rms_norm(x.to(torch.float32), x.shape[-1:], weight.to(torch.float32), eps)
    return wide.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned weight [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight)
