"""One V4 block, and the chain of blocks with mHC's post and pre between every two sub-layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mhc.dspark import hyper
from mhc.dspark.attention import LatentAttention
from mhc.dspark.config import V4Config
from mhc.dspark.ffn import feed_forward
from mhc.dspark.hyper import Site
from mhc.dspark.norm import RMSNorm
from mhc.ops import PreOutput


class V4Block(nn.Module):
    """Attention and feed-forward, each wrapped by mHC: parameter names are the checkpoint's.

    The maps around the sub-layers are called by `run_blocks`, which fuses a post with the next pre across blocks.
    """

    hc_attn_fn: nn.Parameter  # [M, hc * H] fp32
    hc_ffn_fn: nn.Parameter

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        mhc = config.mhc
        rows, width = mhc.mix_rows, mhc.hc_mult * mhc.hidden_size
        for part in ("attn", "ffn"):
            self.register_parameter(f"hc_{part}_fn", nn.Parameter(torch.empty(rows, width)))
            self.register_parameter(f"hc_{part}_base", nn.Parameter(torch.zeros(rows)))
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.ones(3)))
        self.attn_norm = RMSNorm(config.hidden_size, mhc.norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, mhc.norm_eps)
        self.attn = LatentAttention(config)
        self.ffn = feed_forward(config)

    @property
    def attn_site(self) -> Site:
        """The pre map before attention."""
        return self._site("attn")

    @property
    def ffn_site(self) -> Site:
        """The pre map before the feed-forward."""
        return self._site("ffn")

    def _site(self, part: str) -> Site:
        fn, scale, base = (self.get_parameter(f"hc_{part}_{name}") for name in ("fn", "scale", "base"))
        return Site(fn, scale, base, self.get_submodule(f"{part}_norm").weight)  # type: ignore[arg-type]


def run_blocks(
    blocks: Sequence[V4Block],
    first: PreOutput,
    attend: Callable[[int, Tensor], Tensor],
    config: V4Config,
    keep: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Run the blocks on T tokens.

    Args:
        blocks: the blocks, in order.
        first: the first block's attention pre, which the caller made from its embeddings.
        attend: `(layer, layer_input [T, H]) -> [T, H]`, the caller's attention over its own keys.
        config: shapes and constants.
        keep: layers whose output streams are wanted.

    Returns:
        The last block's streams [T, hc, H], and for each kept layer the mean of its output streams [T, H].
    """
    mix, kept = first, []
    for layer, block in enumerate(blocks):
        mix = hyper.post_pre(attend(layer, mix.layer_input), mix, block.ffn_site, config.mhc)
        output = block.ffn(mix.layer_input)
        if layer + 1 < len(blocks):
            mix = hyper.post_pre(output, mix, blocks[layer + 1].attn_site, config.mhc)
            streams = mix.residual
        else:
            streams = hyper.post(output, mix)
        if layer in keep:
            kept.append(streams.mean(1))
    return streams, kept
