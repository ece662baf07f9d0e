"""Where the models meet mHC: the package's ops in inference, the differentiable formulas in training.

The ops (`mhc.pre`, `mhc.post_pre`, ...) take bf16 and have no gradient. Under autograd, and for fp32 models, the same
formulas run as plain torch (`mhc.reference`), rounded where the ops round. This module is the only place that chooses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhc import ops, reference
from mhc.config import MHCConfig
from mhc.dspark import sinkhorn
from mhc.ops import PreOutput


class Site(NamedTuple):
    """The weights of one pre map: `fn` [M, hc * H] fp32, `scale` [3], `base` [M], the sub-layer's norm [H]."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor


OPS = True  # False runs the plain formulas in inference too: for GPUs without the kernels


def uses_ops(x: Tensor) -> bool:
    """Whether `x` takes the inference ops: bf16 and no gradient wanted."""
    return OPS and x.dtype == torch.bfloat16 and not torch.is_grad_enabled()


def pre(residual: Tensor, site: Site, config: MHCConfig) -> PreOutput:
    """`mhc.pre` on streams [T, hc, H]."""
    if uses_ops(residual):
        return ops.pre(residual, *site, config)
    with _full_precision(residual):
        pre_mix, post_mix, comb = _gates(residual.flatten(1), site.fn, site, config)
        y = reference.collapse(residual, pre_mix)
        return PreOutput(residual, post_mix.unsqueeze(-1), comb, _norm(y, residual, site, config))


def pre_broadcast(
    x: Tensor, fn_broadcast: Tensor | None, site: Site, config: MHCConfig, *, collapse: bool = False
) -> PreOutput:
    """`mhc.pre_broadcast` on embeddings [T, H].

    Args:
        fn_broadcast: [M, H] fp32, the derived weight; None folds `site.fn` on the spot, so that it gets gradients.
        collapse: the streams stay `x` [T, H], `comb` is None and `post` [T, hc], as `post` and `post_pre` take them.
    """
    if uses_ops(x):
        if fn_broadcast is None:
            raise ValueError("fn_broadcast must be the derived weight in inference, got None")
        out = ops.pre_broadcast(x, fn_broadcast, site.scale, site.base, site.norm_weight, config, collapse=collapse)
        return out if isinstance(out, PreOutput) else PreOutput(x, out.post, None, out.layer_input)
    with _full_precision(x):
        folded = reference.fold(site.fn, config.hc_mult) if fn_broadcast is None else fn_broadcast
        pre_mix, post_mix, comb = _gates(x, folded, site, config)
        y = _norm(pre_mix.sum(-1, keepdim=True) * x.to(pre_mix.dtype), x, site, config)
        if collapse:
            return PreOutput(x, post_mix, None, y)
        return PreOutput(reference.expand(x, config.hc_mult), post_mix.unsqueeze(-1), comb, y)


def post(output: Tensor, mix: PreOutput) -> Tensor:
    """`mhc.post`: the finished sub-layer's output [T, H] into the streams of `mix`, collapsed or not -> [T, hc, H]."""
    if uses_ops(mix.residual):
        return ops.post(output, mix.residual, mix.post, mix.comb)
    with _full_precision(output):
        if mix.comb is None:
            streams = reference.post_collapsed(output, mix.residual, mix.post)
        else:
            streams = reference.post(output, mix.residual, mix.post.squeeze(-1), mix.comb)
        return streams.to(mix.residual.dtype)


def post_pre(output: Tensor, mix: PreOutput, site: Site, config: MHCConfig) -> PreOutput:
    """`mhc.post_pre`: `post` of the finished sub-layer, then `pre` of the next."""
    if uses_ops(mix.residual):
        return ops.post_pre(output, mix.residual, mix.post, mix.comb, *site, config)
    return pre(post(output, mix), site, config)


def head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: MHCConfig) -> Tensor:
    """`mhc.head`: streams [T, hc, H] -> [T, H]."""
    if uses_ops(residual):
        return ops.head(residual, fn, scale, base, config)
    with _full_precision(residual):
        return reference.head(residual, fn, scale, base, config).to(residual.dtype)


def _gates(flat: Tensor, fn: Tensor, site: Site, config: MHCConfig) -> tuple[Tensor, Tensor, Tensor]:
    m = reference.mixes(flat, fn, config.rms_eps)
    # the training form keeps every Sinkhorn iterate: only where a gradient will need them; a compiler fuses by itself
    training = m.requires_grad and not torch.compiler.is_compiling()
    return (sinkhorn.gates if training else reference.gates)(m, site.scale, site.base, config)


def _norm(y: Tensor, like: Tensor, site: Site, config: MHCConfig) -> Tensor:
    # the collapse is rounded to the streams' dtype before the norm, as the ops round it to bf16
    rounded = y.to(like.dtype).to(y.dtype)
    return reference.rms_norm(rounded, site.norm_weight, config.norm_eps).to(like.dtype)


def _full_precision(x: Tensor) -> torch.autocast:
    # mixes decide how streams combine: autocast must not take them to bf16
    return torch.autocast(x.device.type, enabled=False)
