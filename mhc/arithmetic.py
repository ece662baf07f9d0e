"""Emulated arithmetic: what a tensor core or a kernel does to fp32 numbers, bit for bit where it matters.

Units in the last place (`ulp`), TF32 and bf16 roundings, and a projection whose summation order is known, so that
`mhc.error` can bound it. Everything runs on any device in plain torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# unit roundoff: the largest relative error of one rounding to nearest
U_FP32 = 2.0**-24
U_TF32 = 2.0**-11
U_BF16 = 2.0**-8

CHUNK = 16
"""Terms summed in an unspecified order before the pairwise sum begins: a thread's share of K."""

ARITHMETICS = ("tf32_truncate", "tf32_nearest", "bf16x3", "fp32")
"""Projections emulated by `project`: DeepGEMM's (fp32 bits read as TF32), TileKernels' (rounded to TF32 beforehand),
SGLang's for V4.1 (three bf16 parts), and plain fp32."""


def ulp_bf16(value: Tensor) -> Tensor:
    """Distance between neighbouring bf16 numbers at `value`, in fp64; at powers of two the distance upwards.

    Subnormals share the spacing 2^-133.
    """
    value = value.to(torch.float64)
    _, exponent = torch.frexp(value)
    exponent = torch.where(value == 0, -125, exponent.clamp(min=-125))
    return torch.ldexp(torch.ones_like(value), exponent - 8)


def err_ulp(got: Tensor, truth: Tensor) -> Tensor:
    """`|got - truth|` in bf16 ulp of `truth`: 0.5 is a correct rounding, more is lost accuracy. Same shapes, fp64."""
    return (got.to(torch.float64) - truth.to(torch.float64)).abs() / ulp_bf16(truth)


def steps_bf16(a: Tensor, b: Tensor) -> Tensor:
    """How many bf16 numbers lie between two bf16 tensors: 0 when equal, 1 for neighbours. int32.

    Raises:
        ValueError: a tensor is not bf16.
    """
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} must be bfloat16, got {tensor.dtype}")
    bits_a, bits_b = (t.contiguous().view(torch.int16).to(torch.int32) for t in (a, b))
    # sign and magnitude to a number line on which -0 and +0 coincide
    line_a, line_b = (torch.where(bits < 0, -(bits & 0x7FFF), bits) for bits in (bits_a, bits_b))
    return (line_a - line_b).abs()


def truncate_tf32(value: Tensor) -> Tensor:
    """Drop the 13 low bits of fp32: how a tensor core reads an fp32 operand as TF32. Relative error below 2^-10."""
    return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def nearest_tf32(value: Tensor) -> Tensor:
    """Round fp32 to TF32, ties to even: relative error at most 2^-11."""
    bits = value.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(value.isfinite(), rounded.view(torch.float32), value)


def split_bf16(value: Tensor, parts: int = 3) -> list[Tensor]:
    """bf16 parts whose sum is `value`, largest first; three hold all 24 bits of an fp32 (above 2^-110)."""
    rest, out = value, []
    for _ in range(parts):
        out.append(rest.to(torch.bfloat16).to(torch.float32))
        rest = rest - out[-1]
    return out


def dot(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w.T` in fp32: chunks of 16 terms, then a pairwise sum of the chunks. [T, K], [M, K] -> [T, M].

    No term has met more than `depth(K)` roundings, whatever the order and the fused multiply-adds inside a chunk.
    """
    tokens, width = x.shape
    count = -(-width // CHUNK)
    x, w = (torch.nn.functional.pad(t.to(torch.float32), (0, count * CHUNK - width)) for t in (x, w))
    chunks = torch.bmm(x.view(tokens, count, CHUNK).transpose(0, 1), w.view(-1, count, CHUNK).permute(1, 2, 0))
    while len(chunks) > 1:
        odd = chunks[-1:] if len(chunks) % 2 else chunks[:0]
        chunks = torch.cat([chunks[0 : len(chunks) - 1 : 2] + chunks[1::2], odd])
    return chunks[0]


def depth(width: int) -> int:
    """Roundings that a term of `dot` meets at most on its way into a sum of `width` terms, its product's included."""
    count = -(-width // CHUNK)
    return min(width, CHUNK) + math.ceil(math.log2(count))


def project(x: Tensor, w: Tensor, arithmetic: str) -> Tensor:
    """`x @ w.T` as a kernel of the given arithmetic computes it. [T, K] bf16, [M, K] fp32 -> [T, M] fp32.

    A bf16 `x` fits TF32, and its products with TF32 or bf16 weights are exact in fp32: only `w` is ever rounded.

    Raises:
        ValueError: `arithmetic` is unknown, or `x` is not bf16.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x must be bfloat16, got {x.dtype}")
    if arithmetic == "tf32_truncate":
        return dot(x, truncate_tf32(w))
    if arithmetic == "tf32_nearest":
        return dot(x, nearest_tf32(w))
    if arithmetic == "bf16x3":
        high, middle, low = (dot(x, part) for part in split_bf16(w))
        return high + (middle + low)
    if arithmetic == "fp32":
        return dot(x, w)
    raise ValueError(f"arithmetic must be one of {', '.join(ARITHMETICS)}, got {arithmetic!r}")
