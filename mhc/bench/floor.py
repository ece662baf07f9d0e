"""The floor under every timing: a kernel that only moves the op's bytes, and a kernel that does nothing.

Both are Triton kernels (Triton comes with CUDA builds of torch), launched in the same graphs as what they are
compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BLOCK = 2048  # bf16 elements a program handles at a time: 16 bytes a thread of 256
MOST_PROGRAMS = 4096
ROUND_TO = 16  # elements: lengths that divide by it are moved 16 bytes at a time


@cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def empty() -> None:
        pass

    # reads source [r] once and writes target [w] once; every store depends on every load of its lane, as an op's
    # outputs depend on its inputs
    @triton.jit
    def move(source, target, r, w, PROGRAMS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        lane = tl.arange(0, SIZE)
        total = tl.zeros((SIZE,), tl.bfloat16)
        for start in range(tl.program_id(0).to(tl.int64) * SIZE, r, PROGRAMS * SIZE):
            total += tl.load(source + start + lane, mask=start + lane < r, other=0.0)
        for start in range(tl.program_id(0).to(tl.int64) * SIZE, w, PROGRAMS * SIZE):
            tl.store(target + start + lane, total, mask=start + lane < w)

    return empty, move


def launch() -> Callable[[], None]:
    """A closure that launches an empty kernel."""
    empty, _ = _kernels()
    return lambda: empty[(1,)](num_warps=1)


def length(nbytes: int) -> int:
    """bf16 elements that hold `nbytes`, rounded up so that a copy of them is vectorised."""
    return -(-nbytes // (2 * ROUND_TO)) * ROUND_TO


def copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A closure that reads all of `source` and writes all of `target`, each byte once.

    Args:
        source, target: 1-D bf16, of `length(...)` elements.

    Raises:
        ValueError: a tensor is not that.
    """
    for name, tensor in (("source", source), ("target", target)):
        if tensor.dtype != torch.bfloat16 or tensor.dim() != 1 or tensor.numel() % ROUND_TO:
            raise ValueError(
                f"{name} must be 1-D bfloat16 of a multiple of {ROUND_TO}, got {tensor.dtype} {list(tensor.shape)}"
            )
    _, move = _kernels()
    r, w = source.numel(), target.numel()
    programs = min(MOST_PROGRAMS, 1 << max(0, (-(-max(r, w) // BLOCK) - 1).bit_length()))

    def call() -> torch.Tensor:
        move[(programs,)](source, target, r, w, PROGRAMS=programs, SIZE=BLOCK, num_warps=8)
        return target

    return call
