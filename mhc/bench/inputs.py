"""Random inputs of a benchmark point, the same in every process for one seed.

Values are scaled so that mixes are of order one, gates are neither 0 nor 1, and streams and comb are not symmetric: a
swapped index shows in the check against fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import mhc
from mhc import reference
from mhc.bench.work import BLOCK_TOKENS
from mhc.config import MHCConfig
from mhc.weights import fold

VOCAB = 129280


@dataclass
class LayerWeights:
    """One sub-layer: fn [M, hc * H], fn_broadcast [M, H], scale [3], base [M] fp32, norm_weight [H] bf16."""

    fn: Tensor
    fn_broadcast: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor

    def copy(self) -> LayerWeights:
        return LayerWeights(*(tensor.clone() for tensor in vars(self).values()))


class Buffers:
    """What one call reads; each tensor is made when it is first asked for, so that a set holds only what its op needs.

    Args:
        inputs: the weights and the embedding behind it.
        tokens: T.
        index: number of the set; every set but the first has weights of its own.
    """

    def __init__(self, inputs: Inputs, tokens: int, index: int) -> None:
        self._inputs, self._tokens, self._index = inputs, tokens, index

    @cached_property
    def token_ids(self) -> Tensor:
        """[T] int64."""
        inputs = self._inputs
        return torch.randint(inputs.vocab, (self._tokens,), device=inputs.device, generator=self._generator(0))

    @cached_property
    def x(self) -> Tensor:
        """[T, H] bf16, the embeddings of `token_ids`."""
        return self._inputs.embedding[self.token_ids]

    @cached_property
    def anchors(self) -> Tensor:
        """[T / k, H] bf16, the first row of every block of `blocks`."""
        return self.x[::BLOCK_TOKENS].contiguous()

    @property
    def noise(self) -> Tensor:
        """[H] bf16, the embedding of the noise token, the vocabulary's last; shared by all buffer sets."""
        return self._inputs.embedding[-1]

    @property
    def blocks(self) -> Tensor:
        """[T, H] bf16, blocks of an anchor and the noise token k - 1 times; T is a multiple of k."""
        rows = self.noise.repeat(self._tokens, 1)
        rows[::BLOCK_TOKENS] = self.anchors
        return rows

    @cached_property
    def output(self) -> Tensor:
        """[T, H] bf16, a sub-layer's output."""
        return self._randn(1, self._inputs.config.hidden_size).to(torch.bfloat16)

    @cached_property
    def streams(self) -> Tensor:
        """[T, hc, H] bf16."""
        return self._randn(2, self._inputs.config.hc_mult, self._inputs.config.hidden_size).to(torch.bfloat16)

    @cached_property
    def post(self) -> Tensor:
        """[T, hc, 1] fp32."""
        return 2 * torch.sigmoid(self._randn(3, self._inputs.config.hc_mult, 1))

    @cached_property
    def comb(self) -> Tensor:
        """[T, hc, hc] fp32, doubly stochastic."""
        config = self._inputs.config
        logits = self._randn(4, config.hc_mult, config.hc_mult)
        return reference.sinkhorn(logits, config.sinkhorn_iters, config.sinkhorn_eps).contiguous()

    @cached_property
    def first(self) -> LayerWeights:
        """The first sub-layer's weights."""
        return self._inputs.first.copy() if self._index else self._inputs.first

    @cached_property
    def next(self) -> LayerWeights:
        """The following sub-layer's weights."""
        return self._inputs.next.copy() if self._index else self._inputs.next

    def _randn(self, field: int, *shape: int) -> Tensor:
        return torch.randn(self._tokens, *shape, device=self._inputs.device, generator=self._generator(field))

    def _generator(self, field: int) -> torch.Generator:
        seed = ((self._inputs.seed * 1009 + self._tokens) * 65537 + self._index) * 8 + field
        return torch.Generator(self._inputs.device).manual_seed(seed)


class Inputs:
    """Everything that points of one hidden size share: two sub-layers' weights and the embedding.

    Args:
        config: shapes and constants.
        seed: of all values.
        device: where they live.
        vocab: rows of the embedding.
    """

    def __init__(self, config: MHCConfig, seed: int, device: str = "cuda", vocab: int = VOCAB) -> None:
        self.config, self.seed, self.device, self.vocab = config, seed, device, vocab
        generator = torch.Generator(device).manual_seed(seed)
        self.first, self.next = self._weights(generator), self._weights(generator)

    @cached_property
    def embedding(self) -> Tensor:
        """[vocab, H] bf16, rows of different size."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        shape, bf16 = (self.vocab, self.config.hidden_size), torch.bfloat16
        rows = torch.randn(shape, device=self.device, dtype=bf16, generator=generator)
        return rows.mul_(torch.rand(self.vocab, 1, device=self.device, generator=generator).add_(0.5).to(bf16))

    @cached_property
    def table(self) -> Any:
        """The first sub-layer's token table, shared by all buffer sets: their tokens differ, so the rows read do.

        Raises:
            NotImplementedError: this version of the package has none.
        """
        if not hasattr(mhc, "TokenTable"):
            raise NotImplementedError("mhc.TokenTable is not in this version")
        w = self.first
        return mhc.TokenTable.build(self.embedding, w.fn_broadcast, w.scale, w.base, self.config)

    def buffers(self, tokens: int, sets: int) -> list[Buffers]:
        """`sets` independent buffers for T = `tokens`."""
        return [Buffers(self, tokens, index) for index in range(sets)]

    def _weights(self, generator: torch.Generator) -> LayerWeights:
        hc, hidden, rows = self.config.hc_mult, self.config.hidden_size, self.config.mix_rows

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device, generator=generator)

        fn = randn(rows, hc * hidden) * (hc * hidden) ** -0.5
        return LayerWeights(
            fn=fn,
            fn_broadcast=fold(fn, hc),
            scale=torch.tensor([0.7, 0.9, 1.1], device=self.device),
            base=randn(rows) * 0.5,
            norm_weight=(1 + 0.1 * randn(hidden)).to(torch.bfloat16),
        )
