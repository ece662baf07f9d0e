"""Interleaved rotary position embedding on the last dimensions of a head, and its inverse."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Angles of some positions, shared by all layers."""

    cos: Tensor  # fp32 [..., rope_dim / 2]
    sin: Tensor


def angles(positions: Tensor, rope_dim: int, theta: float) -> Rotation:
    """Cosine and sine of `position * theta^(-2i / rope_dim)`. int [...] -> [..., rope_dim / 2].

    Plain RoPE: V4's window layers take theta 10000 and no YaRN.
    """
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=positions.device) / rope_dim
    phase = positions.unsqueeze(-1).to(torch.float32) * (1.0 / theta**exponent)
    return Rotation(phase.cos(), phase.sin())


def rotate(x: Tensor, rotation: Rotation, inverse: bool = False) -> Tensor:
    """Rotate the pairs `(x[2i], x[2i + 1])` of the last dimensions. [..., D] -> [..., D], same dtype.

    Args:
        x: [..., D]; its first `D - rope_dim` entries pass unchanged.
        rotation: from `angles`, broadcastable to [..., rope_dim / 2].
        inverse: rotate back, which undoes a rotation at the same position.
    """
    cos, sin = rotation
    rope_dim = 2 * cos.shape[-1]
    plain, turned = x[..., : x.shape[-1] - rope_dim], x[..., x.shape[-1] - rope_dim :]
    even, odd = turned.to(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    if inverse:
        sin = -sin
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), dim=-1)
