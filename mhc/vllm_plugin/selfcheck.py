"""A kernel against the fp32 reference on random rows, with the layer's own weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhc import reference
from mhc.config import MHCConfig

Pre = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # residual [T, hc, H], post [T, hc, 1], comb [T, hc, hc], layer input [T, H]

TOKENS = (1, 7, 64, 300)  # both sides of every change of variant that the draft's usual sizes meet
# relative error of the weights as a kernel reads them: vLLM's projection truncates fn to TF32
FN_ERROR = {"vllm": 2.0**-10, "fused": 2.0**-20}
SAFETY = 8.0  # of a bound that is a standard deviation
FLOOR = 1e-5  # fp32 roundings of the gates and the Sinkhorn steps
INPUT_ERROR = (
    2.0**-6
)  # relative: bf16(y) may round the other way (up to 2^-7), then comes the output's own rounding (2^-8)


class Rejected(RuntimeError):
    """A kernel disagrees with the reference: by how much, and on which output."""


def check(pre: Callable[[Tensor], Pre], layer: Any, config: MHCConfig, delayed: bool, kernel: str) -> float:
    """Compare on random embeddings of several T.

    Args:
        pre: x [T, H] bf16 -> the four outputs.
        layer: vLLM's decoder layer; the reference uses its unfolded `hc_attn_fn`, so that a stale or wrongly folded
            weight is seen too.
        config: the layer's.
        delayed: V4.1's pre, whose first collapse takes stream 0.
        kernel: a key of `FN_ERROR`.

    Returns:
        The largest error as a share of its bound.

    Raises:
        Rejected: above 1, a NaN, a wrong shape, or a residual that is not x repeated.
    """
    worst = 0.0
    for tokens in TOKENS:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, config.hidden_size, generator=generator).to(layer.hc_attn_fn.device, torch.bfloat16)
        residual, post, comb, layer_input = pre(x)
        streams = reference.expand(x, config.hc_mult)
        if residual.shape != streams.shape or not torch.equal(residual, streams):
            raise Rejected(f"residual is not x repeated at T={tokens}")
        wanted_post, wanted_comb, wanted_input = _reference(streams, layer, config, delayed)
        mixes = _mix_bound(x, layer, config, FN_ERROR[kernel])
        for name, got, wanted, bound in (
            ("post", post.reshape(tokens, -1), wanted_post, config.post_mult / 4 * mixes),
            ("comb", comb.reshape(tokens, -1), wanted_comb.flatten(1), mixes),
            ("layer input", layer_input, wanted_input, INPUT_ERROR * wanted_input.abs() + FLOOR),
        ):
            if got.shape != wanted.shape:
                raise Rejected(f"{name} is {list(got.shape)}, expected {list(wanted.shape)}")
            share = ((got.float() - wanted).abs() / bound).max().item()
            if not share <= 1:
                raise Rejected(f"{name} is off by {share:.3g} times its bound at T={tokens}")
            worst = max(worst, share)
    return worst


def _reference(streams: Tensor, layer: Any, config: MHCConfig, delayed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """post, comb and layer input in fp32, from the streams and the unfolded weight."""
    args = (layer.hc_attn_fn.detach(), layer.hc_attn_scale, layer.hc_attn_base, layer.attn_norm.weight, config)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        if not delayed:
            return reference.pre(streams, *args)[1:]
        first = torch.zeros(streams.shape[:2], device=streams.device)
        first[:, 0] = 1
        return reference.pre_delayed(streams, first, *args)[1:]
    finally:
        torch.set_float32_matmul_precision(precision)


def _mix_bound(x: Tensor, layer: Any, config: MHCConfig, fn_error: float) -> Tensor:
    """[T, 1] bound on the gates' error: independent relative errors of fn's elements, through the largest scale."""
    fn = reference.fold(layer.hc_attn_fn.detach(), config.hc_mult)
    x32 = x.float()
    spread = ((x32.square() @ fn.square().T) / (x32.square().mean(-1, keepdim=True) + config.rms_eps)).sqrt()
    logits = spread.amax(-1, keepdim=True) * layer.hc_attn_scale.abs().max()
    return SAFETY * fn_error * logits + FLOOR
