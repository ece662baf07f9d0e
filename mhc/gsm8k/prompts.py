"""Prompts and the two answer rules.

Source: the GSM8K evaluation of vLLM's test-suite, restated, so that accuracies compare; the strict rule is GSM8K's own
`#### N` convention.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from mhc.gsm8k.data import Problem

Rule = Literal["vllm", "strict"]
Number = int | Decimal

RULES: tuple[Rule, ...] = ("vllm", "strict")
STOP = ("Question", "Assistant:", "<|separator|>")
MAX_TOKENS = 256
SEED = 42

_AFTER_HASHES = re.compile(r"####\s*([-+−]?)\s*\$?\s*([-+−]?)([\d.,]*\d)")
_NUMBER = re.compile(r"(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")


def prompt(question: str, shots: Sequence[Problem] = ()) -> str:
    """`Question: ..\\nAnswer:` after the solved `shots`, answers verbatim with their calculator notes."""
    solved = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{solved}Question: {question}\nAnswer:"


def prompts(problems: Sequence[Problem], train: Sequence[Problem], shots: int) -> list[str]:
    """One prompt a problem, each after the first `shots` rows of `train`.

    Raises:
        ValueError: `shots` is negative or more than `train` has.
    """
    if not 0 <= shots <= len(train):
        raise ValueError(f"shots must be 0 to {len(train)}, got {shots}")
    return [prompt(problem.question, train[:shots]) for problem in problems]


def cut_at_stop(text: str, stop: Sequence[str] = STOP) -> str:
    """The text before the first stop string, as a server returns it."""
    return text[: min((text.find(word) for word in stop if word in text), default=len(text))]


def extract(text: str, rule: Rule = "vllm") -> Number | None:
    """The answer in a text; None when there is none (an invalid answer).

    Args:
        text: a completion or a gold answer.
        rule: `vllm`: commas removed, the last run of digits, read as a Python literal (so `007` is invalid, and signs
            and decimals are lost: `-3.50` reads 50). `strict`: the number after the first `####`, with sign, decimals
            and thousands separators.

    Raises:
        ValueError: the rule is unknown.
    """
    if rule == "vllm":
        runs = re.findall(r"\d+", text.replace(",", ""))
        try:
            return int(ast.literal_eval(runs[-1])) if runs else None
        except (SyntaxError, ValueError):
            return None
    if rule == "strict":
        found = _AFTER_HASHES.search(text)
        if not found or (found[1] and found[2]) or not _NUMBER.fullmatch(found[3]):
            return None
        magnitude = Decimal(found[3].replace(",", ""))
        return -magnitude if (found[1] or found[2]) in ("-", "−") else magnitude
    raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")


def gold(problem: Problem, rule: Rule = "vllm") -> Number:
    """The right answer.

    Raises:
        ValueError: the problem's own answer is invalid under the rule.
    """
    number = extract(problem.answer, rule)
    if number is None:
        raise ValueError(f"problem {problem.id} has no answer under rule {rule}: {problem.answer[-40:]!r}")
    return number
