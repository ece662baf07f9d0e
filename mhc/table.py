"""The first pre as a look-up: its mixes are a function of the token id alone (notebook 01, claims 7 and 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from mhc import cuda
from mhc.checks import BF16, FP32, check, check_look_up, check_pre
from mhc.config import MHCConfig
from mhc.ops import CollapsedOutput, PreOutput, _direct, named, pre_broadcast
from mhc.weights import state_of


class TokenTable:
    """post, comb and the layer input's two factors of every vocabulary entry.

    Derived like `BroadcastWeight`: made after loading, refreshed in place after every refit, never saved, no gradient.

    Attributes:
        post: [V, hc] fp32.
        comb: [V, hc * hc] fp32.
        factor: [V, 2] fp32, `P = sum_j pre_j` and `rsqrt(P^2 mean(x^2) + norm_eps)`.
    """

    def __init__(self, post: Tensor, comb: Tensor, factor: Tensor, config: MHCConfig) -> None:
        self.post, self.comb, self.factor, self.config = post, comb, factor, config
        self.weights: tuple[Tensor, Tensor, Tensor] | None = None
        self._sources: tuple[Tensor, ...] = ()
        self._seen: list[tuple[int, int]] = []

    @classmethod
    def build(
        cls, embedding: Tensor, fn_broadcast: Tensor, scale: Tensor, base: Tensor, config: MHCConfig
    ) -> TokenTable:
        """Compute the table of an embedding.

        Args:
            embedding: [V, H] bf16.
            fn_broadcast, scale, base, config: as `mhc.pre_broadcast`.

        Raises:
            ValueError: a dtype, shape, stride or device does not fit.
        """
        vocab, hc = embedding.shape[0], config.hc_mult
        sizes = (hc, hc * hc, 2)
        # a tensor born in inference mode could not be refreshed outside of it
        with torch.inference_mode(False):
            post, comb, factor = (torch.empty(vocab, n, dtype=FP32, device=embedding.device) for n in sizes)
        table = cls(post, comb, factor, config)
        table.refresh(embedding, fn_broadcast, scale, base)
        return table

    def refresh(self, embedding: Tensor, fn_broadcast: Tensor, scale: Tensor, base: Tensor) -> None:
        """Compute it again into the same storage, which captured CUDA graphs hold.

        Raises:
            ValueError: as `build`, or the vocabulary has another size.
        """
        check_pre(
            self.post.device, self.config, None, embedding=embedding, fn_broadcast=fn_broadcast, scale=scale, base=base
        )
        if embedding.shape[0] != self.post.shape[0]:
            raise ValueError(f"embedding must have the table's {self.post.shape[0]} rows, got {embedding.shape[0]}")
        self.weights = (fn_broadcast, scale, base)
        with torch.no_grad():
            if _direct(embedding):
                cuda.table_rows(embedding, fn_broadcast, scale, base, self.config, self.tensors)
            else:
                torch.ops.mhc.table_rows(embedding, *self.weights, *self.tensors, self.config.constants())
        if not torch.compiler.is_compiling():  # there a table lives for one call, and counters cannot be traced
            self._sources = (embedding, *self.weights)
            self._seen = [state_of(source) for source in self._sources]

    def is_stale(self, embedding: Tensor, fn_broadcast: Tensor, scale: Tensor, base: Tensor) -> bool:
        """Whether these are not the tensors of the last refresh, or changed since; as `BroadcastWeight.is_stale`."""
        sources = (embedding, fn_broadcast, scale, base)
        same = len(self._sources) == len(sources) and all(a is b for a, b in zip(sources, self._sources, strict=True))
        return not same or self._seen != [state_of(source) for source in sources]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """post, comb, factor."""
        return self.post, self.comb, self.factor

    @property
    def nbytes(self) -> int:
        """Bytes of device memory: 88 a token at hc 4."""
        return sum(t.nbytes for t in self.tensors)

    def check_ids(self, token_ids: Tensor) -> None:
        """Look at every id; waits for the device.

        Raises:
            ValueError: how many ids lie outside the vocabulary, and their range.
        """
        bad = (token_ids < 0) | (token_ids >= self.post.shape[0])
        if bad.any():
            low, high = token_ids.min().item(), token_ids.max().item()
            raise ValueError(
                f"token_ids must lie in [0, {self.post.shape[0]}), got {int(bad.sum())} outside, from {low} to {high}"
            )


def pre_from_table(
    token_ids: Tensor | None,
    embedding: Tensor,
    table: TokenTable,
    norm_weight: Tensor | None,
    config: MHCConfig,
    *,
    collapse: bool = False,
    check_ids: bool = False,
    inputs_embeds: Tensor | None = None,
) -> PreOutput:
    """The first pre of `embedding[token_ids]`, bitwise what `pre_broadcast` returns on CUDA: gather, scale, store.

    An id outside the vocabulary reads nothing and fills its row with NaN.

    Args:
        token_ids: [T] int64 or int32; None with `inputs_embeds`.
        embedding: [V, H] bf16.
        table: `TokenTable.build(embedding, ...)`.
        norm_weight: [H] bf16, or None for the un-normed layer input.
        config: shapes and constants.
        collapse: `residual` is then `embedding[token_ids]` itself, [T, H], and `comb` None, as `post_pre` takes them.
        check_ids: raise on a bad id instead of the NaN row; waits for the device.
        inputs_embeds: [T, H] bf16 rows that are no vocabulary entries: they take `pre_broadcast`.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit; with `check_ids` also an id outside the vocabulary.
    """
    if (token_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of token_ids and inputs_embeds must be given")
    if token_ids is None:
        assert inputs_embeds is not None
        assert table.weights is not None
        first = pre_broadcast(inputs_embeds, *table.weights, norm_weight, config, collapse=collapse)
        if isinstance(first, CollapsedOutput):
            return PreOutput(inputs_embeds, first.post, None, first.layer_input)
        return first

    if check_ids:
        check_look_up(token_ids, embedding, table.post, norm_weight, config)
        table.check_ids(token_ids)
    tensors = post, comb, factor = table.post, table.comb, table.factor
    if _direct(token_ids, embedding, post, comb, factor, norm_weight):
        try:
            if not collapse:
                return named(PreOutput, cuda.gather(token_ids, embedding, tensors, norm_weight, config))
            x, post, layer_input = cuda.gather_collapsed(token_ids, embedding, tensors, norm_weight, config)
            return named(PreOutput, (x, post, None, layer_input))
        except Exception:
            check_look_up(token_ids, embedding, post, norm_weight, config)
            raise
    check_look_up(token_ids, embedding, post, norm_weight, config)
    args = (token_ids, embedding, *tensors, norm_weight, config.constants())
    if not collapse:
        return PreOutput(*torch.ops.mhc.gather(*args))
    x, post, layer_input = torch.ops.mhc.gather_collapsed(*args)
    return PreOutput(x, post, None, layer_input)


def pre_noise_rows(
    anchors: Tensor,
    noise: Tensor,
    block_size: int,
    fn_broadcast: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    config: MHCConfig,
) -> PreOutput:
    """The first pre of DSpark blocks `[anchor, noise, .., noise]`: the noise row is computed once for all of them.

    Args:
        anchors: [R, H] bf16, the embedding of each request's anchor.
        noise: [H] bf16, the embedding of the noise token.
        block_size: k rows a request, at least 1.
        fn_broadcast, scale, base, norm_weight, config: as `pre_broadcast`.

    Returns:
        PreOutput of R * k rows, request by request; no gradient.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    check({}, anchors.device, anchors=(anchors, BF16, ("R", config.hidden_size)))
    check({}, anchors.device, noise=(noise, BF16, (config.hidden_size,)))
    requests = anchors.shape[0]
    rows = torch.cat((anchors, noise.unsqueeze(0)))
    ids = torch.full((requests, block_size), requests, device=anchors.device)
    ids[:, 0] = torch.arange(requests, device=anchors.device)
    table = TokenTable.build(rows, fn_broadcast, scale, base, config)
    return pre_from_table(ids.flatten(), rows, table, norm_weight, config)
