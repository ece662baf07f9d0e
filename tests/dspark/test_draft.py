"""The draft's forward: against the naive oracle, across arms, and against its own teacher-forced form."""

from copy import deepcopy

import pytest
import torch
from dspark_pairs import make_pair
from naive import NaiveDraft

import mhc
from mhc.dspark import DSparkDraft, SharedEmbeddings, V4Config, anchored_forward, hyper, initialise, to_inference
from mhc.dspark.expansion import EXPANSIONS, expand

TOKENS = torch.randint(4, 32, (2, 40), generator=torch.Generator().manual_seed(5))
STARTS = torch.tensor([9, 33])  # inside the first window, and beyond it


@torch.no_grad()
def forward(target, draft, starts=STARTS, tokens=TOKENS, expansion="broadcast"):
    """One block of each request; every row's context is inserted, also those behind the anchor."""
    aux = target(tokens).aux
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    context = draft.context(len(tokens), tokens.shape[1] + 8)
    draft.insert_context(context, aux, positions)
    block, positions = draft.block(tokens.gather(1, starts.unsqueeze(1)).squeeze(1), starts)
    return draft(block, positions, context, expansion=expansion), aux


def test_block_is_anchor_then_noise(pair):
    block, positions = pair[1].block(torch.tensor([7, 8]), torch.tensor([5, 0]))
    assert block.tolist() == [[7, 3, 3, 3], [8, 3, 3, 3]]
    assert positions.tolist() == [[5, 6, 7, 8], [0, 1, 2, 3]]


@pytest.mark.parametrize("expansion", sorted(EXPANSIONS))
def test_forward_matches_the_naive_draft(pair, expansion):
    target, draft = pair
    output, aux = forward(target, draft, expansion=expansion)
    naive = NaiveDraft(draft)
    for row, start in enumerate(STARTS.tolist()):
        anchor = int(TOKENS[row, start])
        want = naive.hidden(anchor, start, aux[row, :start], 4)
        torch.testing.assert_close(output.hidden[row].double(), want, rtol=2e-5, atol=2e-5)
        logits, confidence = naive.corrected(want, anchor, TOKENS[row, start + 1 : start + 5].tolist())
        previous = TOKENS[row, start : start + 4]
        embedded = draft.markov_head.embed(previous)
        got = output.logits[row] + draft.markov_head(embedded)
        torch.testing.assert_close(got.double(), logits, rtol=2e-5, atol=2e-5)
        got = draft.confidence_head(output.hidden[row], embedded).sigmoid()
        torch.testing.assert_close(got.double(), confidence, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("expansion", sorted(EXPANSIONS))
@pytest.mark.parametrize("ffn", ["dense", "moe"])
def test_arms_agree_in_bf16(ffn, expansion):
    target, draft = make_pair(ffn, dtype=torch.bfloat16)
    want, _ = forward(target, draft, expansion="repeat")
    got, _ = forward(target, draft, expansion=expansion)
    difference = (got.logits - want.logits).abs().max() / want.logits.abs().max()
    assert difference < 0.05, f"{expansion} differs from repeat by {difference:.3f} of the largest logit"


@pytest.mark.parametrize("expansion", sorted(EXPANSIONS))
def test_first_pre_is_within_a_rounding_of_repeat(bf16_pair, expansion):
    """Notebook 02's bound: mixes to a few fp32 roundings, the layer input to two bf16 ones."""
    _, draft = bf16_pair
    ids = torch.arange(draft.config.vocab_size)
    with torch.no_grad():
        want, got = expand(draft, ids, "repeat"), expand(draft, ids, expansion)
    torch.testing.assert_close(got.post.flatten(1), want.post.flatten(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.layer_input, want.layer_input, rtol=2**-6, atol=1e-6)
    if expansion == "collapsed":
        assert got.comb is None
        assert torch.equal(got.residual, want.residual[:, 0])
    else:
        assert torch.equal(got.residual, want.residual)
        torch.testing.assert_close(got.comb, want.comb, rtol=1e-5, atol=1e-6)


def test_unknown_arm(pair):
    with pytest.raises(ValueError, match=r"expansion must be one of .*broadcast.*, got 'fold'"):
        forward(*pair, expansion="fold")


def test_anchored_forward_is_the_decoding_forward(pair):
    target, draft = pair
    output, aux = forward(target, draft)
    with torch.no_grad():
        got = anchored_forward(draft, TOKENS, aux, torch.tensor([[2, 9], [33, 38]]))
    embedded = draft.markov_head.embed(TOKENS[0, 9:13])
    torch.testing.assert_close(got.logits[0, 1], output.logits[0] + draft.markov_head(embedded), rtol=1e-4, atol=1e-4)
    embedded = draft.markov_head.embed(TOKENS[1, 33:37])
    torch.testing.assert_close(got.logits[1, 0], output.logits[1] + draft.markov_head(embedded), rtol=1e-4, atol=1e-4)
    assert got.labels[0, 1].tolist() == TOKENS[0, 10:14].tolist()
    assert got.rows[0, 1].tolist() == [9, 10, 11, 12]
    assert got.valid[1, 1].tolist() == [True, False, False, False]


def test_gradients_reach_every_weight_and_not_the_target(fresh_pair):
    target, draft = fresh_pair
    for model in (target, draft):
        model.requires_grad_(True)
    aux = target(TOKENS).aux.detach()
    output = anchored_forward(draft, TOKENS, aux, torch.tensor([[2, 9], [30, 33]]))
    (output.logits.square().mean() + output.confidence_logits.square().mean()).backward()
    without = [name for name, parameter in draft.named_parameters() if parameter.grad is None]
    assert not without
    assert all(parameter.grad.abs().sum() > 0 for parameter in draft.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("expansion", sorted(EXPANSIONS))
def test_training_forward_equals_inference_forward(pair, expansion):
    target, draft = pair
    aux = target(TOKENS).aux
    with torch.no_grad():
        quiet = anchored_forward(draft, TOKENS, aux, STARTS.unsqueeze(1), expansion=expansion)
    with torch.enable_grad():
        loud = anchored_forward(draft, TOKENS, aux, STARTS.unsqueeze(1), expansion=expansion)
    torch.testing.assert_close(loud.logits, quiet.logits, rtol=1e-5, atol=1e-5)


# ---- the derived weight ----


def test_derived_weight_is_made_refreshed_in_place_and_not_saved(fresh_pair):
    _, draft = fresh_pair
    address = draft.fn_broadcast.data_ptr()
    state = {name: tensor + 0.01 for name, tensor in draft.state_dict().items()}
    assert not [name for name in state if "broadcast" in name]
    draft.load_state_dict(state)
    assert draft.fn_broadcast.data_ptr() == address
    assert torch.equal(draft.fn_broadcast, mhc.fold(state["layers.0.hc_attn_fn"], 4))


def test_a_stale_derived_weight_is_never_used(fresh_pair):
    target, draft = fresh_pair
    with torch.no_grad():
        draft.layers[0].hc_attn_fn.add_(1.0)
    with pytest.raises(RuntimeError, match="stale: call process_weights_after_loading"):
        forward(target, draft)
    draft.process_weights_after_loading()
    forward(target, draft)


def test_a_replaced_projection_is_noticed(fresh_pair):
    target, draft = fresh_pair
    draft.layers[0].hc_attn_fn = torch.nn.Parameter(draft.layers[0].hc_attn_fn.detach() + 1)
    with pytest.raises(RuntimeError, match="stale"):
        forward(target, draft)


def test_meta_build_then_hook():
    config = V4Config.tiny()
    with torch.device("meta"):
        draft = DSparkDraft(config)
    with pytest.raises(RuntimeError, match="stale"):
        _ = draft.fn_broadcast
    draft = to_inference(draft).to_empty(device="cpu")
    initialise(draft, config, 0)  # ends with the hook, as loaders do
    assert torch.equal(draft.fn_broadcast, mhc.fold(draft.layers[0].hc_attn_fn, 4))


def test_assigning_load(fresh_pair):
    _, draft = fresh_pair
    address = draft.fn_broadcast.data_ptr()
    draft.load_state_dict({name: tensor + 0.01 for name, tensor in draft.state_dict().items()}, assign=True)
    assert torch.equal(draft.fn_broadcast, mhc.fold(draft.layers[0].hc_attn_fn, 4))
    assert draft.fn_broadcast.data_ptr() == address


def test_a_copy_has_its_own_derived_weight(fresh_pair):
    _, draft = fresh_pair
    before, copy = draft.fn_broadcast.clone(), deepcopy(draft)
    copy.load_state_dict({name: tensor + 0.01 for name, tensor in copy.state_dict().items()})
    assert torch.equal(copy.fn_broadcast, mhc.fold(copy.layers[0].hc_attn_fn, 4))
    assert torch.equal(draft.fn_broadcast, before)


# ---- the token table ----


@pytest.fixture
def fresh_bf16_pair():
    return make_pair(dtype=torch.bfloat16)


def agrees_with_broadcast(draft):
    ids = torch.arange(draft.config.vocab_size)
    with torch.no_grad():
        got, want = expand(draft, ids, "table"), expand(draft, ids, "broadcast")
    torch.testing.assert_close(got.comb, want.comb, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.layer_input, want.layer_input, rtol=2**-6, atol=1e-6)
    return True


def test_token_table_is_made_refreshed_in_place_and_not_saved(fresh_bf16_pair):
    target, draft = fresh_bf16_pair
    addresses = [tensor.data_ptr() for tensor in draft.token_table.tensors]
    before = draft.token_table.post.clone()
    state = {name: tensor * 1.5 for name, tensor in draft.state_dict().items()}
    assert not [name for name in state if "table" in name]
    draft.load_state_dict(state)
    assert agrees_with_broadcast(draft)
    assert not torch.equal(draft.token_table.post, before)
    # a refit of the target reaches the draft through its hook
    target.load_state_dict({name: tensor.flip(0) for name, tensor in target.state_dict().items()})
    draft.process_weights_after_loading()
    assert agrees_with_broadcast(draft)
    assert [tensor.data_ptr() for tensor in draft.token_table.tensors] == addresses


@pytest.mark.parametrize("written", ["layers.0.hc_attn_fn", "layers.0.hc_attn_scale", "layers.0.hc_attn_base", "embed"])
def test_a_stale_token_table_is_never_used(fresh_bf16_pair, written):
    target, draft = fresh_bf16_pair
    with torch.no_grad():
        (target.embed.weight if written == "embed" else draft.get_parameter(written)).mul_(2.0)
    with pytest.raises(RuntimeError, match="stale"):
        forward(target, draft, expansion="table")
    draft.process_weights_after_loading()
    forward(target, draft, expansion="table")
    assert agrees_with_broadcast(draft)


def test_another_target_brings_another_table(fresh_bf16_pair):
    _, draft = fresh_bf16_pair
    other, _ = make_pair(dtype=torch.bfloat16, seed=7)
    address, before = draft.token_table.post.data_ptr(), draft.token_table.post.clone()
    draft.bind(other)
    assert draft.token_table.post.data_ptr() == address
    assert not torch.equal(draft.token_table.post, before)
    assert agrees_with_broadcast(draft)


def test_replaced_sources_are_noticed(fresh_bf16_pair):
    target, draft = fresh_bf16_pair
    target.embed.weight = torch.nn.Parameter(target.embed.weight.detach().clone(), requires_grad=False)
    with pytest.raises(RuntimeError, match="the token table is stale"):
        _ = draft.token_table


def test_no_table_without_the_ops(pair, monkeypatch):
    """fp32, training and GPUs without the kernels have no use for one; the arm is then broadcast's formula."""
    assert pair[1]._table is None
    monkeypatch.setattr(hyper, "OPS", False)
    target, draft = make_pair(dtype=torch.bfloat16)
    assert draft._table is None
    (table, _), (broadcast, _) = (forward(target, draft, expansion=arm) for arm in ("table", "broadcast"))
    assert torch.equal(table.logits, broadcast.logits)


def test_bind_refuses_another_vocabulary():
    with pytest.raises(ValueError, match=r"shared\.embed\.weight must be \[32, 64\], got \[48, 64\]"):
        DSparkDraft(V4Config.tiny()).bind(SharedEmbeddings(V4Config.tiny(vocab_size=48)))


def test_unbound_draft():
    config = V4Config.tiny()
    draft = to_inference(initialise(DSparkDraft(config), config, 0), torch.float32)
    with pytest.raises(RuntimeError, match=r"call bind\(target\) first"):
        draft(*draft.block(torch.tensor([4]), torch.tensor([0])), draft.context(1, 8))
