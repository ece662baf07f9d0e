"""Presets and their refusals."""

from dataclasses import replace

import pytest
import torch

from mhc.config import MHCConfig
from mhc.dspark import DSparkDraft, SharedEmbeddings, Target, V4Config, initialise, to_inference


def parameters(*models):
    return sum(parameter.numel() for model in models for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, r"mhc\.hidden_size must be hidden_size=128, got 64"),
        ({"vocab_size": 0}, "vocab_size must be positive, got 0"),
        ({"num_heads": 4.0}, r"num_heads must be an int, got 4\.0"),
        ({"rope_dim": 7}, "rope_dim must be even and at most head_dim=16, got 7"),
        ({"rope_dim": 18}, "rope_dim must be even"),
        ({"o_groups": 3}, "o_groups must divide num_heads=4, got 3"),
        ({"rope_theta": 0.0}, "rope_theta must be finite and > 1"),
        ({"ffn": "gelu"}, "ffn must be one of moe, dense, got 'gelu'"),
        ({"experts_per_token": 5}, "experts_per_token must be 1 to num_experts=4, got 5"),
        ({"aux_layers": (1, 1)}, r"aux_layers must increase within 0 to 3, got \(1, 1\)"),
        ({"aux_layers": (2, 4)}, "aux_layers must increase within 0 to 3"),
        ({"aux_layers": ()}, "aux_layers must increase"),
        ({"noise_token_id": 32}, "noise_token_id must be below vocab_size=32, got 32"),
        ({"noise_token_id": 2}, "noise_token_id must differ from pad_token_id, both are 2"),
        ({"mhc": MHCConfig(128)}, r"mhc\.hidden_size must be hidden_size=64, got 128"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        replace(V4Config.tiny(), **change)


def test_mini_fits_its_budget():
    config = V4Config.mini()
    target, draft = Target(config), DSparkDraft(config)
    assert config.aux_layers == tuple(range(config.num_layers))[-3:]
    assert 2 * parameters(target, draft) < 24 * 2**20, "bf16 weights of both must fit 24 MiB"


def test_v4_flash_builds_on_meta_with_its_real_shapes():
    config = V4Config.v4_flash()
    with torch.device("meta"):
        shared = SharedEmbeddings(config)
        draft = DSparkDraft(config).bind(shared)
    draft = to_inference(draft)
    shapes = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    assert shapes["main_proj.weight"] == (4096, 12288)
    assert shapes["layers.0.attn.wq_b.weight"] == (64 * 512, 1024)
    assert shapes["layers.2.attn.wo_a.weight"] == (8 * 1024, 4096)
    assert shapes["layers.1.attn.wo_b.weight"] == (4096, 8 * 1024)
    assert shapes["layers.0.hc_attn_fn"] == (24, 16384)
    assert shapes["layers.0.ffn.experts.w13"] == (256, 4096, 4096)
    assert shapes["markov_head.markov_w1.weight"] == (129280, 256)
    assert shapes["confidence_head.proj.weight"] == (1, 4352)
    assert 19.8e9 < parameters(draft) < 19.9e9
    assert draft.layers[0].hc_attn_fn.dtype == torch.float32
    assert draft.layers[0].attn.wkv.weight.dtype == torch.bfloat16


def test_initialise_is_a_function_of_the_seed():
    config = V4Config.tiny()
    one, same, other = (initialise(DSparkDraft(config), config, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.main_proj.weight, other.main_proj.weight)


@pytest.mark.parametrize("model", [Target, DSparkDraft])
def test_initialise_fills_every_parameter(model):
    config = V4Config.tiny()
    module = model(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    initialise(module, config, 0)
    assert not [name for name, parameter in module.named_parameters() if parameter.isnan().any()]
    assert all((p == 1).all() for name, p in module.named_parameters() if name.endswith("norm.weight"))
