"""The DSpark draft: context latents, one parallel forward over a block, and its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc.dspark import hyper
from mhc.dspark.block import V4Block, run_blocks
from mhc.dspark.cache import LatentCache
from mhc.dspark.config import V4Config
from mhc.dspark.expansion import expand
from mhc.dspark.heads import ConfidenceHead, MarkovHead
from mhc.dspark.matmul import matmul_fp32
from mhc.dspark.norm import RMSNorm
from mhc.dspark.rope import Rotation, angles
from mhc.dspark.target import SharedEmbeddings
from mhc.table import TokenTable
from mhc.weights import BroadcastWeight


class DraftOutput(NamedTuple):
    """One parallel forward over a block; row i predicts the token at position `positions[i] + 1`."""

    hidden: Tensor  # [R, k, H], before the final norm: what the confidence head reads
    logits: Tensor  # [R, k, V] fp32, before the Markov correction


class DSparkDraft(nn.Module):
    """A DSpark draft of `config.draft_layers` V4 blocks.

    Embedding and output projection are the target's: `bind` borrows them, they are in no `state_dict` of the draft and
    get no gradient. The folded first projection is derived (`mhc.BroadcastWeight`), and from it, in inference, every
    token's mixes (`mhc.TokenTable`): made by `load_state_dict`, by the post-load hook `process_weights_after_loading`
    (loaders that write tensors directly, dummy weights), by `.to()` and `bind`, always into the same storage on one
    device, on whichever pipeline rank the draft lives.

    Args:
        config: shapes.
    """

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        mhc = config.mhc
        self.config = config
        self.main_proj = nn.Linear(len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.main_norm = RMSNorm(config.hidden_size, mhc.norm_eps)
        self.layers: Sequence[V4Block] = nn.ModuleList(V4Block(config) for _ in range(config.draft_layers))  # type: ignore[assignment]
        self.norm = RMSNorm(config.hidden_size, mhc.norm_eps)
        self.hc_head_fn = nn.Parameter(torch.empty(mhc.hc_mult, mhc.hc_mult * mhc.hidden_size))
        self.hc_head_base = nn.Parameter(torch.zeros(mhc.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.ones(1))
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)
        self._shared: tuple[SharedEmbeddings, ...] = ()  # a tuple, so that it is no submodule
        self._broadcast: BroadcastWeight | None = None
        self._table: TokenTable | None = None
        self.register_load_state_dict_post_hook(lambda module, keys: module.process_weights_after_loading())

    # ---- weights ----

    def bind(self, shared: SharedEmbeddings) -> DSparkDraft:
        """Borrow embedding and output projection from the target, and make the token table; returns self."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        for name in ("embed", "head"):
            got = tuple(getattr(shared, name).weight.shape)
            if got != shape:
                raise ValueError(f"shared.{name}.weight must be {list(shape)}, got {list(got)}")
        self._shared = (shared,)
        self._make_table()
        return self

    def process_weights_after_loading(self) -> None:
        """Make or refresh what is derived from the first layer's mHC weights; in place once it exists."""
        fn = self.layers[0].hc_attn_fn
        if self._broadcast is None:
            self._broadcast = BroadcastWeight(fn, self.config.mhc.hc_mult)
        elif fn.device.type != "meta":
            self._broadcast.refresh(fn)
        self._make_table()

    def _make_table(self) -> None:
        """Make or refresh the token table, where there are embeddings that the `table` arm would look up."""
        if not self._shared or self._broadcast is None or self._broadcast.is_stale():
            return
        embedding, site = self.shared.embed.weight, self.layers[0].attn_site
        trained, fn_broadcast = site.fn.requires_grad, self._broadcast.tensor
        if trained or not hyper.OPS or embedding.dtype != torch.bfloat16 or embedding.device != fn_broadcast.device:
            return
        weights = (embedding, fn_broadcast, site.scale, site.base)
        if self._table is None or self._table.post.device != embedding.device:
            self._table = TokenTable.build(*weights, self.config.mhc)
        else:
            self._table.refresh(*weights)

    @property
    def fn_broadcast(self) -> Tensor:
        """[M, H] fp32, the first layer's folded projection.

        Raises:
            RuntimeError: it was never made, or its source changed since: a stale weight is never used.
        """
        weight = self._broadcast
        if weight is None or weight.fn is not self.layers[0].hc_attn_fn or weight.is_stale():
            raise RuntimeError("fn_broadcast is stale: call process_weights_after_loading() after writing weights")
        return weight.tensor

    @property
    def token_table(self) -> TokenTable:
        """The mixes of every token, for the `table` arm.

        Raises:
            RuntimeError: it was never made, or one of its sources changed since: a stale table is never used.
        """
        site = self.layers[0].attn_site
        sources = (self.shared.embed.weight, self.fn_broadcast, site.scale, site.base)
        if self._table is None or self._table.is_stale(*sources):
            raise RuntimeError(
                "the token table is stale: call process_weights_after_loading() after writing to draft or embedding"
            )
        return self._table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DSparkDraft:
        super()._apply(fn, recurse)
        if self._broadcast is not None:  # .to(), .cuda(), .float(): the source moved
            self.process_weights_after_loading()
        return self

    @property
    def shared(self) -> SharedEmbeddings:
        """The bound target.

        Raises:
            RuntimeError: `bind` was not called.
        """
        if not self._shared:
            raise RuntimeError("the draft has no embeddings of its own: call bind(target) first")
        return self._shared[0]

    # ---- context ----

    def context(self, requests: int, capacity: int) -> LatentCache:
        """An empty context cache for R requests of at most `capacity` positions."""
        weight = self.layers[0].attn.wkv.weight
        return LatentCache(self.config, self.config.draft_layers, requests, capacity, weight)

    def main_features(self, aux: Tensor) -> Tensor:
        """`main_norm(main_proj(aux))`. [..., m * H] -> [..., H]."""
        return self.main_norm(self.main_proj(aux))

    def angles(self, positions: Tensor) -> Rotation:
        """RoPE's angles at absolute positions, the same for all layers. int [..., N] -> [..., N, rope_dim / 2]."""
        return angles(positions, self.config.rope_dim, self.config.rope_theta)

    def insert_context(self, context: LatentCache, aux: Tensor, positions: Tensor, valid: Tensor | None = None) -> None:
        """Turn verified rows' aux states into context latents of every draft layer.

        Args:
            context: from `self.context`.
            aux: [R, n, m * H] of the target.
            positions: [R, n] int64, absolute.
            valid: [R, n] bool; rejected and padded rows are false and leave no trace.
        """
        features, rotation = self.main_features(aux), self.angles(positions)
        for layer, block in enumerate(self.layers):
            context.write(layer, block.attn.latent(features, rotation), positions, valid)

    # ---- forward ----

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's frozen embeddings. int64 [T] -> [T, H]."""
        return F.embedding(token_ids, self.shared.embed.weight.detach())

    def block(self, anchors: Tensor, start: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
        """The input of a round: the anchor, then noise, from the anchor's own position on.

        Args:
            anchors: int64 [...], the token the target emitted last.
            start: int64 [...], its position.
            size: `k`, by default `config.block_size`.

        Returns:
            token_ids and positions, both [..., k].
        """
        offsets = torch.arange(size or self.config.block_size, device=anchors.device)
        noise = torch.full_like(offsets, self.config.noise_token_id)
        return torch.where(offsets == 0, anchors.unsqueeze(-1), noise), start.unsqueeze(-1) + offsets

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: LatentCache, *, expansion: str = "broadcast"
    ) -> DraftOutput:
        """One block of every request.

        Args:
            token_ids, positions: [R, k] int64, as `block` makes them.
            context: rows at positions before the block's first are seen, the last `sliding_window` of them.
            expansion: how the first layer gets its streams, see `mhc.dspark.expansion`.

        Raises:
            ValueError: `expansion` is unknown. RuntimeError: no `bind`, or a stale derived weight.
        """
        mask = self._visible(positions[:, :1], context.positions()).expand(-1, positions.shape[1], -1)
        keys = [context.read(layer) for layer in range(self.config.draft_layers)]
        hidden = self._backbone(token_ids, positions, keys, mask, 1, expansion)
        return DraftOutput(hidden, self.base_logits(hidden))

    def base_logits(self, hidden: Tensor) -> Tensor:
        """`head(norm(h))` by the target's frozen projection. [..., H] -> [..., V] fp32."""
        rows = self.norm(hidden).flatten(0, -2)
        return matmul_fp32(rows, self.shared.head.weight.detach().T).unflatten(0, hidden.shape[:-1])

    def _visible(self, start: Tensor, keys: Tensor) -> Tensor:
        """Context rows a block starting at `start` sees. [R, n], [S] -> [R, n, S] bool."""
        distance = start.unsqueeze(-1) - keys
        return (distance > 0) & (distance <= self.config.sliding_window)

    def _backbone(
        self, token_ids: Tensor, positions: Tensor, keys: list[Tensor], mask: Tensor, groups: int, expansion: str
    ) -> Tensor:
        """[B, N = groups * k] ids and positions, a layer's context [B, S, D] each, mask [B, N, S] -> [B, N, H]."""
        config, shape, rotation = self.config, token_ids.shape, self.angles(positions)

        def attend(layer: int, x: Tensor) -> Tensor:
            attention = self.layers[layer].attn
            x = x.view(*shape, -1)
            own = attention.latent(x, rotation).unflatten(1, (groups, -1))
            return attention(x, rotation, keys[layer], mask, own).flatten(0, 1)

        first = expand(self, token_ids.flatten(), expansion)
        streams, _ = run_blocks(self.layers, first, attend, config)
        return hyper.head(streams, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, config.mhc).view(*shape, -1)
