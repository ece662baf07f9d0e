"""Random weights for an engine, and that nothing of vLLM changes unasked."""

from __future__ import annotations

import sys

import torch
from torch import nn

from mhc.bench import serving_host


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        shapes = {
            "attn_norm": (8,), "hc_attn_fn": (24, 64), "hc_attn_base": (24,), "hc_attn_scale": (3,), "attn_sink": (4,),
            "embed_tokens": (32, 8), "w": (8, 8),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, torch.nan), requires_grad=False))
        fp8 = torch.zeros(8, 4, 4).to(torch.float8_e4m3fn)
        self.experts = nn.Parameter(fp8, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.tid2eid = nn.Parameter(torch.arange(4), requires_grad=False)


def test_random_weights_are_finite_the_same_again_and_leave_tables_alone():
    first, second = Parameters(), Parameters()
    for model in (first, second):
        serving_host.random_weights(model)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a.float(), b.float()), name
        assert a.float().isfinite().all(), name
    assert (first.attn_norm == 1).all()
    assert (first.hc_attn_scale == 0.1).all()
    assert 0.005 < first.hc_attn_fn.std() < 0.02
    assert 0.05 < first.hc_attn_base.std() < 0.2
    assert (first.attn_sink == 0).all()
    assert (first.weight_scale_inv == 2.0**-6).all()
    assert torch.equal(first.experts[0].float(), first.experts[4].float())
    assert not torch.equal(first.experts[0].float(), first.experts[1].float())
    assert torch.equal(first.tid2eid, torch.arange(4))


def test_the_target_derives_its_own_broadcast_weight():
    model = Parameters()
    called = []
    model.model = nn.Module()
    model.model.finalize_mhc_broadcast_weights = lambda: called.append(True)
    serving_host.random_weights(model)
    assert called == [True]


def test_nothing_is_changed_where_the_bench_did_not_ask(monkeypatch):
    monkeypatch.delenv(serving_host.SWITCH, raising=False)
    before = set(sys.modules)
    serving_host.install()
    assert set(sys.modules) == before
