"""The token table in real vLLM classes: which embeddings it takes, when it is made, and how it follows a refit."""

from __future__ import annotations

import importlib
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_models
import vllm_wheels
from torch import Tensor, nn
from vllm_models import EMBEDDING, LOADER, VOCAB, fill, hook, layer, run, same, set_ranks, share, target_of

import mhc
from mhc.vllm_plugin import first_pre, look_up
from mhc.vllm_plugin.first_pre import STATE
from mhc.vllm_plugin.source import LOOK_UP, WEIGHT

PADDED = 64  # rows of vLLM's embedding for a vocabulary of 32
FUSED, TABLE = {"vllm": 0, "fused": 1, "table": 0}, {"vllm": 0, "fused": 0, "table": 1}


@pytest.fixture(params=[(version, "deepseek_v4") for version in vllm_wheels.VERSIONS], ids="-".join)
def release(request: pytest.FixtureRequest) -> tuple[str, str]:
    """V4 alone: V4.1's pre is delayed."""
    return request.param


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


# ---- which forwards take it ----


@pytest.mark.parametrize("choice", ["table", "auto"])
def test_token_ids_take_the_table_and_are_never_looked_up(vllm: SimpleNamespace, choice: str) -> None:
    model = vllm.load(MHC_FIRST_PRE=choice)
    unpatched = run(model)
    hook(model)
    run(model)  # the first forward makes and checks the table
    vllm.ops.ran.clear()
    state_of(model).calls.update(table=0)
    looked_up: list[Any] = []
    model.model.embed_tokens.register_forward_hook(lambda *_: looked_up.append(0))
    same(run(model), unpatched)
    assert looked_up == []
    assert state_of(model).calls == TABLE
    assert vllm.ops.first == {}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_ids_of_either_dtype(vllm: SimpleNamespace, dtype: torch.dtype, tokens: int) -> None:
    model = loaded(vllm)
    ids = (torch.arange(tokens) % VOCAB).to(dtype)
    with torch.inference_mode():
        out, given = model(ids, ids), model(ids, ids, model.embed_input_ids(ids))
    assert state_of(model).calls == {"vllm": 0, "fused": 1, "table": 1}
    assert out.shape == (tokens, vllm_models.HIDDEN)
    same(out, given)


@pytest.mark.parametrize("with_ids", [True, False])
def test_given_embeddings_take_the_fused_kernel(vllm: SimpleNamespace, with_ids: bool) -> None:
    """Also right behind a forward on ids, whose ids must not leak into it."""
    model = loaded(vllm)
    run(model)
    ids, x = torch.arange(9), torch.randn(9, vllm_models.HIDDEN).bfloat16()
    with torch.inference_mode():
        out = model(ids if with_ids else None, ids, x)
    assert state_of(model).calls == {"vllm": 0, "fused": 1, "table": 1}
    state_of(model).kernels = ()
    with torch.inference_mode():
        same(out, model(ids, ids, x))


def test_ids_that_the_gather_refuses_are_looked_up_by_vllm(vllm: SimpleNamespace) -> None:
    model = loaded(vllm)
    ids = torch.arange(18)[::2]
    with torch.inference_mode():
        model(ids, ids)
    assert state_of(model).calls == FUSED


@pytest.mark.parametrize("choice", ["vllm", "fused"])
def test_other_choices_leave_the_look_up_alone(vllm: SimpleNamespace, choice: str) -> None:
    model = loaded(vllm, choice)
    target = type(target_of(model))
    assert not hasattr(sys.modules[vllm.name], LOOK_UP)
    assert not hasattr(target.load_weights, "__wrapped__")
    looked_up: list[Any] = []
    model.model.embed_tokens.register_forward_hook(lambda *_: looked_up.append(0))
    run(model)
    assert looked_up == [0]
    assert state_of(model).calls["table"] == 0


def test_a_stand_in_cannot_be_read(vllm: SimpleNamespace) -> None:
    model = loaded(vllm)
    run(model)
    x = state_of(model).embeddings(torch.arange(3))
    assert (x.shape, x.dtype, x.dim()) == ((3, vllm_models.HIDDEN), torch.bfloat16, 2)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, vllm_models.HIDDEN).copy_(x)


# ---- which embeddings it takes ----


class Sharded:
    """An embedding of two ranks, of which this is the first."""

    reason = "sharded by vocabulary over 2 ranks"

    def apply(self, model: Any) -> None:
        set_ranks(2)
        own = model.model.embed_tokens
        model.model.embed_tokens = type(own)(2 * VOCAB, own.embedding_dim, params_dtype=torch.bfloat16)
        fill(model.model.embed_tokens, 3)


class Quantised:
    reason = "quantised (Fp8EmbeddingMethod)"

    def apply(self, model: Any) -> None:
        unquantised = model.model.embed_tokens.quant_method
        model.model.embed_tokens.quant_method = type("Fp8EmbeddingMethod", (type(unquantised),), {})()


class OtherDtype:
    reason = "the embedding is float16 [64, 128], not bfloat16"

    def apply(self, model: Any) -> None:
        module = model.model.embed_tokens
        module.weight = nn.Parameter(module.weight.half(), requires_grad=False)
        module.register_forward_hook(lambda *args: args[-1].bfloat16())


class Wrapped:
    reason = "the embedding is a VocabParallelEmbeddingWithLoRA"

    def apply(self, model: Any) -> None:
        real = type(model.model.embed_tokens)
        model.model.embed_tokens.__class__ = type("VocabParallelEmbeddingWithLoRA", (real,), {})


class Strided:
    reason = "not contiguous"

    def apply(self, model: Any) -> None:
        module = model.model.embed_tokens
        module.weight = nn.Parameter(module.weight.T.contiguous().T, requires_grad=False)


class Scaled:
    """Looks like a plain embedding and is none: only the self-check can see that."""

    reason = "residual is not x repeated"

    def apply(self, model: Any) -> None:
        model.model.embed_tokens.register_forward_hook(lambda *args: 2 * args[-1])


@pytest.mark.parametrize(
    "case", [Sharded(), Quantised(), OtherDtype(), Wrapped(), Strided(), Scaled()], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize("choice", ["table", "auto"])
def test_other_embeddings_fall_back_to_fused(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture, case: Any, choice: str
) -> None:
    model = vllm.load(MHC_FIRST_PRE=choice)
    case.apply(model)
    unpatched = run(model)
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        hook(model)
        out = run(model)
    (line,) = lines(caplog)
    assert "table refused: " in line
    assert case.reason in line
    assert f"mode {'auto (fused' if choice == 'auto' else 'fused'}" in line
    assert state_of(model).calls == FUSED
    same(out, unpatched)


def test_sharded_rows_fall_back_to_fused(vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Sequence parallelism pads the rows with zeros, which have no id, and cuts them."""
    if vllm.version == "0.26.0":
        return  # its draft has no sequence parallelism
    model = loaded(vllm)
    want = run(model)
    module = sys.modules[vllm.name]
    model.model.use_sequence_parallel = True
    module.sp_shard = lambda t: nn.functional.pad(t, (0, 0) * (t.dim() - 1) + (0, -t.shape[0] % 4))  # type: ignore[attr-defined]
    module.sp_all_gather = lambda t: t  # type: ignore[attr-defined]
    state_of(model)._choose()
    state_of(model).calls.update(table=0)
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        same(run(model), want)
    assert "the rows are sharded" in lines(caplog)[-1]
    assert state_of(model).calls == FUSED


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
    assert "mode table (for rows without a token id fused); table accepted, error " in line
    assert "fused accepted" in line
    assert line.endswith(f"token table {PADDED * 88} bytes")


# ---- how it follows a refit: no forward runs in between, as with captured graphs ----


@pytest.fixture
def served(vllm: SimpleNamespace) -> Any:
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


@pytest.mark.parametrize("name", ["fn", "scale", "base", "embedding"])
def test_a_change_behind_the_hooks_is_seen(served: Any, name: str) -> None:
    first = layer(served.model)
    tensor = served.model.model.embed_tokens.weight if name == "embedding" else getattr(first, f"hc_attn_{name}")
    with torch.no_grad():
        tensor.mul_(2)
    run(served.model)
    assert_fresh(served.model)
    torch.testing.assert_close(getattr(first, WEIGHT), mhc.fold(first.hc_attn_fn, vllm_models.HC))


# ---- what refuses it ----


@pytest.mark.parametrize("output", range(4))
def test_a_wrong_gather_is_refused(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, output: int
) -> None:
    model = loaded(vllm)
    right = mhc.pre_from_table

    def wrong(*args: Any) -> mhc.PreOutput:
        values: list[Any] = list(right(*args))
        values[output] = values[output] * 1.03
        return mhc.PreOutput(*values)

    monkeypatch.setattr("mhc.vllm_plugin.look_up.mhc.pre_from_table", wrong)
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        run(model)
    (line,) = lines(caplog)
    assert "mode fused; table refused: " in line
    assert "token table" not in line
    assert state_of(model).calls == FUSED


@pytest.mark.parametrize("dtype", mhc.table.ID_DTYPES)
def test_ids_read_wrongly_are_refused(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Of one dtype alone: the self-check uses both."""
    model = loaded(vllm)
    right = mhc.pre_from_table

    def wrong(ids: Tensor, *args: Any) -> mhc.PreOutput:
        return right((ids + 1) % VOCAB if ids.dtype == dtype else ids, *args)

    monkeypatch.setattr("mhc.vllm_plugin.look_up.mhc.pre_from_table", wrong)
    run(model)
    assert state_of(model).look_up.table is None


def test_a_table_of_other_weights_is_refused(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(vllm)
    right = mhc.TokenTable.refresh
    monkeypatch.setattr(mhc.TokenTable, "refresh", lambda table, e, fn, s, b: right(table, e, 1.05 * fn, s, b))
    run(model)
    assert state_of(model).look_up.table is None


def test_no_table_where_the_fused_kernel_is_refused(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vllm.load(MHC_FIRST_PRE="table")
    unpatched = run(model)
    monkeypatch.setattr(first_pre.FirstPre, "fused", lambda *_: (_ for _ in ()).throw(RuntimeError("no such GPU")))
    hook(model)
    vllm.ops.ran.clear()
    assert torch.equal(run(model), unpatched)
    assert vllm.ops.first == {"repeat": 1}


def test_the_names_of_vllms_classes(vllm: SimpleNamespace) -> None:
    module = importlib.import_module(EMBEDDING)
    assert hasattr(module, look_up.EMBEDDING_CLASS)
    assert hasattr(module, look_up.UNQUANTISED)
