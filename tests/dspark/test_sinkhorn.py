"""The training form of Sinkhorn: same values as the reference, gradients by finite differences and by autograd."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mhc import MHCConfig, reference
from mhc.dspark import sinkhorn


class Launches(TorchDispatchMode):
    """Counts operators that compute (views are free)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def logits(tokens: int, hc: int, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens * 10 + hc)
    return (torch.randn(tokens, hc, hc, dtype=torch.float64, generator=generator) * spread).requires_grad_()


@pytest.mark.parametrize("iters", [1, 2, 3])
@pytest.mark.parametrize("hc", [2, 4])
def test_gradient_by_finite_differences(hc: int, iters: int) -> None:
    assert torch.autograd.gradcheck(lambda x: sinkhorn.sinkhorn(x, iters, 1e-6), (logits(3, hc),))
    # a large eps, whose place in the formula then shows
    assert torch.autograd.gradcheck(lambda x: sinkhorn.sinkhorn(x, iters, 0.1), (logits(3, hc),))


@pytest.mark.parametrize(("tokens", "hc", "iters", "eps"), [(0, 4, 20, 1e-6), (5, 4, 20, 1e-6), (7, 8, 20, 0.1)])
def test_equals_the_reference(tokens: int, hc: int, iters: int, eps: float) -> None:
    results = []
    for function in (sinkhorn.sinkhorn, reference.sinkhorn):
        x = logits(tokens, hc, 8.0)
        out = function(x, iters, eps)
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        (out * weight).sum().backward()
        results.append((out.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_gates_equal_the_reference() -> None:
    config = MHCConfig(64)
    m = torch.randn(6, config.mix_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale, base = torch.tensor([0.5, 2.0, 3.0]), torch.linspace(-1, 1, config.mix_rows)
    torch.testing.assert_close(
        sinkhorn.gates(m, scale, base, config), reference.gates(m, scale, base, config), rtol=1e-12, atol=1e-12
    )


def test_launches_are_halved() -> None:
    counts = []
    for function in (sinkhorn.sinkhorn, reference.sinkhorn):
        x = logits(5, 4)
        with Launches() as launches:
            function(x, 20, 1e-6).sum().backward()
        counts.append(launches.counts.total())
    assert counts[0] <= 180
    assert counts[0] * 2 < counts[1], counts
