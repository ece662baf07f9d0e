"""The target: a DeepSeek-V4 model in miniature, window attention and mHC in every layer, with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mhc import reference
from mhc.dspark import hyper
from mhc.dspark.block import V4Block, run_blocks
from mhc.dspark.cache import LatentCache
from mhc.dspark.config import V4Config
from mhc.dspark.matmul import matmul_fp32
from mhc.dspark.norm import RMSNorm
from mhc.dspark.rope import angles


class TargetOutput(NamedTuple):
    """What a target forward returns."""

    hidden: Tensor  # [B, N, H], normed: `logits` takes it
    aux: Tensor  # [B, N, m * H], the aux layers' outputs side by side, each the mean over its streams


class SharedEmbeddings(nn.Module):
    """Embedding and output projection, which a draft borrows from its target.

    Stands in for a target where only the draft's forward is wanted (the v4_flash shapes).
    """

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class Target(SharedEmbeddings):
    """A causal V4 model of window layers: no compressor, no indexer; parameter names are the checkpoint's.

    Args:
        config: shapes; `config.num_layers` blocks.
    """

    def __init__(self, config: V4Config) -> None:
        super().__init__(config)
        mhc = config.mhc
        self.config = config
        self.layers: Sequence[V4Block] = nn.ModuleList(V4Block(config) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.norm = RMSNorm(config.hidden_size, mhc.norm_eps)
        self.hc_head_fn = nn.Parameter(torch.empty(mhc.hc_mult, mhc.hc_mult * mhc.hidden_size))
        self.hc_head_base = nn.Parameter(torch.zeros(mhc.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.ones(1))

    def forward(self, token_ids: Tensor) -> TargetOutput:
        """Whole sequences at once, without a cache: training, teacher forcing, aux states.

        Args:
            token_ids: [B, S] int64 from position 0, padded on the right (attention is causal: padding changes no row
                before it).
        """
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).unsqueeze(0)
        mask = self._visible(positions, positions[0])
        return self._run(token_ids, positions.expand_as(token_ids), mask, None, None)

    def step(
        self, token_ids: Tensor, positions: Tensor, cache: LatentCache, valid: Tensor | None = None
    ) -> TargetOutput:
        """Run n new tokens of every request against the cache, and write their latents to it.

        Args:
            token_ids, positions: [R, n] int64; a request's positions increase by one.
            cache: from `self.cache`; rows already there at lower positions are seen.
            valid: [R, n] bool; rows that are false are computed but not kept, and no valid row sees them if they stand
                behind the valid ones.
        """
        mask = self._visible(positions, cache.positions())
        return self._run(token_ids, positions, mask, cache, valid)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] fp32."""
        return matmul_fp32(hidden.flatten(0, -2), self.head.weight.T).unflatten(0, hidden.shape[:-1])

    def cache(self, requests: int, capacity: int) -> LatentCache:
        """An empty KV cache for R requests of at most `capacity` positions."""
        return LatentCache(self.config, self.config.num_layers, requests, capacity, self.layers[0].attn.wkv.weight)

    def _visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Causal within the window. [R, n], [S] -> [R, n, S] bool."""
        distance = queries.unsqueeze(-1) - keys
        return (distance >= 0) & (distance < self.config.sliding_window)

    def _run(
        self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: LatentCache | None, valid: Tensor | None
    ) -> TargetOutput:
        config, shape = self.config, token_ids.shape
        rotation = angles(positions, config.rope_dim, config.rope_theta)

        def attend(layer: int, x: Tensor) -> Tensor:
            attention = self.layers[layer].attn
            x = x.view(*shape, -1)
            keys = attention.latent(x, rotation)
            if cache is not None:
                cache.write(layer, keys, positions, valid)
                keys = cache.read(layer)
            return attention(x, rotation, keys, mask).flatten(0, 1)

        embeddings = self.embed(token_ids).flatten(0, 1)
        streams = reference.expand(embeddings, config.mhc.hc_mult)
        first = hyper.pre(streams, self.layers[0].attn_site, config.mhc)
        streams, kept = run_blocks(self.layers, first, attend, config, config.aux_layers)
        hidden = hyper.head(streams, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, config.mhc)
        return TargetOutput(self.norm(hidden).view(*shape, -1), torch.cat(kept, dim=-1).view(*shape, -1))
