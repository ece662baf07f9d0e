"""The plugin in real vLLM modules on CPU: what the patched classes do, in every load path and after a refit."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_models
from torch import nn
from vllm_models import LOADER, fill, hook, layer, quantise, run, same, vllm_config

import mhc.vllm_plugin as plugin
from mhc import reference
from mhc.vllm_plugin import after_import, first_pre
from mhc.vllm_plugin.first_pre import STATE
from mhc.vllm_plugin.source import LOOK_UP, WEIGHT


def test_first_layer_takes_the_2d_path_with_the_same_output(vllm: SimpleNamespace) -> None:
    model = vllm.load()
    unpatched = run(model)
    assert vllm.ops.first == {"repeat": 1}
    hook(model)
    vllm.ops.ran.clear()
    state = model.model.__dict__[STATE]
    out = run(model)
    assert vllm.ops.ran["repeat"] == 0
    if vllm.delayed:
        assert vllm.ops.first == {"broadcast": 1}
    else:
        assert state.calls == {"vllm": 0, "fused": 0, "table": 1}
    same(out, unpatched)


def test_unpatched_vllm_is_what_the_plugin_falls_back_to(vllm: SimpleNamespace) -> None:
    model = vllm.load(MHC_DISABLE="1")
    plain = run(model)
    assert vllm.ops.first == {"repeat": 1}
    assert not hasattr(sys.modules[vllm.name], "_mhc_keeps_embeddings")
    assert STATE not in vars(model.model)
    assert plain.shape == (9, vllm_models.HIDDEN)


def test_dummy_load_reaches_the_hook(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vllm.load()
    base = importlib.import_module(f"{LOADER}.base_loader")
    dummy = importlib.import_module(f"{LOADER}.dummy_loader")
    monkeypatch.setattr(dummy.DummyModelLoader, "load_weights", lambda *_: None)  # the values are there already
    for name in ("initialize_model", "log_model_inspection"):
        monkeypatch.setattr(base, name, lambda *_, **__: model)
    loader = dummy.DummyModelLoader(SimpleNamespace(device="cpu", model_loader_extra_config=None))
    config = SimpleNamespace(device_config=None, load_config=SimpleNamespace(device="cpu"), quant_config=None)
    monkeypatch.setattr(base.BaseModelLoader, "create_model", lambda *_, **__: model, raising=False)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    base.set_default_torch_dtype = lambda _: torch.inference_mode(False)
    assert layer(model).hc_attn_fn_broadcast is None
    loader.load_model(config, SimpleNamespace(dtype=None, quantization=None))
    wanted = reference.fold(layer(model).hc_attn_fn, vllm_models.HC)
    torch.testing.assert_close(layer(model).hc_attn_fn_broadcast, wanted)


def test_load_weights_derives_and_a_refit_keeps_the_address(vllm: SimpleNamespace) -> None:
    model = vllm.load()
    model.load_weights([])
    derived = getattr(layer(model), WEIGHT)
    address = derived.data_ptr()
    weight = torch.randn_like(layer(model).hc_attn_fn)
    model.load_weights([("mtp.0.hc_attn_fn", weight), ("layers.0.hc_attn_fn", weight + 1)])  # as in a checkpoint
    assert torch.equal(layer(model).hc_attn_fn, weight)
    assert getattr(layer(model), WEIGHT) is derived
    assert derived.data_ptr() == address
    torch.testing.assert_close(derived, reference.fold(weight, vllm_models.HC))


def test_the_end_of_a_layerwise_reload_derives(vllm: SimpleNamespace) -> None:
    model = vllm.load()
    hook(model)
    fill(model, 3)
    reload = importlib.import_module(f"{LOADER}.reload")
    reload.finalize_layerwise_reload(nn.Module(), None)  # even of another model
    torch.testing.assert_close(getattr(layer(model), WEIGHT), reference.fold(layer(model).hc_attn_fn, vllm_models.HC))


@pytest.mark.parametrize("choice", ["auto", "table"])
def test_a_delayed_pre_knows_no_table(vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture, choice: str) -> None:
    if not vllm.delayed:
        return
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        model = vllm.load(MHC_FIRST_PRE=choice)
        hook(model)
        vllm.ops.ran.clear()
        run(model)
    assert vllm.ops.first == {"broadcast": 1}
    assert not hasattr(sys.modules[vllm.name], LOOK_UP)
    said = caplog.records[-1].getMessage()
    assert "mode vllm; " in said
    assert ("table refused: its pre is delayed" in said) == (choice == "table")


def test_a_change_behind_the_hooks_is_seen(vllm: SimpleNamespace) -> None:
    model = vllm.load()
    hook(model)
    with torch.no_grad():
        layer(model).hc_attn_fn.mul_(2)
    run(model)
    torch.testing.assert_close(getattr(layer(model), WEIGHT), reference.fold(layer(model).hc_attn_fn, vllm_models.HC))


def test_a_layer_on_meta_waits_for_the_end_of_its_reload(vllm: SimpleNamespace) -> None:
    model = vllm.load()
    hook(model)
    derived, kept = getattr(layer(model), WEIGHT), layer(model).hc_attn_fn
    layer(model).hc_attn_fn = nn.Parameter(torch.empty_like(kept, device="meta"), requires_grad=False)
    model.load_weights([])
    layer(model).hc_attn_fn = kept
    first_pre.refresh_all()
    assert getattr(layer(model), WEIGHT) is derived


def test_the_derived_weight_is_in_no_checkpoint(vllm: SimpleNamespace) -> None:
    model = vllm.load()
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]} | set(model.state_dict())
    hook(model)
    run(model)
    assert {n for n, _ in [*model.named_parameters(), *model.named_buffers()]} | set(model.state_dict()) == names
    assert not any("broadcast" in name for name in names)


@pytest.mark.parametrize("choice", ["vllm", "fused"])
def test_a_choice_of_kernel(vllm: SimpleNamespace, choice: str) -> None:
    model = vllm.load(MHC_FIRST_PRE=choice)
    hook(model)
    vllm.ops.ran.clear()
    run(model)
    assert vllm.ops.ran["repeat"] == 0
    assert vllm.ops.ran["broadcast"] == (1 if choice == "vllm" or vllm.delayed else 0)


def test_auto_changes_kernel_by_the_number_of_embeddings(vllm: SimpleNamespace) -> None:
    model = vllm.load()
    quantise(model)
    hook(model)
    run(model)  # which refuses the table
    state = model.model.__dict__[STATE]
    state.calls.update(fused=0)
    for tokens in (first_pre.FUSED_MOST_TOKENS, first_pre.FUSED_MOST_TOKENS + 1):
        run(model, tokens, given=True)
    if not vllm.delayed:
        assert state.calls == {"fused": 1, "vllm": 1, "table": 0}


@pytest.mark.parametrize("choice", ["vllm", "fused", "table"])
def test_no_tokens(vllm: SimpleNamespace, choice: str) -> None:
    model = vllm.load(MHC_FIRST_PRE=choice)
    hook(model)
    if not vllm.delayed:
        assert run(model, 0).shape == (0, vllm_models.HIDDEN)


def test_rows_are_computed_alone(vllm: SimpleNamespace) -> None:
    """A NaN in a row stays there."""
    model = vllm.load()
    hook(model)
    run(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[8] = torch.nan
    out = run(model)
    assert out[8].isnan().all()
    assert not out[:8].isnan().any()


def test_a_wrong_kernel_is_refused(vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    model = vllm.load(MHC_FIRST_PRE="vllm")
    unpatched = run(model)
    vllm.ops.broken = True
    vllm.ops.ran.clear()
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        hook(model)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "vLLM's unpatched path" in line
    assert "layer input is off" in line
    vllm.ops.ran.clear()
    assert torch.equal(run(model), unpatched)
    assert vllm.ops.first == {"repeat": 1}


def test_without_deepgemm_ours_runs_at_every_size(vllm: SimpleNamespace) -> None:
    if vllm.delayed:
        return
    model = vllm.load()

    def absent(*_: Any, **__: Any) -> None:
        raise RuntimeError("DeepGEMM backend is not available")

    state = model.model.__dict__[STATE]
    state.vllm_pre = absent
    quantise(model)  # there is no table
    hook(model)
    run(model, 300)
    assert state.kernels == ("fused",)
    assert state.calls == {"fused": 1, "vllm": 0, "table": 0}


def test_a_wrong_fold_is_refused(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vllm.load()
    monkeypatch.setattr("mhc.weights.fold", lambda fn, hc: 2 * reference.fold(fn, hc))
    hook(model)
    assert model.model.__dict__[STATE].kernels == ()
    vllm.ops.ran.clear()
    run(model)
    assert vllm.ops.first == {"repeat": 1}


def test_the_target_keeps_its_own_kernel(vllm: SimpleNamespace) -> None:
    if vllm.delayed:
        return
    model = vllm.load()
    hook(model)
    vllm.ops.ran.clear()
    target = type(layer(model))(vllm_config(), "model.layers.0")
    fill(target, 4)
    setattr(target, WEIGHT, reference.fold(target.hc_attn_fn, vllm_models.HC).detach())
    target(torch.zeros(3, vllm_models.HIDDEN, dtype=torch.bfloat16), torch.arange(3), None)
    assert vllm.ops.first == {"broadcast": 1}


def test_a_doctored_module_is_left_alone(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mhc.vllm_plugin.patch as patching

    monkeypatch.setattr(
        patching.inspect, "getsource", lambda m: Path(m.__file__).read_text().replace(".repeat(1, self.hc_mult, 1)", "")
    )
    with caplog.at_level(logging.INFO, "vllm.plugins.mhc"):
        model = vllm.load()
    (line,) = [r.getMessage() for r in caplog.records]
    assert "left unpatched" in line
    assert "0 expansions" in line
    assert STATE not in vars(model.model)
    assert not hasattr(sys.modules[vllm.name], "_mhc_keeps_embeddings")
    run(model)
    assert vllm.ops.first == {"repeat": 1}


def test_a_failure_half_way_changes_nothing(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    import mhc.vllm_plugin.patch as patching

    def fails(changes: Any) -> None:
        changes.set(3, "an int takes no attribute", 0)

    monkeypatch.setattr(patching, "_loader_changes", fails)
    model = vllm.load()
    assert STATE not in vars(model.model)
    run(model)
    assert vllm.ops.first == {"repeat": 1}


def test_registering_twice_patches_once(vllm: SimpleNamespace) -> None:
    plugin.register()
    plugin.register()
    assert sum(isinstance(finder, after_import._Finder) for finder in sys.meta_path) == 1
    model = vllm.load()
    hook(model)
    run(model)


@pytest.mark.parametrize(
    ("name", "value"), [("MHC_FIRST_PRE", "fastest"), ("MHC_POST_PRE", "fused"), ("MHC_DISABLE", "yes")]
)
def test_unknown_settings(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got '{value}'"):
        plugin.register()


def test_an_imported_module_is_patched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("json.tool")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[ModuleType] = []
    after_import.after_import(["json.tool", "not_there"], seen.append)
    assert seen == [sys.modules["json.tool"]]
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    module = importlib.import_module("json.tool")
    assert seen[-1] is module


def test_the_entry_point_names_register() -> None:
    root = Path(plugin.__file__).parents[2]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"mhc": "mhc.vllm_plugin:register"}
    assert EntryPoint("mhc", points["mhc"], "vllm.general_plugins").load() is plugin.register


def test_it_costs_nothing_where_vllm_serves_another_model() -> None:
    """Neither importing the package nor registering imports vLLM or the patching code."""
    code = (
        "import sys, mhc; assert not any(n.startswith('mhc.vllm_plugin') for n in sys.modules)\n"
        "import mhc.vllm_plugin; mhc.vllm_plugin.register()\n"
        "assert not any(n.partition('.')[0] == 'vllm' or n == 'mhc.vllm_plugin.patch' for n in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "MHC_DISABLE": "0"})
