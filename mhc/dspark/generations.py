"""The target's own answers to train questions: what sharpens it, and what a draft learns to foresee."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from mhc.dspark import generate
from mhc.dspark.corpus import Sample, encode_prompt, perturb
from mhc.dspark.target import Target
from mhc.gsm8k.data import Problem
from mhc.gsm8k.prompts import MAX_TOKENS

BATCH = 2048


def answer(
    target: Target,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    rounds: int,
    seed: int,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_TOKENS,
    capture: bool = True,
) -> list[Sample]:
    """Answer every question `rounds` times.

    The first round asks the questions as they are, the others with perturbed numbers (`corpus.perturb`).

    Args:
        target: in inference form.
        tokenizer: of the target.
        problems: only their questions are used.
        rounds: at least 1.
        seed: of sampling and perturbation.
        temperature: of sampling; 0 is greedy.
        max_new_tokens: an answer not ended by then is kept as far as it got.
        capture: replay rounds as CUDA graphs, where there is CUDA.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    rng = random.Random(seed)
    questions = [
        perturb(problem.question, rng) if number else problem.question
        for number in range(rounds)
        for problem in problems
    ]
    prompts = [encode_prompt(tokenizer, question) for question in questions]
    completions = generate(
        target,
        prompts,
        max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=BATCH,
        capture=capture and target.embed.weight.is_cuda,
        progress=True,
    )
    return [Sample((*head, *done.tokens), len(head)) for head, done in zip(prompts, completions, strict=True)]


def cached(path: Path, key: str, make: list[Sample] | None = None) -> list[Sample] | None:
    """Read samples stored under `key` (None when there are none), or store `make`."""
    if make is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps({"key": key, "samples": [[sample.ids, sample.prompt_length] for sample in make]}))
        partial.replace(path)
        return make
    if not path.is_file():
        return None
    stored = json.loads(path.read_text())
    return [Sample(tuple(ids), length) for ids, length in stored["samples"]] if stored["key"] == key else None
