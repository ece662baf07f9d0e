"""Grouped experts against one expert at a time; the oracle test holds the latter against transformers."""

import pytest
import torch

from mhc.dspark import V4Config, initialise
from mhc.dspark.ffn import DenseFFN, Experts, Router, feed_forward, swiglu

CONFIG = V4Config.tiny("moe")


@torch.no_grad()
@pytest.mark.parametrize("used", [1, 3, 4])
def test_grouped_experts_equal_one_by_one(used):
    experts = initialise(Experts(CONFIG), CONFIG, 0).bfloat16()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 64, generator=generator).bfloat16()
    chosen = torch.randint(used, (30, 2), generator=generator)  # the experts beyond stay idle
    order = chosen.flatten().argsort(stable=True)
    rows = x[order // 2]
    grouped = experts._grouped(rows, chosen.flatten()[order])
    torch.testing.assert_close(grouped, experts._one_by_one(rows, chosen), rtol=2**-7, atol=1e-6)


def test_swiglu_is_clamped():
    gate, up = torch.tensor([-50.0, 50.0, 1.0]), torch.tensor([-50.0, 50.0, 2.0])
    want = torch.nn.functional.silu(torch.tensor([-50.0, 10.0, 1.0])) * torch.tensor([-10.0, 10.0, 2.0])
    torch.testing.assert_close(swiglu(gate, up, 10.0), want)


@torch.no_grad()
def test_the_correction_bias_chooses_but_does_not_weigh():
    router = initialise(Router(CONFIG), CONFIG, 0)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    router.bias.copy_(torch.tensor([0.0, 100.0, 0.0, 100.0]))
    weights, chosen = router(x)
    assert chosen.sort(-1).values.unique(dim=0).tolist() == [[1, 3]]
    scores = torch.nn.functional.softplus(x @ router.weight.T).sqrt().gather(-1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True) * 1.5)


def test_dense_option():
    assert isinstance(feed_forward(V4Config.tiny("dense")), DenseFFN)
