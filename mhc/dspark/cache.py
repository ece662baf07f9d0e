"""Latent caches of a batch of requests: a slot a position, and a bin for rows that must not be kept."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc.dspark.config import V4Config


class LatentCache:
    """Rotated latents of `layers` layers for R requests: the target's KV cache, or the draft's context.

    A row at absolute position p lies in slot p, so rejected rows need no clean-up: visibility is a matter of positions,
    and the next write to a position replaces what was there. Slot `capacity` is the bin: rows written with `valid`
    false go there and are never read.

    Args:
        config: shapes.
        layers: number of layers.
        requests: R.
        capacity: positions a request may fill.
        like: gives device and dtype.
    """

    def __init__(self, config: V4Config, layers: int, requests: int, capacity: int, like: Tensor) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        shape = (layers, requests, capacity + 1, config.head_dim)
        # zeros, not empty: a masked key has weight 0, and 0 * NaN would still be NaN
        self.rows = torch.zeros(shape, device=like.device, dtype=like.dtype)

    def write(self, layer: int, latents: Tensor, positions: Tensor, valid: Tensor | None = None) -> None:
        """Store [R, n, D] at positions [R, n]; rows with `valid` [R, n] false go to the bin, unread."""
        slots = positions if valid is None else positions.where(valid, self.capacity)
        index = slots.unsqueeze(-1).expand(-1, -1, latents.shape[-1])
        self.rows[layer].scatter_(1, index, latents.to(self.rows.dtype))

    def read(self, layer: int) -> Tensor:
        """Every slot but the bin. [R, capacity, D]."""
        return self.rows[layer, :, : self.capacity]

    def positions(self) -> Tensor:
        """The position of each slot. [capacity] int64."""
        return torch.arange(self.capacity, device=self.rows.device)

    def copy_prefix(self, prefix: LatentCache, length: int) -> None:
        """Take positions 0 to `length - 1` of a one-request cache into every request: a prefix-cache hit."""
        self.rows[:, :, :length] = prefix.rows[:, :, :length]
