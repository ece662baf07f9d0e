"""Sinkhorn with a gradient of its own: less than half the launches that autograd makes of the plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mhc.config import MHCConfig


class _Sinkhorn(torch.autograd.Function):
    """Two launches a normalisation, forward and backward.

    Tokens are the last dimension, where memory is contiguous. A border of `eps` around every matrix makes one sum of
    `colsum + eps`. Backward goes through the logarithms: of `c' = a / (sum(a) + eps)` they are
    `dlog a = dlog c' - c' * sum(dlog c')`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int, eps: float) -> Tensor:
        tokens, hc, _ = logits.shape
        steps = 2 * iters - 1
        border = logits.new_full((steps + 1, hc + 1, hc + 1, tokens), eps)
        c = border[:, :hc, :hc]
        torch.add(torch.softmax(logits.permute(1, 2, 0), dim=1), eps, out=c[0])
        for n in range(steps):
            with_border = border[n, :hc] if n % 2 else border[n, :, :hc]  # rows in odd steps, columns in even ones
            torch.div(c[n], with_border.sum(n % 2, keepdim=True), out=c[n + 1])
        ctx.save_for_backward(border)
        ctx.eps = eps
        return c[steps].permute(2, 0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (border,) = ctx.saved_tensors
        hc = border.shape[1] - 1
        c = border[:, :hc, :hc]
        steps = len(c) - 1
        dlog = grad.permute(1, 2, 0) * c[steps]
        for n in reversed(range(steps)):
            dlog = torch.addcmul(dlog, c[n + 1], dlog.sum(n % 2, keepdim=True), value=-1)
        # c[0] = softmax + eps
        p = c[0] - ctx.eps
        dlog_p = dlog / c[0] * p
        return torch.addcmul(dlog_p, p, dlog_p.sum(1, keepdim=True), value=-1).permute(2, 0, 1), None, None


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """`reference.sinkhorn` for training: [T, hc, hc] -> [T, hc, hc], once differentiable, `eps` > 0.

    Keeps every iterate for backward: `2 * iters * (hc + 1)^2` numbers a token.
    """
    return _Sinkhorn.apply(logits, iters, eps)


def gates(m: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.gates` for training: the mixes [T, M] to `pre` [T, hc], `post` [T, hc] and `comb` [T, hc, hc]."""
    hc = config.hc_mult
    scale, base = scale.to(m.dtype), base.to(m.dtype)
    pre, post, comb = m.split((hc, hc, hc * hc), dim=-1)
    pre = torch.sigmoid(pre * scale[0] + base[:hc]) + config.pre_eps
    post = config.post_mult * torch.sigmoid(post * scale[1] + base[hc : 2 * hc])
    logits = comb * scale[2] + base[2 * hc :]
    return pre, post, sinkhorn(logits.view(-1, hc, hc), config.sinkhorn_iters, config.sinkhorn_eps)
