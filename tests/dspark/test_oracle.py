"""Every piece against transformers' DeepSeek-V4 modules on the same weights, fp32."""

import pytest
import torch

from mhc import reference
from mhc.dspark import Target, V4Config, hyper, initialise
from mhc.dspark.rope import angles

modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config  # noqa: E402

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
RENAMES = (
    (".attn.wq_a.", ".self_attn.q_a_proj."),
    (".attn.q_norm.", ".self_attn.q_a_norm."),
    (".attn.wq_b.", ".self_attn.q_b_proj."),
    (".attn.wkv.", ".self_attn.kv_proj."),
    (".attn.kv_norm.", ".self_attn.kv_norm."),
    (".attn.attn_sink", ".self_attn.sinks"),
    (".attn.wo_a.", ".self_attn.o_a_proj."),
    (".attn.wo_b.", ".self_attn.o_b_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".ffn.gate.bias", ".mlp.gate.e_score_correction_bias"),
    (".ffn.gate.", ".mlp.gate."),
    (".ffn.experts.w13", ".mlp.experts.gate_up_proj"),
    (".ffn.experts.w2", ".mlp.experts.down_proj"),
    (".ffn.shared_experts.w1.", ".mlp.shared_experts.gate_proj."),
    (".ffn.shared_experts.w2.", ".mlp.shared_experts.down_proj."),
    (".ffn.shared_experts.w3.", ".mlp.shared_experts.up_proj."),
)


def theirs(config: V4Config) -> DeepseekV4Config:
    return DeepseekV4Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.ffn_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        qk_rope_head_dim=config.rope_dim,
        q_lora_rank=config.q_lora_rank,
        o_lora_rank=config.o_lora_rank,
        o_groups=config.o_groups,
        num_experts_per_tok=config.experts_per_token,
        n_routed_experts=config.num_experts,
        routed_scaling_factor=config.routed_scaling,
        swiglu_limit=config.swiglu_limit,
        sliding_window=config.sliding_window,
        rope_theta=config.rope_theta,
        layer_types=["sliding_attention"] * config.num_layers,
        mlp_layer_types=["moe"] * config.num_layers,
        attn_implementation="eager",
        experts_implementation="eager",
        pad_token_id=config.pad_token_id,
    )


@pytest.fixture(scope="module")
def pair():
    """Our target and their model with the same lively random weights."""
    config = V4Config.tiny("moe")
    ours = initialise(Target(config), config, 0).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in ours.named_parameters():
        # every weight away from its neutral start, swiglu far enough to be clamped
        scale = 2.0 if "w13" in name or "shared_experts" in name else 0.3
        parameter.copy_(parameter + scale * torch.randn(parameter.shape, generator=generator))
    model = modeling.DeepseekV4Model(theirs(config)).eval().requires_grad_(False)
    state = {}
    for name, tensor in ours.state_dict().items():
        for old, new in RENAMES:
            name = name.replace(old, new)
        name = name.replace("hc_head_", "hc_head.hc_").replace("embed.weight", "embed_tokens.weight")
        state[name] = tensor
    state.pop("head.weight")
    model.load_state_dict(state)
    return ours, model


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(4, 32, (2, 40), generator=torch.Generator().manual_seed(2))


def streams(seed: int) -> torch.Tensor:
    return torch.randn(2, 40, 4, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layer", [0, 3])
def test_attention(pair, layer):
    ours, model = pair
    x = streams(3)[:, :, 0]
    positions = torch.arange(40).expand(2, -1)
    mask = ours._visible(positions, positions[0])
    additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")).unsqueeze(1)
    cos_sin = model.rotary_emb(x, position_ids=positions, layer_type="main")
    want, _ = model.layers[layer].self_attn(x, {"main": cos_sin}, positions, additive)
    attention = ours.layers[layer].attn
    rotation = angles(positions, ours.config.rope_dim, ours.config.rope_theta)
    got = attention(x, rotation, attention.latent(x, rotation), mask)
    assert mask.sum(-1).max() == ours.config.sliding_window, "the window must bind for this test to see it"
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("part", ["attn", "ffn"])
def test_hyper_connection(pair, part):
    ours, model = pair
    block, module = ours.layers[1], model.layers[1]
    site = getattr(block, f"{part}_site")
    r = streams(4)
    post, comb, collapsed = getattr(module, f"{part}_hc")(r)
    norm = module.input_layernorm if part == "attn" else module.post_attention_layernorm
    got = hyper.pre(r.flatten(0, 1), site, ours.config.mhc)
    torch.testing.assert_close(got.post.view_as(post), post, **TOLERANCE)
    torch.testing.assert_close(got.comb.view_as(comb), comb, **TOLERANCE)
    torch.testing.assert_close(got.layer_input.view_as(collapsed), norm(collapsed), **TOLERANCE)
    output = streams(5)[:, :, 0]
    want = post.unsqueeze(-1) * output.unsqueeze(-2) + comb.transpose(-1, -2) @ r
    torch.testing.assert_close(hyper.post(output.flatten(0, 1), got).view_as(want), want, **TOLERANCE)


def test_broadcast_pre_equals_their_connection_on_repeated_streams(pair):
    ours, model = pair
    x = streams(6)[:, :, 0]
    post, comb, collapsed = model.layers[0].attn_hc(x.unsqueeze(2).expand(-1, -1, 4, -1).contiguous())
    site = ours.layers[0].attn_site
    got = hyper.pre_broadcast(x.flatten(0, 1), reference.fold(site.fn, 4), site, ours.config.mhc)
    torch.testing.assert_close(got.post.view_as(post), post, **TOLERANCE)
    torch.testing.assert_close(got.comb.view_as(comb), comb, **TOLERANCE)
    want = model.layers[0].input_layernorm(collapsed)
    torch.testing.assert_close(got.layer_input.view_as(want), want, **TOLERANCE)


def test_head(pair):
    ours, model = pair
    r = streams(7)
    got = hyper.head(r.flatten(0, 1), ours.hc_head_fn, ours.hc_head_scale, ours.hc_head_base, ours.config.mhc)
    torch.testing.assert_close(got.view(2, 40, -1), model.hc_head(r), **TOLERANCE)


def test_moe(pair):
    ours, model = pair
    x = streams(8)[:, :, 0]
    ffn, flat = ours.layers[2].ffn, x.flatten(0, 1)
    weights, chosen = ffn.gate(flat)
    assert (ffn.experts.w13[0] @ flat.T).abs().max() > ours.config.swiglu_limit, "the clamp must bind to be tested"
    assert len(chosen.unique()) == ours.config.num_experts
    by_score = (flat @ ffn.gate.weight.T).topk(2, dim=-1).indices.sort().values
    assert not torch.equal(chosen.sort().values, by_score), "the correction bias must matter to be tested"
    want = model.layers[2].mlp(x)
    torch.testing.assert_close(ffn(flat).view_as(want) / want.abs().max(), want / want.abs().max(), **TOLERANCE)
    torch.testing.assert_close(weights.sum(-1), torch.full((80,), ours.config.routed_scaling))


def test_whole_model(pair, tokens):
    ours, model = pair
    want = model(tokens).last_hidden_state
    torch.testing.assert_close(ours(tokens).hidden, want, rtol=1e-4, atol=1e-4)


def test_aux_states_are_block_outputs_averaged_over_streams(pair, tokens):
    ours, model = pair
    outputs = []
    hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[-1])) for layer in model.layers]
    model(tokens)
    for hook in hooks:
        hook.remove()
    want = torch.cat([outputs[layer].mean(2) for layer in ours.config.aux_layers], dim=-1)
    got = ours(tokens).aux
    torch.testing.assert_close(got / want.abs().max(), want / want.abs().max(), **TOLERANCE)
