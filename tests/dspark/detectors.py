"""What must hold for decoding, each as a function that raises AssertionError when it does not.

`test_generate.py` runs them on the package as it is, `test_faults.py` on the package with a fault put in.
"""

import contextlib
import itertools
from dataclasses import replace
from unittest import mock

import torch
from dspark_pairs import chi_square, make_pair, random_prompts, toy_pair
from naive import NaiveDraft
from safetensors.torch import save_file

import mhc.dspark.checkpoint
import mhc.dspark.decode
import mhc.dspark.rounds
from mhc.dspark import DSparkDraft, generate, to_inference
from mhc.dspark.checkpoint import load_draft
from mhc.dspark.expansion import expand
from mhc.gsm8k.stats import Acceptance


@contextlib.contextmanager
def watched():
    """Record each round: what every request had emitted before it, and the proposal."""
    rounds = []
    one_round, propose = mhc.dspark.decode.draft_round, mhc.dspark.rounds.propose

    def spy_round(target, draft, caches, batch, settings):
        rounds.append({"output": batch.output.clone(), "count": batch.count.clone(), "live": batch.live.clone()})
        one_round(target, draft, caches, batch, settings)

    def spy_propose(*args):
        rounds[-1]["proposal"] = propose(*args)
        return rounds[-1]["proposal"]

    with (
        mock.patch.object(mhc.dspark.decode, "draft_round", spy_round),
        mock.patch.object(mhc.dspark.rounds, "propose", spy_propose),
    ):
        yield rounds


def proposals_follow_the_specification(pair=None, prefix=(), temperature=0.7, rounds=4):
    """Every draft distribution and confidence equals the naive draft's, given the tokens emitted so far."""
    target, draft = pair or make_pair()
    naive = NaiveDraft(draft)
    # behind a prefix the prompts are short, so that the window reaches into it
    prompts = random_prompts(2, low=2, high=6, seed=8) if prefix else random_prompts(2, low=14, high=24, seed=8)
    with watched() as seen:
        generate(target, prompts, 24, draft=draft, temperature=temperature, prefix=prefix, confidence_threshold=0.3)
    checked = 0
    for event, row in itertools.product(seen[:rounds], range(len(prompts))):
        if not event["live"][row]:
            continue
        proposal, emitted = event["proposal"], event["output"][row, : event["count"][row]].tolist()
        history = [*prefix, *prompts[row], *emitted]
        with torch.no_grad():
            aux = target(torch.tensor([history[:-1]])).aux[0]
        hidden = naive.hidden(history[-1], len(history) - 1, aux, draft.config.block_size)
        logits, confidence = naive.corrected(hidden, history[-1], proposal.tokens[row].tolist())
        want = torch.softmax(logits / temperature, -1)
        assert (proposal.probabilities[row] - want).abs().max() < 1e-4, "draft distribution"
        assert (proposal.confidence[row] - confidence).abs().max() < 1e-4, "confidence"
        checked += 1
    assert checked >= rounds


@torch.no_grad()
def greedy(target, prompts, count):
    """Greedy decoding without any cache: whole sequences, padded on the right, which a causal model does not see."""
    texts = [list(prompt) for prompt in prompts]
    for _ in range(count):
        longest = max(map(len, texts))
        tokens = torch.tensor([text + [target.config.pad_token_id] * (longest - len(text)) for text in texts])
        best = target.logits(target(tokens).hidden).argmax(-1)
        for text, row in zip(texts, best, strict=True):
            text.append(int(row[len(text) - 1]))
    texts = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    return [until(text, target.config.eos_token_id) for text in texts]


def until(text, end):
    """The text up to the first end token, which stays."""
    return text[: text.index(end) + 1] if end in text else text


def greedy_texts_are_the_targets(pair=None, prefix=(), count=24, **settings):
    """At temperature 0 plain and speculative texts are those of cache-less greedy decoding."""
    target, draft = pair or make_pair()
    prompts = random_prompts(6, seed=4)
    want = greedy(target, [[*prefix, *prompt] for prompt in prompts], count)
    plain = [item.tokens for item in generate(target, prompts, count, prefix=prefix)]
    assert plain == want, "plain decoding"
    drafted = generate(target, prompts, count, draft=draft, prefix=prefix, **settings)
    assert [item.tokens for item in drafted] == want, "speculative decoding"
    return drafted


@torch.no_grad()
def exact_law(target, prompt, length, temperature):
    """Probability of every completion of `length` tokens [V^length]; behind an end token only end tokens count."""
    vocabulary, eos = target.config.vocab_size, target.config.eos_token_id
    sequences = torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))
    tokens = torch.cat((torch.tensor(prompt).expand(len(sequences), -1), sequences[:, :-1]), 1)
    law = torch.softmax(target.logits(target(tokens).hidden)[:, len(prompt) - 1 :] / temperature, -1)
    steps = law.gather(-1, sequences.unsqueeze(-1)).squeeze(-1).double()
    over = (sequences == eos).long().cumsum(-1) - (sequences == eos).long() > 0
    steps = torch.where(over, (sequences == eos).double(), steps)
    return steps.prod(-1)


def output_law_is_the_targets(temperature=1.0, threshold=0.0, count=4000, seed=1, plain=False):
    """Chi-square of all completions of four tokens over a vocabulary of six, against the target's exact law."""
    target, draft = toy_pair()
    prompt, length, vocabulary = [4, 5, 3], 4, 6
    settings = {} if plain else {"draft": draft, "confidence_threshold": threshold}
    done = generate(target, [prompt] * count, length, temperature=temperature, seed=seed, **settings)
    eos = target.config.eos_token_id
    codes = torch.tensor([[*item.tokens, *[eos] * (length - len(item.tokens))] for item in done])
    codes = (codes * vocabulary ** torch.arange(length - 1, -1, -1)).sum(-1)
    counts = torch.bincount(codes, minlength=vocabulary**length)
    p_value = chi_square(counts, exact_law(target, prompt, length, temperature))
    assert p_value > 1e-3, f"chi-square p = {p_value:.1e}"
    return done


def requests_ignore_their_neighbours(temperature=0.8):
    """A request alone, in a ragged batch and in another order gives the same tokens and counts."""
    target, draft = make_pair()
    prompts = random_prompts(5, low=1, high=40, seed=6)
    settings = {"draft": draft, "temperature": temperature, "seed": 5}
    together = generate(target, prompts, 20, **settings)
    order = [3, 0, 4, 2, 1]
    shuffled = generate(target, [prompts[i] for i in order], 20, request_ids=order, **settings)
    assert [together[i] for i in order] == shuffled, "order"
    for i, prompt in enumerate(prompts):
        assert generate(target, [prompt], 20, request_ids=[i], **settings) == [together[i]], "alone"


def nothing_follows_the_end():
    """An end token inside an accepted prefix ends the request; neither text nor counts go on behind it."""
    target, draft = make_pair()
    prompts = random_prompts(3, low=5, high=9, seed=4)
    texts = greedy(target, prompts, 20)

    def perfect(draft, output, anchors, temperature, uniform):
        """Propose the target's own continuation, so that whole blocks are accepted."""
        rows = [text[position:] + [0] * 4 for text, position in zip(texts, at, strict=True)]
        tokens = torch.tensor([row[:4] for row in rows])
        at[:] = [position + 5 for position in at]
        return original(draft, output, anchors, temperature, uniform)._replace(tokens=tokens)

    original = mhc.dspark.rounds.propose
    for end in range(1, 8):  # the end token at every place of a block
        at = [1] * len(prompts)
        eos = texts[0][end]
        config = target.config
        target.config = draft.config = replace(config, eos_token_id=eos)
        try:
            with mock.patch.object(mhc.dspark.rounds, "propose", perfect):
                done = generate(target, prompts, 20, draft=draft)
        finally:
            target.config = draft.config = config
        for text, item in zip(texts, done, strict=True):
            assert item.tokens == until(text, eos), "text"
            assert item.finish_reason == ("eos" if eos in text else "length")
            emitted = len(item.tokens) - 1  # the first came from the prefill
            accepted = sum(item.accepted_per_position)
            assert emitted - item.drafts <= accepted <= emitted, "counts"
            assert item.drafts == -(-emitted // 5), "perfect blocks emit five tokens a round"


# ---- derived weights: the folded projection, and the token table in bf16 ----


def derived_weight_follows_a_refit(arm="broadcast"):
    """Loading other weights refreshes what is derived in place: the arm goes on agreeing with repeat."""
    target, draft = make_pair(dtype=DTYPES[arm])
    addresses = _addresses(draft, arm)
    draft.load_state_dict(make_pair(dtype=DTYPES[arm], seed=7)[1].state_dict())
    _agrees_with_repeat(draft, arm)
    assert _addresses(draft, arm) == addresses, "captured graphs hold the old addresses"
    target.load_state_dict(make_pair(dtype=DTYPES[arm], seed=8)[0].state_dict())
    draft.process_weights_after_loading()
    _agrees_with_repeat(draft, arm)


def derived_weight_is_made_by_the_hook_alone(rank=0, arm="broadcast"):
    """A loader that writes tensors itself (RDMA, dummy weights) and then calls only the hook, on any pipeline rank."""
    target, source = make_pair(dtype=DTYPES[arm])
    with torch.device("meta"):
        draft = DSparkDraft(target.config)
    # `empty` then fills with NaN: memory that an earlier pair has freed can hold the very weights that are missing
    torch.use_deterministic_algorithms(True)
    try:
        draft = to_inference(draft, DTYPES[arm]).to_empty(device="cpu").bind(target)
    finally:
        torch.use_deterministic_algorithms(False)
    draft.pipeline_rank = rank
    for name, parameter in draft.named_parameters():
        parameter.data.copy_(source.get_parameter(name))
    draft.process_weights_after_loading()
    _agrees_with_repeat(draft, arm)


DTYPES = {"broadcast": torch.float32, "table": torch.bfloat16}


def _addresses(draft, arm):
    return [tensor.data_ptr() for tensor in (draft.token_table.tensors if arm == "table" else [draft.fn_broadcast])]


@torch.no_grad()
def _agrees_with_repeat(draft, arm):
    token_ids = torch.arange(draft.config.vocab_size)
    want = expand(draft, token_ids, "repeat")
    try:
        got = expand(draft, token_ids, arm)
    except RuntimeError as error:
        raise AssertionError(str(error)) from error
    assert (got.post - want.post).abs().max() < 1e-4, "post"
    assert (got.comb - want.comb).abs().max() < 1e-4, "comb"
    difference = (got.layer_input.float() - want.layer_input.float()).abs()
    assert (difference <= 2**-6 * want.layer_input.float().abs() + 1e-5).all(), "layer input"


def every_tensor_is_loaded(folder):
    """A checkpoint's tensors all arrive, and a tensor that has no place is an error."""
    source, draft = make_pair("moe", seed=3)[1], make_pair("moe", seed=4)[1]
    tensors = {name: tensor.contiguous().clone() for name, tensor in SAVED_NAMES(source).items()}
    save_file(tensors, folder / "model.safetensors")
    load_draft(draft, folder)
    for name, tensor in source.state_dict().items():
        assert torch.equal(draft.state_dict()[name], tensor), name


SAVED_NAMES = mhc.dspark.checkpoint.checkpoint_tensors  # as it is now: faults replace the name in its module


# ---- context and counts ----


@torch.no_grad()
def aux_states_are_block_outputs():
    """Aux layer i is the mean over streams of what block i returned, not of what it was given."""
    target, _ = make_pair()
    tokens = torch.arange(4, 30).view(1, -1)
    outputs, run = [], mhc.dspark.hyper.post

    def post(output, mix):
        outputs.append(run(output, mix))
        return outputs[-1]

    with mock.patch.object(mhc.dspark.hyper, "post", post):  # post_pre calls it too: two outputs a block
        aux = target(tokens).aux
    want = torch.cat([outputs[2 * layer + 1].mean(1) for layer in target.config.aux_layers], -1)
    assert torch.equal(aux[0], want)


def mean_length_counts_the_bonus():
    """A draft whose tokens are all accepted gives k + 1 tokens a round."""
    target, draft = make_pair()
    prompts = random_prompts(3, low=5, high=9, seed=4)
    done = generate(target, prompts, 20, draft=draft, temperature=0.5)
    rounds = sum(item.drafts for item in done)
    counts = Acceptance.of([item.drafts for item in done], [item.accepted_per_position for item in done])
    emitted = sum(len(item.tokens) - 1 for item in done)
    # a request's last round may be cut by the limit, which drops at most one token
    assert emitted <= counts.mean_length * rounds <= emitted + len(done)
    assert abs(counts.mean_length - 1 - sum(counts.rate_per_position)) < 1e-12
