"""V4 attention: one latent that is key and value for every head, sink logits, grouped output projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhc.dspark.config import V4Config
from mhc.dspark.norm import RMSNorm, rms_norm
from mhc.dspark.rope import angles, rotate


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias, as every one of V4's."""
    return nn.Linear(inputs, outputs, bias=False)


class LatentAttention(nn.Module):
    """DeepSeek-V4's window attention (compress ratio 0): parameter names are the checkpoint's.

    q = rms(wq_b(q_norm(wq_a x))) per head, rotated;  K = V = kv_norm(wkv x), rotated, one for all heads;
    out = softmax([q . K * D^-0.5, sink]) V, rotated back, then wo_a per group of heads, then wo_b.

    Source: DeepSeek-V4; checked against transformers' DeepseekV4Attention.
    """

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        eps = config.mhc.norm_eps
        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, eps)
        self.wq_b = linear(config.q_lora_rank, width)
        self.wkv = linear(config.hidden_size, config.head_dim)
        self.kv_norm = RMSNorm(config.head_dim, eps)
        self.attn_sink = nn.Parameter(torch.zeros(config.num_heads))
        self.wo_a = linear(width // config.o_groups, config.o_groups * config.o_lora_rank)
        self.wo_b = linear(config.o_groups * config.o_lora_rank, config.hidden_size)

    def latent(self, x: Tensor, positions: Tensor) -> Tensor:
        """The rotated latent that is both key and value. [B, N, H], int [B, N] -> [B, N, D]."""
        return rotate(self.kv_norm(self.wkv(x)), *self._angles(positions))

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, mask: Tensor, own: Tensor | None = None) -> Tensor:
        """Attend from `x` to `keys`, and to every row of the query's own block where `own` is given.

        Args:
            x: [B, N, H].
            positions: [B, N] int64, absolute.
            keys: [B, S, D] latents.
            mask: [B, N, S] bool, true where a query sees a key.
            own: [B, G, k, D] latents with N = G * k: the queries of block g also see the k rows of block g, without
                a causal mask.

        Returns:
            [B, N, H].
        """
        config = self.config
        cos, sin = self._angles(positions)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        queries = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (config.num_heads, config.head_dim))
        queries = rotate(rms_norm(queries, config.mhc.norm_eps), cos, sin)
        mixed = attend(queries, keys, mask, self.attn_sink, own)
        return self._output(rotate(mixed, cos, sin, inverse=True))

    def _output(self, heads: Tensor) -> Tensor:
        """[B, N, h, D] -> [B, N, H] through the grouped low-rank projection."""
        groups = heads.unflatten(2, (self.config.o_groups, -1)).flatten(3)
        weight = self.wo_a.weight.unflatten(0, (self.config.o_groups, -1))
        return self.wo_b(torch.einsum("bngi,goi->bngo", groups, weight).flatten(2))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return angles(positions, self.config.rope_dim, self.config.rope_theta)


def attend(queries: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, own: Tensor | None = None) -> Tensor:
    """Softmax attention over one shared latent, with a sink logit per head in the denominator.

    Args:
        queries: [B, N, h, D]; keys: [B, S, D], also the values; mask: [B, N, S] bool; sink: [h].
        own: [B, G, k, D], see `LatentAttention.forward`.

    Returns:
        [B, N, h, D] in the dtype of `queries`.
    """
    batch, count, heads, width = queries.shape
    # keys are shared by the heads, so queries of all heads are rows of one matrix product
    scores = (queries.flatten(1, 2) @ keys.transpose(1, 2)).view(batch, count, heads, -1).to(torch.float32)
    scores = (scores * width**-0.5).masked_fill(~mask.unsqueeze(2), float("-inf"))
    if own is not None:
        rows = own.shape[2]
        blocks = queries.reshape(batch, -1, rows * heads, width)
        inside = (blocks @ own.transpose(2, 3)).view(batch, count, heads, rows).to(torch.float32)
        scores = torch.cat((scores, inside * width**-0.5), dim=-1)
    floor = sink.to(torch.float32).view(1, 1, heads, 1).expand(batch, count, heads, 1)
    weights = torch.softmax(torch.cat((scores, floor), dim=-1), dim=-1).to(keys.dtype)
    length = keys.shape[1]
    out = weights[..., :length].flatten(1, 2) @ keys
    out = out.view(batch, count, heads, width)
    if own is not None:
        inside = weights[..., length:-1].reshape(batch, -1, rows * heads, rows) @ own
        out = out + inside.view(batch, count, heads, width)
    return out.to(queries.dtype)
