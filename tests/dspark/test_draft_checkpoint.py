"""The draft under its real names: `mtp.{i}.*`, missing and unexpected names fatal, nothing dropped."""

import json

import pytest
import torch
from safetensors.torch import save_file

import mhc
from mhc.checkpoint import INDEX
from mhc.dspark import DSparkDraft, SharedEmbeddings, V4Config, initialise, to_inference
from mhc.dspark.checkpoint import checkpoint_tensors, load_draft, load_shared

# one layer of DeepSeek-V4's draft as published, weights and sizes of the tiny config (H 64, V 32)
LAYER = {
    "attn.attn_sink": (4,),
    "attn.kv_norm.weight": (16,),
    "attn.q_norm.weight": (24,),
    "attn.wkv.weight": (16, 64),
    "attn.wo_a.weight": (24, 32),
    "attn.wo_b.weight": (64, 24),
    "attn.wq_a.weight": (24, 64),
    "attn.wq_b.weight": (64, 24),
    "attn_norm.weight": (64,),
    "ffn.gate.bias": (4,),
    "ffn.gate.weight": (4, 64),
    "ffn.shared_experts.w1.weight": (32, 64),
    "ffn.shared_experts.w2.weight": (64, 32),
    "ffn.shared_experts.w3.weight": (32, 64),
    "ffn_norm.weight": (64,),
    "hc_attn_base": (24,),
    "hc_attn_fn": (24, 256),
    "hc_attn_scale": (3,),
    "hc_ffn_base": (24,),
    "hc_ffn_fn": (24, 256),
    "hc_ffn_scale": (3,),
} | {
    f"ffn.experts.{expert}.{name}.weight": shape
    for expert in range(4)
    for name, shape in {"w1": (32, 64), "w2": (64, 32), "w3": (32, 64)}.items()
}
MODEL = {
    "mtp.0.main_norm.weight": (64,),
    "mtp.0.main_proj.weight": (64, 192),
    "mtp.1.confidence_head.proj.weight": (1, 72),
    "mtp.1.hc_head_base": (4,),
    "mtp.1.hc_head_fn": (4, 256),
    "mtp.1.hc_head_scale": (1,),
    "mtp.1.markov_head.markov_w1.weight": (32, 8),
    "mtp.1.markov_head.markov_w2.weight": (32, 8),
    "mtp.1.norm.weight": (64,),
}
PUBLISHED = MODEL | {f"mtp.{stage}.{name}": shape for stage in range(2) for name, shape in LAYER.items()}


def make_draft(seed):
    config = V4Config.tiny("moe")
    return to_inference(initialise(DSparkDraft(config).bind(SharedEmbeddings(config)), config, seed))


def write(folder, tensors):
    """Three shards and an index, beside target tensors that belong to nobody here."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    tensors |= {"embed.weight": torch.ones(32, 64), "head.weight": torch.ones(32, 64), "layers.0.junk": torch.ones(1)}
    weight_map = {name: f"model-{index % 3 + 1:05d}-of-00003.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def saved(tmp_path):
    draft = make_draft(1)
    return draft, write(tmp_path, checkpoint_tensors(draft))


def test_names_and_shapes_are_the_published_ones():
    assert {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(make_draft(0)).items()} == PUBLISHED


def test_every_weight_arrives(saved):
    source, folder = saved
    draft = make_draft(2)
    load_draft(draft, folder)
    for name, tensor in source.state_dict().items():
        assert torch.equal(draft.state_dict()[name], tensor), name
    assert torch.equal(draft.fn_broadcast, mhc.fold(source.layers[0].hc_attn_fn, 4))


def test_it_is_the_layout_that_load_mhc_tensors_reads(saved):
    source, folder = saved
    tensors = mhc.load_mhc_tensors(folder, "mtp.1")
    assert torch.equal(tensors["hc_ffn_fn"], source.layers[1].hc_ffn_fn)
    assert torch.equal(tensors["hc_head_fn"], source.hc_head_fn)


def test_loading_again_keeps_the_derived_weight_in_place(saved):
    _, folder = saved
    draft = make_draft(2)
    address = draft.fn_broadcast.data_ptr()
    load_draft(draft, folder)
    assert draft.fn_broadcast.data_ptr() == address


@pytest.mark.parametrize("name", sorted(PUBLISHED)[::7])
def test_a_missing_name_is_fatal(tmp_path, name):
    tensors = checkpoint_tensors(make_draft(1))
    del tensors[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        load_draft(make_draft(2), write(tmp_path, tensors))


@pytest.mark.parametrize("name", ["mtp.0.norm.weight", "mtp.2.attn_norm.weight", "mtp.0.attn.compressor.ape"])
def test_an_unexpected_name_is_fatal(tmp_path, name):
    tensors = checkpoint_tensors(make_draft(1)) | {name: torch.ones(3)}
    with pytest.raises(ValueError, match=rf"{name} in .*\.safetensors is unexpected"):
        load_draft(make_draft(2), write(tmp_path, tensors))


def test_a_wrong_shape_is_fatal(tmp_path):
    tensors = checkpoint_tensors(make_draft(1))
    tensors["mtp.1.attn.wkv.weight"] = torch.ones(64, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"mtp\.1\.attn\.wkv\.weight in .* must have shape \[16, 64\], got \[64, 16\]"):
        load_draft(make_draft(2), write(tmp_path, tensors))


def test_fp8_is_refused(tmp_path):
    tensors = checkpoint_tensors(make_draft(1))
    tensors["mtp.0.attn.wq_a.weight"] = tensors["mtp.0.attn.wq_a.weight"].to(torch.float8_e4m3fn)
    folder = write(tmp_path, tensors | {"mtp.0.attn.wq_a.scale": torch.ones(1, 1)})
    with pytest.raises(
        ValueError, match=r"mtp\.0\.attn\.wq_a\.weight in .* is quantised .*convert the checkpoint to bf16"
    ):
        load_draft(make_draft(2), folder)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_weight_without_scale_is_refused(tmp_path, stored):
    tensors = checkpoint_tensors(make_draft(1))
    name = "mtp.1.ffn.experts.3.w2.weight"  # fp4 experts are packed in int8
    tensors[name] = tensors[name].to(stored)
    with pytest.raises(ValueError, match=rf"{name} in .* is quantised"):
        load_draft(make_draft(2), write(tmp_path, tensors))


def test_digits_are_never_dropped(tmp_path):
    tensors = checkpoint_tensors(make_draft(1))
    tensors["mtp.0.attn.wkv.weight"] = tensors["mtp.0.attn.wkv.weight"].float()
    with pytest.raises(ValueError, match=r"wkv\.weight in .* is torch\.float32, the draft's is torch\.bfloat16"):
        load_draft(make_draft(2), write(tmp_path, tensors))


@pytest.mark.parametrize("broken", [torch.ones(64), torch.ones(63, dtype=torch.bfloat16), torch.ones(64).char()])
def test_a_failed_load_changes_nothing(tmp_path, broken):
    tensors = checkpoint_tensors(make_draft(1))
    tensors["mtp.1.norm.weight"] = broken
    draft = make_draft(2)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.raises(ValueError, match="norm"):
        load_draft(draft, write(tmp_path, tensors))
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())


def test_a_meta_draft_must_be_materialised_first(saved):
    with torch.device("meta"):
        draft = DSparkDraft(V4Config.tiny("moe"))
    with pytest.raises(ValueError, match="real device"):
        load_draft(draft, saved[1])
    draft = to_inference(draft.to_empty(device="cpu"))
    load_draft(draft, saved[1])
    assert torch.equal(draft.fn_broadcast, mhc.fold(saved[0].layers[0].hc_attn_fn, 4))


def test_embeddings_come_from_the_target(saved):
    shared = SharedEmbeddings(V4Config.tiny())
    load_shared(shared, saved[1])
    assert torch.equal(shared.embed.weight, torch.ones(32, 64))
    assert not [name for name in make_draft(0).state_dict() if "embed" in name or name.startswith("head")]
