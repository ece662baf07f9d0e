"""Tokenizer, splits, masks and batches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from train_tools import made_up, samples

from mhc.dspark import tokenizer as tokenizers
from mhc.dspark.corpus import Sample, batches, collate, perturb, split


def test_tokenizer_spells_digits_and_round_trips(tmp_path: Path) -> None:
    tokenizer = tokenizers.train((f"{p.question} {p.answer}" for p in made_up(200)), 300)
    assert [tokenizer.token_to_id(name) for name in ("<|begin|>", "<|end|>", "<|pad|>", "<|noise|>")] == [0, 1, 2, 3]
    text = "Zoë pays $1,234.50 <<1+2=3>>\n#### -12 \u2028 漢"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    tokenizer.save(str(tmp_path / "t.json"))
    assert tokenizers.load(tmp_path / "t.json").encode(text).ids == ids


def test_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 260"):
        tokenizers.train(["a"], 200)
    with pytest.raises(ValueError, match="beyond this corpus"):
        tokenizers.train(["a b"], 2048)
    with pytest.raises(FileNotFoundError, match="train target"):
        tokenizers.load(tmp_path / "none.json")


def test_batches_follow_seed_and_number_alone() -> None:
    data = samples(23)
    stream = batches(data, 4, seed=3)
    first = [next(stream).ids for _ in range(12)]  # more than two epochs of five batches
    for start in (1, 5, 11):
        assert torch.equal(next(batches(data, 4, seed=3, start=start)).ids, first[start])
    seen = [tuple(row.tolist()) for ids in first[:5] for row in ids]
    assert len(set(seen)) == 20  # no sample twice in an epoch
    assert not torch.equal(next(batches(data, 4, seed=4)).ids, first[0])
    with pytest.raises(ValueError, match="batch_size must be 1 to 23, got 24"):
        next(batches(data, 24, seed=0))


def test_masks() -> None:
    batch = collate([Sample((0, 9, 8, 7, 1), 2), Sample((0, 9, 1), 2)])
    assert batch.ids.shape == (2, 64)
    assert batch.answer_mask()[:, :6].tolist() == [
        [False, False, True, True, True, False],
        [False, False, True] + [False] * 3,
    ]
    assert batch.token_mask().sum(1).tolist() == [5, 3]


def test_perturbed_questions_keep_their_form() -> None:
    rng = random.Random(0)
    text = "Tom has 12 pens, 7 cats and $1,500."
    variants = {perturb(text, rng) for _ in range(20)}
    assert len(variants) > 5
    shape = [len(part) for part in text.split()]
    assert all([len(part) for part in variant.split()] == shape for variant in variants)


def test_dev_questions_are_held_out() -> None:
    rows = made_up(10)
    kept, dev = split(rows, 3)
    assert (kept, dev) == (rows[:7], rows[7:])
    with pytest.raises(ValueError, match="dev_questions must be 1 to 9, got 10"):
        split(rows, 10)
