"""Argument checks whose messages name the argument, its value and what is accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc.config import MHCConfig

BF16, FP32 = torch.bfloat16, torch.float32
ID_DTYPES = (torch.int64, torch.int32)

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


def check_pre(device: torch.device, config: MHCConfig, norm_weight: Tensor | None, **tensors: Tensor) -> None:
    """Check any of the tensors that a pre takes, by the names that `mhc.ops.pre` and its siblings give them.

    Raises:
        ValueError: as `check`.
    """
    hc, hidden, rows = config.hc_mult, config.hidden_size, config.mix_rows
    specs = {
        "residual": (BF16, ("T", hc, hidden)),
        "x": (BF16, ("T", hidden)),
        "embedding": (BF16, ("V", hidden)),
        "fn": (FP32, (rows, hc * hidden)),
        "fn_broadcast": (FP32, (rows, hidden)),
        "scale": (FP32, (3,)),
        "base": (FP32, (rows,)),
        "norm_weight": (BF16, (hidden,)),
    }
    if norm_weight is not None:
        tensors["norm_weight"] = norm_weight
    check({}, device, **{name: (tensor, *specs[name]) for name, tensor in tensors.items()})


def check_post(output: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> None:
    """Check the arguments of `mhc.ops.post`.

    Raises:
        ValueError: as `check`.
    """
    dims: dict[str, int] = {}
    check(dims, output.device, output=(output, BF16, ("T", "H")))
    if comb is None:
        check(dims, output.device, residual=(residual, BF16, ("T", "H")), post=(post, FP32, ("T", "hc")))
    else:
        check(
            dims,
            output.device,
            residual=(residual, BF16, ("T", "hc", "H")),
            post=(post, FP32, ("T", "hc", 1)),
            comb=(comb, FP32, ("T", "hc", "hc")),
        )


def check_post_pre(
    output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor | None,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> None:
    """Check the arguments of `mhc.ops.post_pre`.

    Raises:
        ValueError: as `check`, or `output` and `post` are not of the config's sizes.
    """
    check_post(output, residual, post, comb)
    if output.shape[1] != config.hidden_size or post.shape[1] != config.hc_mult:
        raise ValueError(
            f"output and post must be of H {config.hidden_size} and hc {config.hc_mult}, got {list(output.shape)} "
            f"and {list(post.shape)}"
        )
    check_pre(output.device, config, norm_weight, fn=fn, scale=scale, base=base)


def check_head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> None:
    """Check the arguments of `mhc.ops.head`.

    Raises:
        ValueError: as `check`.
    """
    hc, hidden = config.hc_mult, config.hidden_size
    check(
        {},
        residual.device,
        residual=(residual, BF16, ("T", hc, hidden)),
        fn=(fn, FP32, (hc, hc * hidden)),
        scale=(scale, FP32, (1,)),
        base=(base, FP32, (hc,)),
    )


def check_look_up(
    token_ids: Tensor, embedding: Tensor, table_post: Tensor, norm_weight: Tensor | None, config: MHCConfig
) -> None:
    """Check the arguments of `mhc.table.pre_from_table`.

    Raises:
        ValueError: as `check`.
    """
    dims: dict[str, int] = {}
    device = embedding.device
    check(dims, device, embedding=(embedding, BF16, ("V", config.hidden_size)))
    check(dims, device, token_ids=(token_ids, ID_DTYPES, ("T",)))
    check(dims, device, **{"table.post": (table_post, FP32, ("V", config.hc_mult))})
    if norm_weight is not None:
        check(dims, device, norm_weight=(norm_weight, BF16, (config.hidden_size,)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
