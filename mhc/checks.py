"""Argument checks whose messages name the argument, its value and what is accepted."""

from __future__ import annotations

import torch
from torch import Tensor

Dim = int | str  # an int is required; a letter is bound by the first tensor that has it
Dtype = torch.dtype | tuple[torch.dtype, ...]  # one, or any of several


def check(dims: dict[str, int], device: torch.device, **specs: tuple[Tensor, Dtype, tuple[Dim, ...]]) -> None:
    """Check dtype, shape, contiguity and device of named tensors.

    Args:
        dims: sizes of the letters known so far; letters first met here are added, so that shapes bind each other.
        device: where every tensor must live.
        specs: name -> (tensor, dtype, shape), a shape being ints and letters.

    Raises:
        ValueError: the first mismatch, e.g. `x must be bfloat16 [T, 4096], got float32 [3, 4096]`.
    """
    for name, (tensor, dtype, shape) in specs.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        known = dict(dims)
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        fits = tensor.dtype in dtypes and tensor.dim() == len(shape)
        for dim, size in zip(shape, tensor.shape, strict=False):
            fits = fits and size == (dim if isinstance(dim, int) else dims.setdefault(dim, size))
        # only a refused call is put into words: torch.compile cannot print a dynamic size
        if not fits:
            want = ", ".join(str(known.get(d, d) if isinstance(d, str) else d) for d in shape)
            wanted = " or ".join(_name(one) for one in dtypes)
            raise ValueError(f"{name} must be {wanted} [{want}], got {_name(tensor.dtype)} {list(tensor.shape)}")
        if not tensor.is_contiguous():
            got = f"{_name(tensor.dtype)} {list(tensor.shape)}"
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())} for {got}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
