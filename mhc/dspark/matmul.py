"""Matrix products whose result keeps fp32: attention scores and logits, where bf16 would make near-ties ties."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` accumulated and returned in fp32. [..., N, K], [..., K, M] (no broadcasting) -> fp32 [..., N, M].

    On CUDA in inference bf16 operands go to the tensor cores as they are; elsewhere they are widened first. Under
    autocast the product is autocast's.
    """
    if a.is_cuda and a.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        if a.dim() == 2:
            return torch.mm(a, b, out_dtype=torch.float32)
        rows = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), out_dtype=torch.float32)
        return rows.view(*a.shape[:-1], b.shape[-1])
    return (a.to(torch.float32) @ b.to(torch.float32)).to(torch.float32)
