"""A kernel against the fp32 reference on random rows, with the layer's own weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mhc import reference
from mhc.config import MHCConfig

# residual [T, hc, H], post [T, hc, 1], comb [T, hc, hc], layer input [T, H]
Pre = tuple[Tensor, Tensor, Tensor, Tensor]

TOKENS = (1, 7, 64, 300)  # both sides of every change of variant that the draft's usual sizes meet
# relative error of the weights as a kernel reads them: vLLM's projection truncates fn to TF32
FN_ERROR = {"vllm": 2.0**-10, "fused": 2.0**-20, "table": 2.0**-20}
SAFETY = 8.0  # of a bound that is a standard deviation
FLOOR = 1e-5  # fp32 roundings of the gates and the Sinkhorn steps
# relative: bf16(y) may round the other way (up to 2^-7), then comes the output's own rounding (2^-8)
INPUT_ERROR = 2.0**-6


class Rejected(RuntimeError):
    """A kernel disagrees with the reference: by how much, and on which output."""


def check(
    pre: Callable[[Tensor], Pre],
    layer: Any,
    config: MHCConfig,
    delayed: bool,
    kernel: str,
    rows: Callable[[int], tuple[Tensor, Tensor]] | None = None,
) -> float:
    """Compare on random rows of several T.

    Args:
        pre: x [T, H] bf16, or what `rows` says -> the four outputs.
        layer: vLLM's decoder layer; the reference uses its unfolded `hc_attn_fn`, so that a stale or wrongly folded
            weight is seen too.
        config: the layer's.
        delayed: V4.1's pre, whose first collapse takes stream 0.
        kernel: a key of `FN_ERROR`.
        rows: T -> what `pre` takes and its embeddings x [T, H]; random embeddings by default.

    Returns:
        The largest error as a share of its bound.

    Raises:
        Rejected: above 1, a NaN, a wrong shape, or a residual that is not x repeated.
    """

    def random_embeddings(tokens: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, config.hidden_size, generator=generator).to(layer.hc_attn_fn.device, torch.bfloat16)
        return x, x

    worst = 0.0
    for tokens in TOKENS:
        given, x = (rows or random_embeddings)(tokens)
        residual, post, comb, layer_input = pre(given)
        streams = reference.expand(x, config.hc_mult)
        if residual.shape != streams.shape or not torch.equal(residual, streams):
            raise Rejected(f"residual is not x repeated at T={tokens}")
        args = (layer.hc_attn_fn.detach(), layer.hc_attn_scale, layer.hc_attn_base)
        wanted = full_fp32(streams, *args, layer.attn_norm.weight, config, delayed)
        fn = reference.fold(args[0], config.hc_mult)
        mixes = mix_bound(x.float(), fn, layer.hc_attn_scale, config, FN_ERROR[kernel])
        worst = max(worst, compare((post, comb, layer_input), wanted, mixes, config, 0.0))
    return worst


def verdict(kernel: str, attempt: Callable[[], float]) -> tuple[bool, str]:
    """Whether a kernel passes its check, and the words for the log.

    Args:
        kernel: its name.
        attempt: returns its error as a share of the bound, or raises.
    """
    try:
        error = attempt()
    except Rejected as rejected:
        return False, f"{kernel} refused: {rejected}"
    except Exception as failure:  # a kernel that this host cannot run must not stop the engine
        return False, f"{kernel} refused: {type(failure).__name__}: {failure}"
    return True, f"{kernel} accepted, error {error:.2f} of its bound"


def compare(
    got: tuple[Tensor, Tensor, Tensor],
    wanted: tuple[Tensor, Tensor, Tensor],
    mixes: Tensor,
    config: MHCConfig,
    slack: Tensor | float,
) -> float:
    """The largest error of post, comb and layer input as a share of its bound.

    Args:
        got: of a kernel.
        wanted: of the reference, fp32.
        mixes: [T, 1] bound on the error of a gate.
        config: the layer's.
        slack: added to the layer input's bound, [T, H] or a number.

    Raises:
        Rejected: above 1, a NaN, or a wrong shape.
    """
    worst, tokens = 0.0, wanted[2].shape[0]
    bounds = (config.post_mult / 4 * mixes, mixes, INPUT_ERROR * wanted[2].abs() + FLOOR + slack)
    for name, a, b, bound in zip(("post", "comb", "layer input"), got, wanted, bounds, strict=True):
        if a.numel() != b.numel() or a.shape[0] != tokens:
            raise Rejected(f"{name} is {list(a.shape)}, expected {list(b.shape)}")
        share = ((a.reshape(tokens, -1).float() - b.reshape(tokens, -1)).abs() / bound).max().item()
        if not share <= 1:
            raise Rejected(f"{name} is off by {share:.3g} times its bound at T={tokens}")
        worst = max(worst, share)
    return worst


def full_fp32(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, config: MHCConfig, delayed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """post, comb and layer input of the reference, from the streams and the unfolded weight, without TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        if not delayed:
            return reference.pre(streams, fn, scale, base, norm_weight, config)[1:]
        first = torch.zeros(streams.shape[:2], device=streams.device)
        first[:, 0] = 1
        return reference.pre_delayed(streams, first, fn, scale, base, norm_weight, config)[1:]
    finally:
        torch.set_float32_matmul_precision(precision)


def mix_bound(flat: Tensor, fn: Tensor, scale: Tensor, config: MHCConfig, fn_error: float) -> Tensor:
    """[T, 1] bound on the gates' error: independent relative errors of fn's elements, through the largest scale."""
    spread = ((flat.square() @ fn.square().T) / (flat.square().mean(-1, keepdim=True) + config.rms_eps)).sqrt()
    return SAFETY * fn_error * spread.amax(-1, keepdim=True) * scale.abs().max() + FLOOR
