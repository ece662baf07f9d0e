"""The token table in real vLLM classes: when it is made, and how it follows every kind of refit."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_models
from look_up_tools import FUSED, TABLE, V4, assert_fresh, lines, loaded, state_of
from torch import nn
from vllm_models import LOADER, VOCAB, fill, hook, layer, run, share, target_of

import mhc
from mhc.vllm_plugin import first_pre
from mhc.vllm_plugin.source import WEIGHT

PADDED = 64  # rows of vLLM's embedding for a vocabulary of 32


@pytest.fixture(params=V4, ids="-".join)
def release(request: pytest.FixtureRequest) -> tuple[str, str]:
    """V4 alone."""
    return request.param


# ---- when it is made ----


def test_it_is_made_of_the_embedding_shared_after_the_load(vllm: SimpleNamespace) -> None:
    model = loaded(vllm)
    own, target = model.model.embed_tokens, target_of(model)
    share(model, target)
    assert model.model.embed_tokens is target.model.embed_tokens
    assert not torch.equal(own.weight, target.model.embed_tokens.weight)
    run(model)
    assert state_of(model).calls == TABLE
    assert_fresh(model)


def test_an_embedding_shared_late_is_seen(vllm: SimpleNamespace) -> None:
    """Even behind a first forward; the table keeps its address."""
    model = loaded(vllm)
    run(model)
    addresses = [t.data_ptr() for t in state_of(model).look_up.table.tensors]
    share(model, target_of(model))
    run(model)
    assert state_of(model).calls == {**TABLE, "table": 2}
    assert [t.data_ptr() for t in state_of(model).look_up.table.tensors] == addresses
    assert_fresh(model)


def test_nothing_is_made_while_a_graph_is_captured(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(vllm)
    state = state_of(model)
    with monkeypatch.context() as capture:
        capture.setattr(type(state), "_is_capturing", lambda _: True)
        run(model)
    assert state.look_up.table is None
    assert state.calls == FUSED
    run(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-3)
    before = [t.clone() for t in state.look_up.table.tensors]
    with monkeypatch.context() as capture:
        capture.setattr(type(state), "_is_capturing", lambda _: True)
        run(model)
    assert state.calls == {**FUSED, "table": 2}
    assert all(torch.equal(a, b) for a, b in zip(before, state.look_up.table.tensors, strict=True))


def test_one_line_says_all(vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        model = loaded(vllm)
        run(model)
        run(model)
    (line,) = lines(caplog)
    assert "mode table (rows without a token id: fused); fused accepted, error " in line
    assert "; table accepted, error " in line
    assert line.endswith(f"token table {PADDED * 88} bytes")


# ---- how it follows a refit: no forward runs in between, as with captured graphs ----


@pytest.fixture
def served(vllm: SimpleNamespace) -> Iterator[Any]:
    """Draft and target, shared and run once; checks that every address of the table is kept."""
    model = loaded(vllm)
    target = target_of(model)
    share(model, target)
    run(model)
    table = state_of(model).look_up.table
    addresses = [t.data_ptr() for t in table.tensors]
    yield SimpleNamespace(model=model, target=target)
    assert state_of(model).look_up.table is table
    assert [t.data_ptr() for t in table.tensors] == addresses


class Loader:
    """Stands in for vLLM's: it hands each weight to its parameter's own loader."""

    def __init__(self, model: Any, **_: Any) -> None:
        self.parameters = dict(model.named_parameters())

    def load_weights(self, weights: Any, mapper: Any) -> set[str]:
        weights = dict(weights)
        for name, value in weights.items():
            self.parameters[name].weight_loader(self.parameters[name], value)
        return set(weights)


def test_a_refit_of_the_targets_embedding(served: Any) -> None:
    sys.modules[type(served.target).__module__].AutoWeightsLoader = Loader  # type: ignore[attr-defined]
    new = torch.randn(VOCAB, vllm_models.HIDDEN).bfloat16()
    loaded = served.target.load_weights([("model.embed_tokens.weight", new)])
    assert loaded == {"model.embed_tokens.weight"}
    assert torch.equal(served.model.model.embed_tokens.weight[:VOCAB], new)
    assert_fresh(served.model)


def test_a_refit_of_something_else_costs_nothing(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SimpleNamespace(load_weights=lambda *_, **__: {"model.layers.0.attn_norm.weight"})
    sys.modules[type(served.target).__module__].AutoWeightsLoader = lambda *_, **__: loader  # type: ignore[attr-defined]
    made: list[Any] = []
    monkeypatch.setattr(mhc.TokenTable, "refresh", lambda *_: made.append(0))
    served.target.load_weights([])
    assert made == []


@pytest.mark.parametrize("name", ["fn", "scale", "base"])
def test_a_refit_of_the_draft(served: Any, name: str) -> None:
    value = torch.randn_like(getattr(layer(served.model), f"hc_attn_{name}"))
    served.model.load_weights([(f"mtp.0.hc_attn_{name}", value)])
    assert torch.equal(getattr(layer(served.model), f"hc_attn_{name}"), value)
    assert_fresh(served.model)


def test_the_end_of_a_layerwise_reload(served: Any) -> None:
    fill(served.target, 8)
    importlib.import_module(f"{LOADER}.reload").finalize_layerwise_reload(nn.Module(), None)
    assert_fresh(served.model)


def test_a_layerwise_reload_of_the_target(served: Any) -> None:
    """The release's own: parameters move to meta, are loaded and copied back."""
    reload = importlib.import_module(f"{LOADER}.reload")
    sys.modules[type(served.target).__module__].AutoWeightsLoader = Loader  # type: ignore[attr-defined]
    reload.record_metadata_for_reloading(served.target)
    reload.initialize_layerwise_reload(served.target)
    assert served.model.model.embed_tokens.weight.is_meta
    served.model.load_weights([])
    new = torch.randn(VOCAB, vllm_models.HIDDEN).bfloat16()
    served.target.load_weights([("model.embed_tokens.weight", new)])
    reload.finalize_layerwise_reload(served.target, None)
    assert torch.equal(served.model.model.embed_tokens.weight[:VOCAB], new)
    assert_fresh(served.model)


def test_the_end_of_any_load(served: Any) -> None:
    fill(served.target, 8)
    hook(served.target)
    assert_fresh(served.model)


def test_refresh_all(served: Any) -> None:
    fill(served.target, 8)
    first_pre.refresh_all()
    assert_fresh(served.model)


def test_an_embedding_on_meta_waits_for_the_end_of_its_reload(served: Any) -> None:
    module = served.model.model.embed_tokens
    kept = module.weight
    module.weight = nn.Parameter(torch.empty_like(kept, device="meta"), requires_grad=False)
    served.model.load_weights([])
    module.weight = kept
    fill(served.target, 8)
    first_pre.refresh_all()
    assert_fresh(served.model)


def test_another_embedding_waits_for_the_next_forward(served: Any) -> None:
    """Captured graphs still read the old one, and the table's rows have to stay those of it."""
    before = [t.clone() for t in state_of(served.model).look_up.table.tensors]
    other = target_of(served.model)
    fill(other, 9)
    served.model.model.embed_tokens = other.model.embed_tokens
    served.model.load_weights([])
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(served.model).look_up.table.tensors, strict=True))
    run(served.model)
    assert_fresh(served.model)


@pytest.mark.parametrize("name", ["fn", "scale", "base", "embedding"])
def test_a_change_behind_the_hooks_is_seen(served: Any, name: str) -> None:
    first = layer(served.model)
    tensor = served.model.model.embed_tokens.weight if name == "embedding" else getattr(first, f"hc_attn_{name}")
    with torch.no_grad():
        tensor.mul_(2)
    run(served.model)
    assert_fresh(served.model)
    torch.testing.assert_close(getattr(first, WEIGHT), mhc.fold(first.hc_attn_fn, vllm_models.HC))
