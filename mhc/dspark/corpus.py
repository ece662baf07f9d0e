"""GSM8K as token sequences: questions and answers, split, perturbed, and batched by length."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mhc.dspark.tokenizer import BOS_ID, EOS_ID, PAD_ID
from mhc.gsm8k.data import Problem
from mhc.gsm8k.prompts import prompt

DEV_QUESTIONS = 256  # of the train split, never trained on: what training reports is measured on these
LENGTH_MULTIPLE = 64  # padded lengths, so that few shapes occur: 8 in GSM8K, each a CUDA graph
POOL_BATCHES = 32


@dataclass(frozen=True)
class Sample:
    """One sequence: begin, prompt, answer, end. The first `prompt_length` ids are begin and prompt."""

    ids: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. `ids` [B, S] int64, `lengths` [B] and `prompt_lengths` [B] int64."""

    ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        return Batch(*(x.to(device, non_blocking=True) for x in (self.ids, self.lengths, self.prompt_lengths)))

    def answer_mask(self) -> Tensor:
        """[B, S] bool: ids that the target is to produce, the end token included."""
        index = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (index >= self.prompt_lengths[:, None]) & (index < self.lengths[:, None])

    def token_mask(self) -> Tensor:
        """[B, S] bool: ids that are not padding."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]


def split(train: Sequence[Problem], dev_questions: int = DEV_QUESTIONS) -> tuple[list[Problem], list[Problem]]:
    """Train problems without the last `dev_questions`, and those.

    Raises:
        ValueError: `dev_questions` is not 1 to one less than there are problems.
    """
    if not 1 <= dev_questions < len(train):
        raise ValueError(f"dev_questions must be 1 to {len(train) - 1}, got {dev_questions}")
    return list(train[:-dev_questions]), list(train[-dev_questions:])


def encode_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """Begin token and `Question: ..\\nAnswer:`."""
    return [BOS_ID, *tokenizer.encode(prompt(question)).ids]


def encode(tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[Sample]:
    """Each problem with its published answer."""
    samples = []
    for problem in problems:
        head = encode_prompt(tokenizer, problem.question)
        samples.append(Sample((*head, *tokenizer.encode(" " + problem.answer).ids, EOS_ID), len(head)))
    return samples


def perturb(question: str, rng: random.Random) -> str:
    """The question with every number replaced, with probability 1/2, by another of as many digits.

    A trained target knows its train answers by heart; on such a question it has to compute, as it will on new ones.
    """

    def replace(match: re.Match[str]) -> str:
        digits = len(match[0])
        return str(rng.randrange(10 ** (digits - 1), 10**digits)) if rng.random() < 0.5 else match[0]

    return re.sub(r"\d+", replace, question)


def batches(samples: Sequence[Sample], batch_size: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Endless batches over reshuffled epochs, similar lengths together; batch number `start` comes first.

    The order is a function of `seed` and the batch's number alone, so that a resumed run sees what it would have seen.

    Raises:
        ValueError: there are fewer samples than a batch holds.
    """
    if not 1 <= batch_size <= len(samples):
        raise ValueError(f"batch_size must be 1 to {len(samples)}, got {batch_size}")
    per_epoch = len(samples) // batch_size
    epoch, first = divmod(start, per_epoch)
    while True:
        rng = random.Random(f"{seed}/{epoch}")
        order = rng.sample(range(len(samples)), per_epoch * batch_size)
        pool = POOL_BATCHES * batch_size
        groups = []
        for at in range(0, len(order), pool):
            part = sorted(order[at : at + pool], key=lambda index: len(samples[index].ids))
            groups += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
        rng.shuffle(groups)
        for group in groups[first:]:
            yield collate([samples[index] for index in group])
        epoch, first = epoch + 1, 0


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad to the longest sample, rounded up to a multiple of 64."""
    longest = max(len(sample.ids) for sample in samples)
    ids = torch.full((len(samples), -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE), PAD_ID)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample.ids)] = torch.tensor(sample.ids)
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    return Batch(ids, lengths, torch.tensor([sample.prompt_length for sample in samples]))
