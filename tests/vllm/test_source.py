"""The one expansion in the real sources: found, made conditional, and refused when anything around it differs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_wheels

from mhc.__main__ import main
from mhc.vllm_plugin import installed, status
from mhc.vllm_plugin.source import GUARD, LOOK_UP, Mismatch, examine, transformed

EXPANSION = "hidden_states = inputs_embeds.unsqueeze(-2).repeat(1, self.hc_mult, 1)"


def test_finds_the_expansion(sources: tuple[str, str], model: str) -> None:
    draft, layer = sources
    match = examine(draft, layer)
    assert match.statement == EXPANSION
    assert draft.splitlines()[match.line - 1].strip() == EXPANSION
    assert match.delayed == (model == "deepseek_v41")
    assert match.no_table == ("its pre is delayed" if match.delayed else None)


class Draft:
    """What the real forward needs of its model, recording what the first layer is given."""

    def __init__(self, model: str) -> None:
        self.hc_mult, self.rms_norm_eps, self.hc_eps = 4, 1e-6, 1e-6
        self.hc_head_fn = self.hc_head_scale = self.hc_head_base = None
        self.use_sequence_parallel = self.use_native_mega_moe = False
        self.seen: list[tuple[torch.Tensor, Any]] = []
        outputs = 6 if model == "deepseek_v41" else 4

        def layer(x: torch.Tensor, *args: Any, **_: Any) -> tuple[Any, ...]:
            self.seen.append((x, args[-1]))
            return (x, *["mix"] * (outputs - 1))

        self.layers = [layer] * 3

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.unsqueeze(-1).expand(-1, 8).bfloat16()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("given", [True, False], ids=["embeddings given", "ids only"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_the_real_forward(sources: tuple[str, str], model: str, keeps: bool, given: bool, tokens: int) -> None:
    draft, _ = sources
    namespace = {
        "torch": torch,
        GUARD: lambda *_: keeps,
        "mhc_post_tilelang": lambda x, *_: x,
        "hc_head_fused_kernel_tilelang": lambda x, *_: x,
        "hc_collapse_triton": lambda x, _: x,
    }
    exec(transformed(draft, "dspark.py", False), namespace)
    ids = torch.arange(tokens)
    fake = Draft(model)
    out = namespace["forward"](fake, ids, ids, fake.embed_input_ids(ids) if given else None)
    assert out.shape == ((tokens, 8) if keeps else (tokens, 4, 8))
    assert (fake.seen[0][0].shape, fake.seen[0][1]) == (out.shape, None)
    assert [residual for _, residual in fake.seen[1:]] == ["mix", "mix"]
    if not keeps:
        assert torch.equal(out, fake.embed_input_ids(ids).unsqueeze(-2).repeat(1, 4, 1))


def test_the_first_layer_sees_the_very_stand_in(sources: tuple[str, str]) -> None:
    draft, layer = sources
    if examine(draft, layer).no_table is not None:
        return
    asked: list[tuple[Any, ...]] = []
    stand_in = torch.empty(3, 8, device="meta")
    namespace = {
        "torch": torch,
        GUARD: lambda *args: asked.append(args) or True,
        LOOK_UP: lambda *args: asked.append(args) or stand_in,
        "mhc_post_tilelang": lambda x, *_: x,
        "hc_head_fused_kernel_tilelang": lambda x, *_: x,
    }
    exec(transformed(draft, "dspark.py", True), namespace)
    fake, ids = Draft("deepseek_v4"), torch.arange(3)
    namespace["forward"](fake, ids, ids, None)
    assert fake.seen[0][0] is stand_in
    assert asked == [(fake, ids), (fake, stand_in)]
    given = torch.zeros(3, 8)
    namespace["forward"](fake, ids, ids, given)
    assert asked[2:] == [(fake, given)]


def test_tracebacks_keep_their_lines(sources: tuple[str, str]) -> None:
    draft, layer = sources
    code = transformed(draft, "dspark.py", examine(draft, layer).no_table is None)
    (function,) = [c for c in code.co_consts if hasattr(c, "co_name") and c.co_name == "forward"]
    lines = {line for _, _, line in function.co_lines() if line}
    assert examine(draft, layer).line in lines
    assert code.co_filename == "dspark.py"


DOCTORED = {
    "no expansion": (EXPANSION, "hidden_states = inputs_embeds", "0 expansions"),
    "two": (EXPANSION, f"{EXPANSION}\n        {EXPANSION}", "2 expansions"),
    "another beside it": (EXPANSION, f"{EXPANSION}\n        y = positions.expand(self.hc_mult, -1)", "2 expansions"),
    "another form": (EXPANSION, "hidden_states = inputs_embeds.repeat(self.hc_mult, 1, 1)", "unknown form"),
    "another dimension": (EXPANSION, EXPANSION.replace("-2", "0"), "unknown form"),
    "conditional": (EXPANSION, f"if self.hc_mult > 1:\n            {EXPANSION}", "not a plain assignment"),
    "read before the layers": (EXPANSION, f"{EXPANSION}\n        self.copy = hidden_states", "expected self.layers"),
    "changed before the layers": (EXPANSION, f"{EXPANSION}\n        hidden_states += 1", "expected self.layers"),
    "a residual from elsewhere": ("residual = post_mix", "other = post_mix", "expected self.layers"),
    "other layers": ("in self.layers:\n            hidden", "in self.stack:\n            hidden", "self.layers to"),
    "a decorated forward": (
        "    def forward(\n        self,\n        input_ids: torch.Tensor,\n        positions",
        "    @wrap\n    def forward(\n        self,\n        input_ids: torch.Tensor,\n        positions",
        "decorated",
    ),
    "a decorated class": ("class DSparkDeepseekV4Model(", "@wrap\nclass DSparkDeepseekV4Model(", "decorated"),
    "another class": ("class DSparkDeepseekV4Model(", "class DSparkModel(", "0 classes"),
    "a super call": (EXPANSION, f"super().__init__()\n        {EXPANSION}", "super"),
}  # fmt: skip
DOCTORED_LAYER = {
    "arguments in another order": (
        "self.hc_attn_scale,\n                    self.hc_attn_base",
        "self.hc_attn_base,\n                    self.hc_attn_scale",
        "does not call a known pre",
    ),
    "another epsilon": ("self.hc_eps", "self.eps", "does not call a known pre"),
    "no branch for 2-D": ("if x.dim() == 2:", "if x.dim() == 5:", "0 branches"),
    "no broadcast weight": ("self.hc_attn_fn_broadcast", "self.hc_attn_fn", "does not call a known pre"),
    "another class": ("class DeepseekV4DecoderLayer(", "class Layer(", "0 classes"),
}


NO_TABLE = {
    "another look-up": ("self.embed_input_ids(input_ids)", "self.embed_input_ids(input_ids.long())", "0 look-ups"),
    "two look-ups": (
        "        if inputs_embeds is None:\n",
        "        if inputs_embeds is None:\n            inputs_embeds = self.embed_input_ids(input_ids)\n"
        "        if inputs_embeds is None:\n",
        "2 look-ups",
    ),
    "scaled embeddings": ("self.embed_tokens(input_ids)", "self.embed_tokens(input_ids) * 2", "is more than"),
    "read ahead": (EXPANSION, f"scale = inputs_embeds.abs().max()\n        {EXPANSION}", "also read by"),
    "read behind": ("self.hc_eps,\n        )", "self.hc_eps,\n        ) + inputs_embeds.mean()", "also read by"),
}
NO_TABLE_LAYER = {
    "read ahead": ("attn_norm_eps = ", "mean = x.mean()\n        attn_norm_eps = ", "outside of their pre"),
    "read beside": ("if x.dim() == 2:", "if x.dim() == 2:\n                mean = x.mean()", "outside of their pre"),
    "kept": ("residual, post_mix, res_mix, x = mhc_pre_b", "residual, post_mix, res_mix, y = mhc_pre_b", "outside of"),
    "read before the branch": ("if x.dim() == 2:", "mean = x.mean()\n            if x.dim() == 2:", "outside of"),
    "no target": ("class DeepseekV4ForCausalLM(", "class Target(", "0 classes DeepseekV4ForCausalLM"),
}


@pytest.mark.parametrize(
    "change", [*(("draft", c) for c in NO_TABLE), *(("layer", c) for c in NO_TABLE_LAYER)], ids=" ".join
)
def test_no_table_for_a_doctored_source(sources: tuple[str, str], model: str, change: tuple[str, str]) -> None:
    """The repeat still goes: only the table needs more than the one statement."""
    if model == "deepseek_v41":
        return
    draft, layer = sources
    where, what = change
    old, new, says = NO_TABLE[what] if where == "draft" else NO_TABLE_LAYER[what]
    source = draft if where == "draft" else layer
    assert old in source
    doctored = source.replace(old, new) if what == "read ahead" else source.replace(old, new, 1)
    match = examine(doctored, layer) if where == "draft" else examine(draft, doctored)
    assert match.statement == EXPANSION
    assert match.no_table is not None
    assert says in match.no_table


@pytest.mark.parametrize("change", DOCTORED)
def test_refuses_a_doctored_draft(sources: tuple[str, str], change: str) -> None:
    draft, layer = sources
    old, new, says = DOCTORED[change]
    assert old in draft
    changed = draft.replace(old, new, 1)
    if change == "a decorated forward":  # the model's, which is the first
        assert changed.index("@wrap") < changed.index(EXPANSION)
    with pytest.raises(Mismatch, match=says):
        examine(changed, layer)
    with pytest.raises(Mismatch, match=says):
        transformed(changed, "dspark.py", False)


@pytest.mark.parametrize("change", DOCTORED_LAYER)
def test_refuses_a_doctored_layer(sources: tuple[str, str], change: str) -> None:
    draft, layer = sources
    old, new, says = DOCTORED_LAYER[change]
    assert old in layer
    with pytest.raises(Mismatch, match=says):
        examine(draft, layer.replace(old, new))


def test_status_of_a_release(vllm_version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-status", "--vllm", str(vllm_wheels.package(vllm_version))]) == 0
    said = capsys.readouterr().out
    assert f"`{EXPANSION}`" in said
    assert said.count("would be patched") == (1 if vllm_version == "0.26.0" else 2)
    assert said.count("first pre by a token table, our kernel or vLLM's") == 1
    assert said.count("vLLM's kernel only (its pre is delayed)") == (0 if vllm_version == "0.26.0" else 1)


def test_status_says_why_not(
    sources: tuple[str, str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, layer = sources
    folder = tmp_path / "vllm" / "models" / model / "nvidia"
    folder.mkdir(parents=True)
    (folder / "dspark.py").write_text(draft.replace(EXPANSION, "hidden_states = inputs_embeds"))
    (folder / "model.py").write_text(layer)
    assert main(["vllm-status", "--vllm", str(tmp_path / "vllm")]) == 1
    assert f"{model}: left alone, 0 expansions" in capsys.readouterr().out


def test_status_says_why_there_is_no_table(
    vllm_version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = installed.read(vllm_wheels.package(vllm_version), "deepseek_v4")
    assert found is not None
    folder = tmp_path / "vllm" / "models" / "deepseek_v4" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "dspark.py").write_text(
        found[0].replace("self.embed_tokens(input_ids)", "self.embed_tokens(input_ids) * 2")
    )
    (folder / "model.py").write_text(found[1])
    assert main(["vllm-status", "--vllm", str(tmp_path / "vllm")]) == 0
    assert "first pre by our kernel or vLLM's; no token table, DSparkDeepseekV4Model.embed_input_ids is more than" in (
        capsys.readouterr().out
    )


def test_status_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(installed, "find", lambda: None)
    assert status.run(argparse.Namespace(vllm=None)) == 1
    assert "not installed" in capsys.readouterr().out


def test_status_of_a_wrong_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.run(argparse.Namespace(vllm=tmp_path)) == 1
    assert f"got {tmp_path}" in capsys.readouterr().err


def test_installed_looks_without_importing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = installed.find()
    assert found is not None
    assert found[1] == tmp_path / "vllm"
