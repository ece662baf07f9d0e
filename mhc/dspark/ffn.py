"""The feed-forward half of a V4 block: a clamped SwiGLU, alone or as routed and shared experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc.dspark.config import V4Config


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


class DenseFFN(nn.Module):
    """`w2(swiglu(w1 x, w3 x))`: the shared expert, and the whole feed-forward of a dense model."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = nn.Linear(config.hidden_size, config.ffn_width, bias=False)
        self.w2 = nn.Linear(config.ffn_width, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.ffn_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit))


class Router(nn.Module):
    """Top-k routing by `sqrt(softplus(gate x))`; the correction bias chooses experts but never weighs them."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.top_k = config.experts_per_token
        self.scaling = config.routed_scaling
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # balanced by load, not by gradient
        self.bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> fp32 weights [T, top_k], normalised then scaled, and int64 experts [T, top_k]."""
        scores = F.softplus(F.linear(x.to(torch.float32), self.weight.to(torch.float32))).sqrt()
        chosen = (scores + self.bias.to(torch.float32)).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling, chosen


class Experts(nn.Module):
    """All routed experts, stacked: `w13` [E, 2I, H] holds w1 above w3, `w2` [E, H, I]."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w13 = nn.Parameter(torch.empty(config.num_experts, 2 * config.ffn_width, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.ffn_width))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """[T, H], weights and experts [T, top_k] -> [T, H]."""
        tokens, top_k = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // top_k]
        if x.is_cuda and x.dtype == torch.bfloat16:
            out = self._grouped(rows, chosen.flatten()[order])
        else:
            out = self._one_by_one(rows, chosen)
        out = torch.empty_like(out).index_copy(0, order, out).view(tokens, top_k, -1)
        return (out.to(torch.float32) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _grouped(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Two grouped products over rows sorted by expert: no host sync, idle experts cost nothing."""
        index = torch.arange(self.w13.shape[0], device=rows.device)
        ends = torch.searchsorted(experts, index, right=True).to(torch.int32)
        gate, up = F.grouped_mm(rows, self.w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(swiglu(gate, up, self.limit), self.w2.transpose(1, 2), offs=ends)

    def _one_by_one(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """The same, an expert at a time."""
        parts = []
        for expert, part in enumerate(rows.split(chosen.flatten().bincount(minlength=self.w13.shape[0]).tolist())):
            gate, up = F.linear(part, self.w13[expert]).chunk(2, dim=-1)
            parts.append(F.linear(swiglu(gate, up, self.limit), self.w2[expert]))
        return torch.cat(parts)


class MoE(nn.Module):
    """Routed experts plus one shared expert.

    Source: DeepSeek-V4's `noaux_tc` layers; checked against transformers' DeepseekV4SparseMoeBlock.
    """

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = DenseFFN(config)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)


def feed_forward(config: V4Config) -> nn.Module:
    """The feed-forward that `config.ffn` names."""
    return MoE(config) if config.ffn == "moe" else DenseFFN(config)
