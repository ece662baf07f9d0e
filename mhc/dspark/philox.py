"""Counter-based random numbers: a value is a function of (seed, stream, request, position), never of the batch.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), in int64 torch arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


class Stream(IntEnum):
    """Who draws: the draft never shares a number with the verifier."""

    TARGET = 0  # the token the target emits at a position
    ACCEPT = 1  # the test of a drafted token
    DRAFT = 2  # the token the draft proposes


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32. Four int64 tensors of 32-bit words and two key words -> four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # a product of two 32-bit words wraps in int64, which keeps its bits; the masks drop the sign extension
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, streams: Sequence[Stream], requests: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Uniform numbers in [0, 1), one a position and stream.

    Args:
        seed: 0 to 2^64 - 1.
        streams: who draws.
        requests: int64, the requests' own ids (not their rows in the batch), broadcastable to `positions`.
        positions: int64, absolute positions of the tokens concerned.

    Returns:
        For each stream fp64 in the shape of `positions`, multiples of 2^-52.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be 0 to 2^64 - 1, got {seed}")
    requests, positions = torch.broadcast_tensors(requests, positions)
    shape = (len(streams), *positions.shape)  # all streams at once: a tenth of a round's kernels would be random bits
    stream = torch.cat([torch.full((1, *positions.shape), int(who), device=positions.device) for who in streams])
    counter = ((positions & MASK).expand(shape), (requests & MASK).expand(shape), (requests >> 32 & MASK).expand(shape))
    high, low, *_ = philox((*counter, stream), (seed & MASK, seed >> 32))
    return (((high << 20) | (low >> 12)).to(torch.float64) * 2.0**-52).unbind(0)
