"""The self-check: exact kernels pass, TF32 projections pass where they are expected, small faults do not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mhc
from mhc import reference
from mhc.config import MHCConfig
from mhc.vllm_plugin.selfcheck import FN_ERROR, Rejected, check

CONFIG = MHCConfig(1024)


@pytest.fixture(params=[0.01, 0.3], ids=["small weights", "large weights"])
def layer(request: pytest.FixtureRequest) -> Any:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return SimpleNamespace(
        hc_attn_fn=request.param * random(24, 4096),
        hc_attn_scale=0.5 + random(3).abs(),
        hc_attn_base=random(24),
        attn_norm=SimpleNamespace(weight=(1 + 0.1 * random(1024)).bfloat16()),
    )


def kernel(layer: Any, project: Callable[[Tensor], Tensor] = lambda fn: fn) -> Any:
    fn = project(mhc.fold(layer.hc_attn_fn, 4))
    return lambda x: tuple(
        mhc.pre_broadcast(x, fn, layer.hc_attn_scale, layer.hc_attn_base, layer.attn_norm.weight, CONFIG)
    )


def tf32(fn: Tensor) -> Tensor:
    """Truncated to 10 mantissa bits, as tensor cores read fp32."""
    return (fn.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_an_exact_kernel_passes(layer: Any) -> None:
    assert check(kernel(layer), layer, CONFIG, False, "fused") < 0.9


def test_tf32_passes_as_vllms_and_fails_as_ours(layer: Any) -> None:
    truncated = kernel(layer, tf32)
    assert check(truncated, layer, CONFIG, False, "vllm") < 0.9
    with pytest.raises(Rejected):
        check(truncated, layer, CONFIG, False, "fused")


def changed(output: int, change: Callable[[Tensor], Tensor]) -> Any:
    def apply(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*outputs[:output], change(outputs[output]), *outputs[output + 1 :])

    return apply


def last_row(value: float) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[-1].view(-1)[-1] = value
        return t

    return change


FAULTS = {
    "a residual element": changed(0, last_row(3)),
    "a residual of one stream": changed(0, lambda t: t[:, :1]),
    "post of pre's rows": changed(1, lambda t: t / 2),
    "comb transposed": changed(2, lambda t: t.mT),
    "a NaN in the last row": changed(3, last_row(torch.nan)),
    "no norm weight": changed(3, lambda t: t * 1.02),
    "rows shifted": changed(3, lambda t: t.roll(1, 0)),
    "half the rows": changed(1, lambda t: t[: len(t) // 2]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FN_ERROR)
def test_faults_are_seen(layer: Any, fault: str, name: str) -> None:
    good = kernel(layer)
    with pytest.raises((Rejected, RuntimeError)):
        check(lambda x: FAULTS[fault](good(x)), layer, CONFIG, False, name)


@pytest.mark.parametrize("wrong", [lambda fn: fn * 1.2, lambda fn: fn.roll(1, 0), lambda fn: reference.fold(fn, 1) / 4])
def test_a_wrong_weight_is_seen(layer: Any, wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Rejected):
        check(kernel(layer, wrong), layer, CONFIG, False, "fused")
