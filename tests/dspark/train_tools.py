"""Made-up questions and sequences for the tests of training."""

from __future__ import annotations

import random

from mhc.dspark.corpus import Sample
from mhc.gsm8k.data import Problem

WORDS = ["two", "three", "apples", "pens", "has", "buys", "sells", "gives", "each", "day", "more", "left"]


def made_up(count: int, seed: int = 0) -> list[Problem]:
    """Short questions with calculator notes."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        a, b = rng.randrange(10, 99), rng.randrange(10, 99)
        question = " ".join(rng.choices(WORDS, k=6)) + f" {a} and {b}?"
        rows.append(Problem(i, question, f"{a}+{b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"))
    return rows


def samples(count: int, low: int = 12, high: int = 30, prompt: int = 5) -> list[Sample]:
    """Random sequences of tokens 4 to 31."""
    rng = random.Random(1)
    lengths = [rng.randrange(low, high) for _ in range(count)]
    return [Sample((0, *(rng.randrange(4, 32) for _ in range(n - 2)), 1), prompt) for n in lengths]
