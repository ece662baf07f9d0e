"""Decoding: the same text at temperature 0, the same law above it, honest counts."""

import detectors
import pytest
import torch
from dspark_pairs import make_pair, random_prompts

import mhc.dspark.rounds
from mhc.dspark import generate
from mhc.dspark.expansion import EXPANSIONS

PREFIX = torch.randint(4, 32, (21,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.mark.parametrize("prefix", [(), PREFIX[:5], PREFIX])
def test_proposals_follow_the_specification(prefix):
    detectors.proposals_follow_the_specification(prefix=prefix)


# ---- temperature 0 ----


@pytest.mark.parametrize("ffn", ["dense", "moe"])
@pytest.mark.parametrize("expansion", sorted(EXPANSIONS))
def test_greedy_texts(ffn, expansion):
    detectors.greedy_texts_are_the_targets(make_pair(ffn), expansion=expansion)


@pytest.mark.parametrize("block_size", [1, 2, 7])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_greedy_texts_for_every_block_and_threshold(pair, block_size, threshold):
    done = detectors.greedy_texts_are_the_targets(pair, block_size=block_size, confidence_threshold=threshold)
    assert all(len(item.accepted_per_position) == block_size for item in done)
    if threshold == 1.0:  # everything is cut, before verification: plain decoding in disguise
        assert all(item.drafted == 0 and item.drafts == len(item.tokens) - 1 for item in done)


def test_greedy_texts_behind_a_prefix(pair):
    detectors.greedy_texts_are_the_targets(pair, prefix=PREFIX)


@pytest.mark.parametrize("hostile", ["huge", "nan", "zero", "other_seed"])
def test_a_hostile_draft_changes_nothing(hostile):
    target, draft = make_pair()
    with torch.no_grad():
        for parameter in draft.parameters():
            if hostile == "huge":
                parameter.mul_(1e4)
            elif hostile != "other_seed":
                parameter.fill_(float("nan") if hostile == "nan" else 0.0)
    draft.process_weights_after_loading()
    detectors.greedy_texts_are_the_targets((target, draft))


def test_a_broken_draft_is_plain_sampling():
    """NaN is never accepted, and each emitted token then is drawn by plain decoding's own number."""
    target, draft = make_pair()
    with torch.no_grad():
        draft.norm.weight.fill_(float("nan"))
    prompts = random_prompts(4)
    plain = generate(target, prompts, 20, temperature=1.0, seed=3)
    broken = generate(target, prompts, 20, draft=draft, temperature=1.0, seed=3)
    assert [item.tokens for item in broken] == [item.tokens for item in plain]
    assert all(sum(item.accepted_per_position) == 0 for item in broken)


def test_bf16_texts_are_equal_at_the_shapes_of_verification(bf16_pair):
    target, draft = bf16_pair
    prompts = random_prompts(8)
    plain = generate(target, prompts, 40, width=5)
    for expansion in EXPANSIONS:
        done = generate(target, prompts, 40, draft=draft, expansion=expansion)
        assert [item.tokens for item in done] == [item.tokens for item in plain]


# ---- above temperature 0 ----


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_plain_law(temperature):
    detectors.output_law_is_the_targets(temperature, plain=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_speculative_law(temperature, threshold):
    done = detectors.output_law_is_the_targets(temperature, threshold)
    rejected = sum(item.drafted - sum(item.accepted_per_position) for item in done)
    assert rejected > 300, "the law is only proven where drafts are rejected"


def test_requests_ignore_their_neighbours():
    detectors.requests_ignore_their_neighbours()


def test_batches_are_cut_in_order(pair):
    target, draft = pair
    prompts = random_prompts(7)
    settings = {"draft": draft, "temperature": 0.8}
    assert generate(target, prompts, 12, batch_size=3, **settings) == generate(target, prompts, 12, **settings)


def test_seeds_differ_and_repeat(pair):
    target, draft = pair
    prompts = random_prompts(3)
    texts = [generate(target, prompts, 12, draft=draft, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


# ---- counts ----


def test_nothing_follows_the_end():
    detectors.nothing_follows_the_end()


def test_counts_add_up(pair):
    target, draft = pair
    for item in generate(target, random_prompts(12), 30, draft=draft, temperature=0.3):
        accepted = item.accepted_per_position
        assert accepted == sorted(accepted, reverse=True)
        assert item.drafted == 4 * item.drafts
        emitted = len(item.tokens) - 1
        # each round adds its accepted tokens and one more, but for a last round that was cut
        assert emitted <= item.drafts + sum(accepted) <= emitted + 1
        assert (item.tokens[-1] == 1) == (item.finish_reason == "eos")
        assert len(item.tokens) == 30 or item.finish_reason == "eos"


def test_trace_tells_the_same_story(pair):
    target, draft = pair
    prompts = random_prompts(6)
    settings = {"draft": draft, "temperature": 0.5, "confidence_threshold": 0.4}
    plain = generate(target, prompts, 20, **settings)
    for item, untraced in zip(generate(target, prompts, 20, trace=True, **settings), plain, strict=True):
        assert item.tokens == untraced.tokens
        assert untraced.rounds == []
        assert len(item.rounds) == item.drafts
        assert sum(part.drafted for part in item.rounds) == item.drafted
        text = item.tokens[:1]
        for part in item.rounds:
            doubts = [i for i, confidence in enumerate(part.confidence) if confidence < 0.4]
            assert part.drafted == (doubts[0] if doubts else 4)
            assert item.tokens[len(text) : len(text) + part.accepted] == part.tokens[: part.accepted][: 20 - len(text)]
            text += [*part.tokens[: part.accepted], item.tokens[min(len(text) + part.accepted, 19)]]


@pytest.mark.parametrize("limit", [1, 2, 6])
def test_the_limit_holds(pair, limit):
    target, draft = pair
    prompts = random_prompts(5)
    for arm in ({}, {"draft": draft}):
        assert all(len(item.tokens) <= limit for item in generate(target, prompts, limit, **arm))


def test_no_prompts(pair):
    assert generate(pair[0], []) == []


def test_rounds_do_not_wait_for_the_host(pair, monkeypatch):
    """Inside a round no tensor is turned into a Python value (a device sync on CUDA)."""

    def refuse(self, *args):
        raise AssertionError("a round read a tensor on the host")

    original = mhc.dspark.rounds.draft_round

    def guarded(*args):
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, refuse)
            original(*args)

    monkeypatch.setattr("mhc.dspark.decode.draft_round", guarded)
    generate(pair[0], random_prompts(3), 10, draft=pair[1], temperature=0.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[4], []]}, r"prompts\[1\] must hold at least one token"),
        ({"prompts": [[4, 32]]}, r"prompts\[0\] must hold token ids from 0 to 31, got 32"),
        ({"prefix": [-1]}, "prefix must hold token ids from 0 to 31, got -1"),
        ({"request_ids": [1]}, "request_ids must be 2 different ints, got 1, 1 different"),
        ({"request_ids": [1, 1]}, "request_ids must be 2 different ints, got 2, 1 different"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"temperature": -0.5}, r"temperature must be 0 or finite and at least 1e-05, got -0\.5"),
        ({"temperature": float("nan")}, "temperature must be 0 or finite"),
        ({"temperature": 1e-6}, "temperature must be 0 or finite"),
        ({"confidence_threshold": 1.5}, r"confidence_threshold must be 0 to 1, got 1\.5"),
        ({"expansion": "fold"}, "expansion must be one of"),
        ({"capture": True}, "capture needs a model on a CUDA device, got cpu"),
        ({"seed": -1, "temperature": 1.0}, "seed must be 0 to"),
    ],
)
def test_refusals(pair, change, message):
    target, draft = pair
    arguments = {"prompts": [[4], [5]], "draft": draft} | change
    with pytest.raises(ValueError, match=message):
        generate(target, **arguments)


def test_a_draft_of_another_target_is_refused(pair):
    with pytest.raises(ValueError, match="draft must be bound to target"):
        generate(make_pair()[0], [[4]], draft=pair[1])
