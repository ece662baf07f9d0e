"""vLLM's draft forward, as it is and as the plugin changes it, run on a CPU with stand-ins for everything else.

The source is the installed vLLM's; without one it is `EXCERPT`, the least that the plugin would patch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mhc
from mhc.config import MHCConfig
from mhc.vllm_plugin import installed
from mhc.vllm_plugin.source import GUARD, transformed

EXCERPT = """class DSparkDeepseekV4Model:
    def forward(self, input_ids, positions, inputs_embeds=None):
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        hidden_states = inputs_embeds.unsqueeze(-2).repeat(1, self.hc_mult, 1)
        residual = post_mix = res_mix = None
        for layer in self.layers:
            hidden_states, residual, post_mix, res_mix = layer(
                hidden_states, positions, input_ids, post_mix, res_mix, residual
            )
        hidden_states = mhc_post_tilelang(hidden_states, residual, post_mix, res_mix)
        return hc_head_fused_kernel_tilelang(hidden_states)
"""
EXCERPT_LAYER = """class DeepseekV4DecoderLayer:
    def forward(self, x, positions, input_ids, post_mix, res_mix, residual):
        if residual is None:
            if x.dim() == 2:
                residual, post_mix, res_mix, x = mhc_pre_broadcast_tilelang(
                    x, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base, self.rms_norm_eps, self.hc_eps,
                    self.hc_eps, self.hc_post_alpha, self.hc_sinkhorn_iters, norm_weight=self.attn_norm.weight.data,
                    norm_eps=self.attn_norm.variance_epsilon, fn_broadcast=self.hc_attn_fn_broadcast,
                )
        return x, residual, post_mix, res_mix
"""


class Source(NamedTuple):
    """Where the text comes from, and the modules of draft model and decoder layer."""

    origin: str
    draft: str
    layer: str


def find() -> Source:
    """The installed vLLM's DeepSeek-V4 sources, or the excerpt."""
    found = installed.find()
    sources = None if found is None else installed.read(found[1], "deepseek_v4")
    if found is None or sources is None:
        return Source("an excerpt of the package, no vLLM is installed here", EXCERPT, EXCERPT_LAYER)
    return Source(f"the installed vLLM {found[0]}", *sources)


class Seen(NamedTuple):
    """What one forward gave: the first layer's input shape, its pre's streams and input, and the result."""

    first_layer_shape: tuple[int, ...]
    residual: Tensor
    layer_input: Tensor
    hidden: Tensor


def run_forward(source: Source, patched: bool, tokens: int, config: MHCConfig, seed: int = 0) -> Seen:
    """Run the transformed forward with one layer, whose pre is the fp32 reference and whose attention does nothing.

    Args:
        source: from `find`.
        patched: whether the plugin is active; without it the same code runs vLLM's own expression.
        tokens: T.
        config: the layer's shapes.
        seed: of embeddings and weights.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, hidden = config.mix_rows, config.hidden_size
    fn = torch.randn(rows, config.hc_mult * hidden, generator=generator) / hidden**0.5
    scale, base = torch.ones(3), torch.randn(rows, generator=generator) / 10
    norm_weight = torch.ones(hidden, dtype=torch.bfloat16)
    embedding = torch.randn(512, hidden, generator=generator).bfloat16()
    weight = mhc.BroadcastWeight(fn, config.hc_mult)
    seen: list[Seen] = []

    def layer(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if x.dim() == 2:
            out = mhc.pre_broadcast(x, weight.tensor, scale, base, norm_weight, config)
            assert isinstance(out, mhc.PreOutput)
        else:
            out = mhc.pre(x, fn, scale, base, norm_weight, config)
        assert out.comb is not None
        seen.append(Seen(tuple(x.shape), out.residual, out.layer_input, x))
        return out.layer_input, out.residual, out.post, out.comb

    draft = SimpleNamespace(hc_mult=config.hc_mult, layers=[layer], embed_input_ids=lambda ids: embedding[ids])
    draft.hc_head_fn = draft.hc_head_scale = draft.hc_head_base = draft.rms_norm_eps = draft.hc_eps = None
    names: dict[str, Any] = {
        "torch": torch,
        GUARD: lambda *_: patched,
        "mhc_post_tilelang": mhc.post,
        "hc_head_fused_kernel_tilelang": lambda streams, *_: streams.float().mean(1),
    }
    # with a token table the look-up would be ours as well: not part of this
    exec(transformed(source.draft, "dspark.py", table=False), names)
    forward: Callable[..., Tensor] = names["forward"]
    result = forward(draft, torch.randint(512, (tokens,), generator=generator), torch.arange(tokens))
    return seen[0]._replace(hidden=result)
