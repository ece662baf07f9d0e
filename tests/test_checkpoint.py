"""`load_mhc_tensors` on checkpoints of the real layout, whole and broken."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import mhc
from mhc.checkpoint import INDEX, Checkpoint

HIDDEN, HC, ROWS = 64, 4, 24


def layer(seed: int, prefix: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fn": (ROWS, HC * HIDDEN), "base": (ROWS,), "scale": (3,)}
    return {
        f"{prefix}.hc_{part}_{piece}": torch.randn(shape, generator=generator)
        for part in ("attn", "ffn")
        for piece, shape in shapes.items()
    }


def head(prefix: str) -> dict[str, torch.Tensor]:
    shapes = {"fn": (HC, HC * HIDDEN), "base": (HC,), "scale": (1,)}
    return {f"{prefix}hc_head_{piece}": torch.ones(shape) for piece, shape in shapes.items()}


@pytest.fixture
def shards(tmp_path):
    """Two shards: the mHC tensors of `mtp.0` are spread over both, among others that must not be read."""
    tensors = layer(0, "mtp.0") | layer(1, "layers.0") | layer(2, "mtp.2") | head("mtp.2.") | head("")
    tensors["mtp.0.attn.wq_a.weight"] = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
    tensors["mtp.0.attn.wq_a.scale"] = torch.ones(1, 1)
    tensors["mtp.0.attn_norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return write(tmp_path, tensors)


def write(folder, tensors, shard_of=lambda index: index % 2):
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for index, name in enumerate(sorted(tensors)):
        parts.setdefault(f"model-{shard_of(index) + 1:05d}-of-00002.safetensors", {})[name] = tensors[name]
    for file, part in parts.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def replace(folder, name, tensor):
    """Rewrite one tensor in its shard; None drops it."""
    file = Checkpoint(folder).files[name]
    tensors = load_file(file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, file)
    return file


def test_reads_the_layer(shards):
    tensors = mhc.load_mhc_tensors(shards, "mtp.0", mhc.MHCConfig(hidden_size=HIDDEN))
    assert list(tensors) == [f"hc_{part}_{piece}" for part in ("attn", "ffn") for piece in ("fn", "base", "scale")]
    for name, want in layer(0, "mtp.0").items():
        assert torch.equal(tensors[name.removeprefix("mtp.0.")], want)


def test_default_prefix_is_the_first_draft_layer(shards):
    assert torch.equal(mhc.load_mhc_tensors(shards)["hc_attn_fn"], layer(0, "mtp.0")["mtp.0.hc_attn_fn"])


def test_the_last_stage_brings_its_head_and_the_top_level_its_own(shards):
    assert {"hc_head_fn", "hc_head_base", "hc_head_scale", "hc_ffn_fn"} <= set(mhc.load_mhc_tensors(shards, "mtp.2"))
    assert set(mhc.load_mhc_tensors(shards, "")) == {"hc_head_fn", "hc_head_base", "hc_head_scale"}


def test_reads_only_the_tensors_it_returns(shards, monkeypatch):
    read = []
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, shape=None: read.append(name) or original(self, name))
    mhc.load_mhc_tensors(shards)
    assert sorted(read) == sorted(layer(0, "mtp.0"))


def test_an_unneeded_shard_may_be_absent(tmp_path):
    tensors = layer(0, "mtp.0") | {"z.last": torch.ones(1)}
    folder = write(tmp_path, tensors, shard_of=lambda index: int(index == 6))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert len(mhc.load_mhc_tensors(folder)) == 6


@pytest.mark.parametrize("as_file", [True, False])
def test_a_single_file_needs_no_index(tmp_path, as_file):
    save_file(layer(0, "mtp.0"), tmp_path / "model.safetensors")
    assert len(mhc.load_mhc_tensors(tmp_path / "model.safetensors" if as_file else tmp_path)) == 6


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"at {tmp_path}"):
        mhc.load_mhc_tensors(tmp_path)


def test_missing_from_the_index(shards):
    edit_index(shards, lambda names: names.pop("mtp.0.hc_ffn_base"))
    # a shard still holds it: neither silently used nor silently ignored
    with pytest.raises(ValueError, match=r"mtp\.0\.hc_ffn_base is missing from"):
        mhc.load_mhc_tensors(shards)


def test_missing_from_its_shard(shards):
    file = replace(shards, "mtp.0.hc_attn_scale", None)
    with pytest.raises(ValueError, match=rf"mtp\.0\.hc_attn_scale is missing from {file}"):
        mhc.load_mhc_tensors(shards)


def test_missing_head_piece(shards):
    edit_index(shards, lambda names: names.pop("mtp.2.hc_head_base"))
    with pytest.raises(ValueError, match=r"mtp\.2\.hc_head_base is missing"):
        mhc.load_mhc_tensors(shards, "mtp.2")


def test_missing_layer_names_the_first_tensor(shards):
    with pytest.raises(ValueError, match=r"mtp\.9\.hc_attn_base is missing from .* \(6 of 6 are\)"):
        mhc.load_mhc_tensors(shards, "mtp.9")


def test_missing_shard(shards):
    file = Checkpoint(shards).files["mtp.0.hc_attn_fn"]
    file.unlink()
    with pytest.raises(FileNotFoundError, match=rf"mtp\.0\.hc_\w+ cannot be read: {file}"):
        mhc.load_mhc_tensors(shards)


@pytest.mark.parametrize("where", ["index", "shard"])
def test_unexpected(shards, where):
    file = Checkpoint(shards).files["mtp.0.hc_attn_fn"]
    if where == "index":
        edit_index(shards, lambda names: names.update({"mtp.0.hc_attn_gamma": file.name}))
    else:
        save_file(load_file(file) | {"mtp.0.hc_attn_gamma": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=rf"mtp\.0\.hc_attn_gamma in {file} is unexpected"):
        mhc.load_mhc_tensors(shards)


def test_a_prefix_does_not_match_a_longer_one(tmp_path):
    folder = write(tmp_path, layer(0, "layers.1") | layer(1, "layers.10"))
    assert torch.equal(
        mhc.load_mhc_tensors(folder, "layers.1")["hc_attn_fn"], layer(0, "layers.1")["layers.1.hc_attn_fn"]
    )


@pytest.mark.parametrize("keep", [0.5, 0.999, 0.0])
def test_truncated(shards, keep):
    file = Checkpoint(shards).files["mtp.0.hc_attn_fn"]
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=rf"mtp\.0\.hc_\w+ cannot be read: {file} is truncated"):
        mhc.load_mhc_tensors(shards)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mtp.0.hc_attn_fn", (ROWS, HC * HIDDEN + 64)),
        ("mtp.0.hc_ffn_fn", (ROWS - 1, HC * HIDDEN)),
        ("mtp.0.hc_ffn_base", (ROWS, 1)),
        ("mtp.0.hc_attn_scale", (1,)),
    ],
)
@pytest.mark.parametrize("config", [None, mhc.MHCConfig(hidden_size=HIDDEN)])
def test_wrong_shape(shards, name, shape, config):
    replace(shards, name, torch.zeros(shape))
    # without a config the shapes can only be held against each other: the odd one or its neighbour is named
    with pytest.raises(ValueError, match=r"mtp\.0\.hc_\w+ in .*safetensors must have shape \[") as error:
        mhc.load_mhc_tensors(shards, "mtp.0", config)
    if config is not None:
        assert name in str(error.value)
        assert str(list(shape)) in str(error.value)


def test_wrong_model(shards):
    with pytest.raises(ValueError, match=r"hc_attn_fn in .* must have shape \[24, 16384\], got \[24, 256\]"):
        mhc.load_mhc_tensors(shards, "mtp.0", mhc.MHCConfig.v4_flash())


def test_wrong_dtype_is_not_cast(shards):
    replace(shards, "mtp.0.hc_attn_base", torch.zeros(ROWS, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"hc_attn_base in .* must be float32, got torch\.bfloat16"):
        mhc.load_mhc_tensors(shards)


def test_quantised_is_refused(shards):
    replace(shards, "mtp.0.hc_attn_fn", torch.zeros(ROWS, HC * HIDDEN).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"hc_attn_fn in .* is quantised \(F8_E4M3\)"):
        mhc.load_mhc_tensors(shards)


def test_broken_index(shards):
    (shards / INDEX).write_text("{")
    with pytest.raises(ValueError, match=f"{INDEX} must be a JSON object"):
        mhc.load_mhc_tensors(shards)


def test_one_tensor_in_two_files(tmp_path):
    for file in ("a.safetensors", "b.safetensors"):
        save_file(layer(0, "mtp.0"), tmp_path / file)
    with pytest.raises(ValueError, match=r"is in both .*a\.safetensors and .*b\.safetensors"):
        mhc.load_mhc_tensors(tmp_path)
