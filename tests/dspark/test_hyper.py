"""The split between the inference ops and the differentiable formulas."""

import pytest
import torch
from dspark_pairs import make_pair

from mhc import reference
from mhc.dspark import anchored_forward, hyper


@pytest.fixture(scope="module")
def case():
    target, _ = make_pair(dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(9, 4, 64, generator=generator).bfloat16()
    output = torch.randn(9, 64, generator=generator).bfloat16()
    return target, streams, output


def both(function):
    """The same call through the ops and through the formulas."""
    with torch.no_grad():
        quiet = function()
    with torch.enable_grad():
        loud = function()
    return quiet, loud


@pytest.mark.parametrize(
    "name",
    [
        "pre",
        "pre_broadcast",
        "post",
        "post_pre",
        "head",
        "pre_broadcast, collapsed",
        "post, collapsed",
        "post_pre, collapsed",
    ],
)
def test_both_sides_round_alike(case, name, monkeypatch):
    target, streams, output = case
    config, site = target.config.mhc, target.layers[1].attn_site
    x = streams[:, 0].contiguous()
    folded = reference.fold(site.fn, 4)
    with torch.no_grad():
        mix = hyper.pre(streams, site, config)
        unexpanded = hyper.pre_broadcast(x, folded, site, config, collapse=True)
    calls = {
        "pre": lambda: hyper.pre(streams, site, config),
        "pre_broadcast": lambda: hyper.pre_broadcast(x, folded, site, config),
        "post": lambda: (hyper.post(output, mix),),
        "post_pre": lambda: hyper.post_pre(output, mix, site, config),
        "head": lambda: (hyper.head(streams, target.hc_head_fn, target.hc_head_scale, target.hc_head_base, config),),
        # comb is None on both sides
        "pre_broadcast, collapsed": lambda: hyper.pre_broadcast(x, folded, site, config, collapse=True)[:2],
        "post, collapsed": lambda: (hyper.post(output, unexpanded),),
        "post_pre, collapsed": lambda: hyper.post_pre(output, unexpanded, site, config),
    }
    used = []
    op = name.split(",")[0]
    original = getattr(hyper.ops, op)
    monkeypatch.setattr(hyper.ops, op, lambda *args, **kwargs: used.append(op) or original(*args, **kwargs))
    quiet, loud = both(calls[name])
    assert used == [op], "the op must be called in inference, and only there"
    for a, b in zip(quiet, loud, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 2**-7, atol=1e-6)


def test_mixes_stay_fp32_under_autocast(case):
    target, streams, _ = case
    site, config = target.layers[0].attn_site, target.config.mhc
    plain = hyper.pre(streams.float(), site, config)
    with torch.autocast("cpu", torch.bfloat16):
        cast = hyper.pre(streams.float(), site, config)
    assert torch.equal(plain.comb, cast.comb)
    assert torch.equal(plain.layer_input, cast.layer_input)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collapsed_streams_are_what_the_first_post_makes_of_the_embedding(case, dtype):
    target, streams, output = case
    config, site = target.config.mhc, target.layers[1].attn_site
    x, folded = streams[:, 0].contiguous().to(dtype), reference.fold(site.fn, 4)
    with torch.no_grad():
        short, long = (hyper.pre_broadcast(x, folded, site, config, collapse=collapse) for collapse in (True, False))
        assert short.comb is None
        assert torch.equal(short.layer_input, long.layer_input)
        assert torch.equal(short.residual, x)
        got, want = (hyper.post_pre(output.to(dtype), mix, site, config) for mix in (short, long))
    # comb's columns sum to 1 up to eps 1e-6; then one rounding of the streams
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got.residual, want.residual, rtol=bound, atol=bound / 4)
    torch.testing.assert_close(got.layer_input, want.layer_input, rtol=4 * bound, atol=4 * bound)


def test_inference_needs_the_derived_weight(case):
    target, streams, _ = case
    with torch.no_grad(), pytest.raises(ValueError, match="fn_broadcast must be the derived weight"):
        hyper.pre_broadcast(streams[:, 0].contiguous(), None, target.layers[0].attn_site, target.config.mhc)


def test_folded_projection_is_trained():
    target, _ = make_pair()
    site = target.layers[0].attn_site
    site.fn.requires_grad_(True)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    config = target.config.mhc
    folded = hyper.pre_broadcast(x, None, site, config)
    streams = hyper.pre(reference.expand(x, 4), site, config)
    weight = torch.randn(folded.comb.shape, generator=torch.Generator().manual_seed(2))
    gradients = [torch.autograd.grad((mix.comb * weight).sum(), site.fn)[0] for mix in (folded, streams)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def test_training_forward_compiles_whole():
    """No graph break: what the training step relies on."""
    target, draft = make_pair()
    draft.requires_grad_(True)
    tokens = torch.randint(4, 32, (2, 20), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[0, 3], [5, 9]])

    def loss(tokens, anchors):
        output = anchored_forward(draft, tokens, target(tokens).aux, anchors)
        return output.logits.square().mean() + output.confidence_logits.mean()

    compiled = torch.compile(loss, backend="eager", fullgraph=True)(tokens, anchors)
    torch.testing.assert_close(compiled, loss(tokens, anchors))
    compiled.backward()
    assert draft.layers[0].hc_attn_fn.grad is not None
