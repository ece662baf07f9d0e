"""Sinkhorn of the kernels alone, on the emulator, with logits that converge at once, slowly or not at all."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import tilelang.language as T
import torch
from cuda_on_cpu.lowering import lower
from cuda_on_cpu.runner import Emulated
from torch import Tensor

from mhc import reference
from mhc.config import MHCConfig
from mhc.kernels.parts import PASS_CONFIGS
from mhc.kernels.sinkhorn import sinkhorn

TOKENS = 512
CONFIGS = [
    *(MHCConfig(64, hc, 20, sinkhorn_eps=1e-6) for hc in (4, 3, 8)),
    *(MHCConfig(64, 4, iters, sinkhorn_eps=1e-6) for iters in (1, 2, 3)),
    MHCConfig(64, 4, 20, sinkhorn_eps=0.1),
]


@functools.cache
def on_cpu(config: MHCConfig) -> Emulated:
    """logits [T, hc * hc] -> comb [T, hc * hc], a lane a token."""
    size, tokens, plan = config.hc_mult**2, T.dynamic("tokens"), SimpleNamespace(config=config)

    @T.prim_func  # type: ignore[misc]
    def kernel(logits: T.Tensor((tokens, size), "float32"), comb: T.Tensor((tokens, size), "float32")) -> Any:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(tokens, 32), threads=32) as block:
            c = T.alloc_local((size,), "float32")
            t = block * 32 + T.get_thread_binding()
            if t < tokens:
                for q in T.unroll(size):
                    c[q] = logits[t, q]
                sinkhorn(plan, c)
                for q in T.unroll(size):
                    comb[t, q] = c[q]

    return Emulated(lower(kernel, PASS_CONFIGS))


def comb(config: MHCConfig, logits: Tensor) -> Tensor:
    hc = config.hc_mult
    found = torch.empty_like(logits).view(-1, hc * hc)
    on_cpu(config)(0, concurrent=False, logits=logits.reshape(-1, hc * hc), comb=found)
    return found.view(-1, hc, hc)


def problems(hc: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(hc)
    normal = torch.randn(TOKENS, hc, hc, generator=generator)
    # streams that fall apart into two groups, up to e^-10; and ones of which each goes to one other, nearly
    apart = torch.zeros(hc, hc)
    apart[: hc // 2, hc // 2 :] = apart[hc // 2 :, : hc // 2] = -1
    sent = torch.eye(hc)[torch.rand(TOKENS, hc, generator=generator).argsort(1)]
    return {
        "equal": torch.zeros(1, hc, hc),
        **{f"{size}": size * normal for size in (0.1, 1, 2, 5, 20)},
        "two groups": normal + torch.linspace(0, 10, TOKENS).view(-1, 1, 1) * apart,
        "permutations": normal + 12 * sent,
        "not square": normal - 9 * apart.roll(1, 0),
    }


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"hc{c.hc_mult}-{c.sinkhorn_iters}-{c.sinkhorn_eps}")
def test_sinkhorn_is_no_further_from_fp64_than_torchs_fp32(config: MHCConfig) -> None:
    for name, logits in problems(config.hc_mult).items():
        truth, own = (
            reference.sinkhorn(logits.to(dtype), config.sinkhorn_iters, config.sinkhorn_eps)
            for dtype in (torch.float64, torch.float32)
        )
        error, torchs = ((c.double() - truth).abs() for c in (comb(config, logits), own))
        assert error.max() <= 2 * torchs.max() + 2**-25, name
        assert error.square().mean().sqrt() <= 1.25 * torchs.square().mean().sqrt() + 2**-25, name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_token(bad: float) -> None:
    config = CONFIGS[0]
    logits = problems(config.hc_mult)["2"]
    clean, dirty = comb(config, logits), logits.clone()
    dirty[9, 1, 2] = bad
    spoilt, others = comb(config, dirty), torch.arange(TOKENS) != 9
    assert spoilt[9].isnan().all()
    assert torch.equal(spoilt[others], clean[others])
