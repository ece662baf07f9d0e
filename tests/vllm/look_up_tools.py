"""A draft with its token table: what the tests of the look-up and of its refits both need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_models
import vllm_wheels
from vllm_models import hook, layer

import mhc
from mhc.vllm_plugin.first_pre import STATE

FUSED, TABLE = {"vllm": 0, "fused": 1, "table": 0}, {"vllm": 0, "fused": 0, "table": 1}
# V4.1's pre is delayed and has no table
V4 = [(version, "deepseek_v4") for version in vllm_wheels.VERSIONS]


def state_of(model: Any) -> Any:
    return model.model.__dict__[STATE]


def loaded(vllm: SimpleNamespace, choice: str = "table") -> Any:
    """A draft at the end of its load, which shares no embedding yet."""
    model = vllm.load(MHC_FIRST_PRE=choice)
    hook(model)
    return model


def rebuilt(model: Any) -> mhc.TokenTable:
    """What the table has to be for the weights that the draft uses now."""
    first = layer(model)
    return mhc.TokenTable.build(
        model.model.embed_tokens.weight,
        mhc.fold(first.hc_attn_fn, vllm_models.HC),
        first.hc_attn_scale,
        first.hc_attn_base,
        state_of(model).config(),
    )


def assert_fresh(model: Any) -> None:
    for got, want in zip(state_of(model).look_up.table.tensors, rebuilt(model).tensors, strict=True):
        assert torch.equal(got, want)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "first pre" in r.getMessage()]
