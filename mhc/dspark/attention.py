"""V4 attention: one latent that is key and value for every head, sink logits, grouped output projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhc.dspark.config import V4Config
from mhc.dspark.matmul import matmul_fp32
from mhc.dspark.norm import RMSNorm, rms_norm
from mhc.dspark.rope import Rotation, rotate


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

    def latent(self, x: Tensor, rotation: Rotation) -> Tensor:
        """The rotated latent that is both key and value. [B, N, H], angles [B, N] -> [B, N, D]."""
        return rotate(self.kv_norm(self.wkv(x)), rotation)

    def forward(self, x: Tensor, rotation: Rotation, keys: Tensor, mask: Tensor, own: Tensor | None = None) -> Tensor:
        """Attend from `x` to `keys`, and to every row of the query's own block where `own` is given.

        Args:
            x: [B, N, H].
            rotation: `angles` of the rows' absolute positions, [B, N, rope_dim / 2].
            keys: [B, S, D] latents.
            mask: [B, N, S] bool, true where a query sees a key.
            own: [B, G, k, D] latents with N = G * k: the queries of block g also see the k rows of block g, without
                a causal mask.

        Returns:
            [B, N, H].
        """
        config = self.config
        per_head = Rotation(*(part.unsqueeze(2) for part in rotation))
        queries = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (config.num_heads, config.head_dim))
        queries = rotate(rms_norm(queries, config.mhc.norm_eps), per_head)
        mixed = attend(queries, keys, mask, self.attn_sink, own)
        return self._output(rotate(mixed, per_head, inverse=True))

    def _output(self, heads: Tensor) -> Tensor:
        """[B, N, h, D] -> [B, N, H] through the grouped low-rank projection."""
        groups = heads.unflatten(2, (self.config.o_groups, -1)).flatten(3)
        weight = self.wo_a.weight.unflatten(0, (self.config.o_groups, -1))
        return self.wo_b(torch.einsum("bngi,goi->bngo", groups, weight).flatten(2))


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
    scores = matmul_fp32(queries.flatten(1, 2), keys.transpose(1, 2)).view(batch, count, heads, -1)
    scores = torch.where(mask.unsqueeze(2), scores * width**-0.5, float("-inf"))
    floor = sink.to(torch.float32).view(1, 1, heads, 1).expand(batch, count, heads, 1)
    if own is None:
        weights = torch.softmax(torch.cat((scores, floor), dim=-1), dim=-1).to(keys.dtype)
        out = weights[..., :-1].flatten(1, 2) @ keys
    else:
        groups, rows = own.shape[1:3]
        inside = matmul_fp32(queries.reshape(batch, groups, rows * heads, width), own.transpose(2, 3))
        inside = inside.view(batch, count, heads, rows) * width**-0.5
        weights = torch.softmax(torch.cat((scores, inside, floor), dim=-1), dim=-1).to(keys.dtype)
        length = keys.shape[1]
        out = weights[..., :length].flatten(1, 2) @ keys
        mixed = weights[..., length:-1].reshape(batch, groups, rows * heads, rows) @ own
        out = out + mixed.view_as(out)
    return out.view(batch, count, heads, width).to(queries.dtype)
