"""The first pre from a token table in real vLLM classes: which forwards and which embeddings take it."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_models
from look_up_tools import FUSED, TABLE, V4, lines, loaded, state_of
from torch import Tensor, nn
from vllm_models import EMBEDDING, VOCAB, fill, hook, quantise, run, same, set_ranks, target_of

import mhc
from mhc.vllm_plugin import first_pre, look_up
from mhc.vllm_plugin.selfcheck import TOKENS
from mhc.vllm_plugin.source import LOOK_UP


@pytest.fixture(params=V4, ids="-".join)
def release(request: pytest.FixtureRequest) -> tuple[str, str]:
    """V4 alone."""
    return request.param


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
        quantise(model)


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


@pytest.mark.parametrize("suits", [True, False])
def test_auto_needs_vllms_kernel_only_without_a_table(vllm: SimpleNamespace, suits: bool) -> None:
    """Each of its variants is compiled and checked for nothing else."""
    model = vllm.load()
    if not suits:
        quantise(model)
    hook(model)
    run(model)
    assert vllm.ops.ran["broadcast"] == (0 if suits else len(TOKENS))
    assert state_of(model).kernels == (("fused",) if suits else ("fused", "vllm"))


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
    assert "mode fused; fused accepted, " in line
    assert "; table refused: " in line
    assert "token table" not in line
    assert state_of(model).calls == FUSED


@pytest.mark.parametrize("dtype", mhc.checks.ID_DTYPES)
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


def test_a_source_that_allows_no_table_still_loses_its_repeat(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mhc.vllm_plugin.patch as patching

    old, new = "self.embed_tokens(input_ids)", "self.embed_tokens(input_ids) * 1"
    monkeypatch.setattr(patching.inspect, "getsource", lambda m: Path(m.__file__).read_text().replace(old, new))
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        model = loaded(vllm)
        run(model)
    (line,) = lines(caplog)
    assert "mode fused; " in line
    assert "table refused: DSparkDeepseekV4Model.embed_input_ids is more than self.embed_tokens(input_ids)" in line
    assert state_of(model).calls == FUSED
    assert not hasattr(sys.modules[vllm.name], LOOK_UP)


@pytest.mark.parametrize(("choice", "mode"), [("table", "off, vLLM's unpatched path"), ("auto", "vllm")])
def test_no_table_where_the_fused_kernel_is_refused(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, choice: str, mode: str
) -> None:
    def absent(*_: Any) -> None:
        raise RuntimeError("no such GPU")

    model = vllm.load(MHC_FIRST_PRE=choice)
    unpatched = run(model)
    monkeypatch.setattr(first_pre.FirstPre, "fused", absent)
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        hook(model)
        vllm.ops.ran.clear()
        same(run(model), unpatched)
    (line,) = lines(caplog)
    assert f"mode {mode}; fused refused: RuntimeError: no such GPU" in line
    assert vllm.ops.first == {"repeat" if choice == "table" else "broadcast": 1}


def test_the_names_of_vllms_classes(vllm: SimpleNamespace) -> None:
    module = importlib.import_module(EMBEDDING)
    assert hasattr(module, look_up.EMBEDDING_CLASS)
    assert hasattr(module, look_up.UNQUANTISED)
