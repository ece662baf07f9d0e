"""Every layer's fused post + pre by our one-launch kernel, in the target and the draft alike (`MHC_POST_PRE=ours`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mhc
from mhc import launch, reference
from mhc.config import MHCConfig
from mhc.vllm_plugin.selfcheck import FN_ERROR, TOKENS, Rejected, compare, full_fp32, mix_bound

logger = logging.getLogger("vllm.plugins.mhc")

CHOICES = ("vllm", "ours")  # ours is slower at 256 to 1024 tokens, and its tokens part: vLLM's is the default
ALL_TOKENS = 10**9

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # residual [T, hc, H], post [T, hc, 1], comb [T, hc, hc], layer input


class PostPre:
    """Stands in for vLLM's fused op: checks our kernel with the first weights that it meets, then runs it or vLLM's.

    vLLM's profiling run meets every shape before the first request and outside of a captured graph, so checking and
    compiling happen there; a call inside a capture that nothing preceded goes to vLLM's op.

    Args:
        original: vLLM's op.

    Attributes:
        calls: how often Python ran each kernel (a captured CUDA graph replays without Python).
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.verdicts: dict[MHCConfig, bool] = {}
        self.calls = dict.fromkeys(CHOICES, 0)
        functools.update_wrapper(self, original)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        *constants: Any,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        **named: Any,
    ) -> Outputs:
        """As vLLM's op; its split arguments are only for vLLM's own kernel."""
        mixes = (x, residual, post, comb, fn, scale, base)
        if x.dim() == 2 and post.dim() == 3 and len(constants) == 5 and norm_weight is not None:
            try:
                config = _config(x.shape[1], residual.shape[1], *constants, norm_eps)
            except ValueError:
                config = None
            if config is not None and self._ours(config, fn, scale, base, norm_weight):
                self.calls["ours"] += 1
                out = mhc.post_pre(*mixes, norm_weight, config)
                assert out.comb is not None
                return out.residual, out.post, out.comb, out.layer_input
        self.calls["vllm"] += 1
        return self.original(*mixes, *constants, norm_weight=norm_weight, norm_eps=norm_eps, **named)

    def _ours(self, config: MHCConfig, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor) -> bool:
        verdict = self.verdicts.get(config)
        if verdict is None:
            if fn.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            verdict = self.verdicts[config] = self._decide(config, fn, scale, base, norm_weight)
        return verdict

    def _decide(self, config: MHCConfig, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor) -> bool:
        try:
            if fn.is_cuda:
                for name, *args in launch.reachable(config, ALL_TOKENS):
                    if args[-2:] == [True, "post_pre"]:
                        launch.kernel(fn.get_device(), name, *args)
            error = max(check(config, fn, scale, base, norm_weight, tokens) for tokens in TOKENS)
        except Rejected as rejected:
            logger.warning("mhc: post + pre: vLLM's kernel, ours is refused: %s", rejected)
            return False
        except Exception as failure:  # a kernel that this host cannot run must not stop the engine
            logger.warning("mhc: post + pre: vLLM's kernel, ours is refused: %s: %s", type(failure).__name__, failure)
            return False
        logger.info("mhc: post + pre: our kernel, error %.2f of its bound", error)
        return True


def check(config: MHCConfig, fn: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, tokens: int) -> float:
    """Compare `mhc.post_pre` with the fp32 reference on random rows; the largest error as a share of its bound.

    Raises:
        Rejected: above 1, or a NaN.
    """
    generator = torch.Generator().manual_seed(tokens)
    hc, hidden = config.hc_mult, config.hidden_size

    def random(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator).to(fn.device)

    output, residual = random(hidden).bfloat16(), random(hc, hidden).bfloat16()
    post, comb = random(hc, 1).sigmoid() * 2, random(hc, hc).softmax(-1)
    got = mhc.post_pre(output, residual, post, comb, fn, scale, base, norm_weight, config)
    wanted = reference.post(output, residual, post.squeeze(-1), comb)
    share = ((got.residual.float() - wanted).abs() / (2.0**-7 * wanted.abs() + 1e-4)).max().item()
    if not share <= 1:
        raise Rejected(f"residual is off by {share:.3g} times its bound at T={tokens}")
    assert got.comb is not None
    # the pre is held against the streams as our kernel rounded them
    streams = got.residual.float()
    mixes = mix_bound(streams.flatten(1), fn, scale, config, FN_ERROR["fused"])
    expected = full_fp32(got.residual, fn, scale, base, norm_weight, config, False)
    # streams may cancel in the collapse, where an error of a gate then weighs more than the result
    slack = 4 * mixes * streams.abs().sum(1)
    return max(share, compare((got.post, got.comb, got.layer_input), expected, mixes, config, slack))


@functools.lru_cache
def _config(
    hidden: int, hc: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, mult: float, iters: int, norm_eps: float
) -> MHCConfig:
    return MHCConfig(hidden, hc, iters, rms_eps, pre_eps, sinkhorn_eps, norm_eps, mult)
