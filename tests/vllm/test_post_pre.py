"""Our post + pre in every layer of V4, and what refuses it."""

from __future__ import annotations

import importlib
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_models import hook, layer, run

import mhc
from mhc import launch
from mhc.config import MHCConfig
from mhc.vllm_plugin.post_pre import ALL_TOKENS, PostPre


@pytest.mark.parametrize("choice", ["vllm", "ours"])
def test_post_pre_of_every_layer(vllm: SimpleNamespace, choice: str) -> None:
    model = vllm.load(MHC_POST_PRE="vllm")
    hook(model)
    wanted = run(model)
    ran = vllm.ops.ran["post_pre"]
    if vllm.delayed:
        assert ran == 0
        return
    assert ran == 5  # three layers, two sub-layers, less the first pre
    layers = importlib.import_module(type(layer(model)).__module__)
    if choice == "ours":
        layers.mhc_fused_post_pre_tilelang = PostPre(layers.mhc_fused_post_pre_tilelang)
    assert torch.equal(run(model), wanted)
    assert vllm.ops.ran["post_pre"] == (2 * ran if choice == "vllm" else ran)


def test_post_pre_by_the_environment(vllm: SimpleNamespace) -> None:
    model = vllm.load(MHC_POST_PRE="ours")
    hook(model)
    run(model)
    assert vllm.ops.ran["post_pre"] == 0
    op = getattr(importlib.import_module(type(layer(model)).__module__), "mhc_fused_post_pre_tilelang", None)
    assert isinstance(op, PostPre) != vllm.delayed
    if isinstance(op, PostPre):
        assert op.calls == {"vllm": 0, "ours": 5}


@pytest.mark.parametrize("output", [*range(4), "comb not transposed"])
def test_a_wrong_post_pre_is_refused(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, output: int | str
) -> None:
    if vllm.delayed or vllm.version != "0.33.0":
        return
    model = vllm.load(MHC_POST_PRE="ours")
    right = mhc.post_pre

    def wrong(*args: Any) -> mhc.PreOutput:
        if isinstance(output, str):  # consistently wrong: its pre fits its own streams
            return right(*args[:3], args[3].mT.contiguous(), *args[4:])
        values = list(right(*args))
        values[output] = values[output] * 1.03
        return mhc.PreOutput(*values)

    monkeypatch.setattr("mhc.vllm_plugin.post_pre.mhc.post_pre", wrong)
    monkeypatch.setattr("vllm_models.mhc.post_pre", wrong)
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        run(model)
    assert any("ours is refused" in r.getMessage() for r in caplog.records)
    assert vllm.ops.ran["post_pre"] == 5
    op: Any = vars(sys.modules[type(layer(model)).__module__])["mhc_fused_post_pre_tilelang"]
    assert op.calls == {"vllm": 5, "ours": 0}


def test_the_warm_ups_name_kernels_that_exist() -> None:
    """What is compiled while loading is every variant of the two kernels that the plugin launches."""
    config = MHCConfig(4096)
    names = [(name, args[-2:]) for name, *args in launch.reachable(config, ALL_TOKENS)]
    assert names.count(("fused", [True, "all"])) == len({(v.tile, v.clusters) for v in launch.ONE_STREAM})
    assert names.count(("quad", [True, "post_pre"])) == len(launch.FOUR_STREAMS)
