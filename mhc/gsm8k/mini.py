"""The miniature pair as an engine: questions in, judged rows and totals out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mhc.dspark import generate
from mhc.dspark.artifacts import Pair
from mhc.dspark.batch import Completion
from mhc.dspark.corpus import encode_prompt
from mhc.dspark.tokenizer import EOS_ID
from mhc.gsm8k.data import Problem
from mhc.gsm8k.prompts import MAX_TOKENS, Rule, cut_at_stop, prompt
from mhc.gsm8k.rows import QuestionRow, Record, verdict
from mhc.gsm8k.stats import Acceptance


@dataclass(frozen=True)
class Arm:
    """One way to decode.

    Args:
        expansion: how the draft's first layer gets its streams (`mhc.dspark.expansion`); None decodes plainly.
        k: draft length, 0 for plain decoding.
        temperature: of target and draft.
        threshold: drafted tokens from the first one less confident than this are not verified.
        width: rows of a plain step, see `mhc.dspark.generate`.
        suffix: told apart by name from an arm with the same settings, e.g. in another dtype.
    """

    expansion: str | None
    k: int
    temperature: float
    threshold: float = 0.0
    width: int = 1
    suffix: str = ""

    @property
    def name(self) -> str:
        """`plain`, the expansion, or the expansion and its threshold."""
        cut = f"_c{self.threshold:g}" if self.threshold else ""
        return f"{self.expansion or 'plain'}{cut}{self.suffix}"


class Outcome(NamedTuple):
    """An arm's rows, its total line, its texts and its tokens, in the order of the questions."""

    rows: list[QuestionRow]
    total: Record
    texts: list[str]
    tokens: list[list[int]]


def encode_prompts(pair: Pair, problems: Sequence[Problem], shots: Sequence[Problem] = ()) -> list[list[int]]:
    """Token ids of each prompt. The pair was trained without shots: with them it is out of its depth."""
    if not shots:
        return [encode_prompt(pair.tokenizer, problem.question) for problem in problems]
    begin = encode_prompt(pair.tokenizer, "")[:1]
    return [begin + pair.tokenizer.encode(prompt(problem.question, shots)).ids for problem in problems]


def run_arm(
    pair: Pair,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    arm: Arm,
    *,
    rule: Rule = "vllm",
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
    batch_size: int | None = None,
    capture: bool = True,
) -> Outcome:
    """Answer all questions in one arm.

    Random streams are keyed by question id, so arms and subsets of the questions draw the same numbers. `capture`
    replays rounds as CUDA graphs, where there is CUDA.

    Raises:
        ValueError: the arm drafts and the pair has no draft, or as `mhc.dspark.generate`.
    """
    if arm.expansion and pair.draft is None:
        raise ValueError(f"arm {arm.name} needs a draft, and the model folder holds none: run `mhc train draft`")
    start = time.perf_counter()
    completions = generate(
        pair.target,
        prompts,
        max_tokens,
        draft=pair.draft if arm.expansion else None,
        block_size=arm.k or None,
        temperature=arm.temperature,
        seed=seed,
        request_ids=[problem.id for problem in problems],
        expansion=arm.expansion or "broadcast",
        confidence_threshold=arm.threshold,
        batch_size=batch_size,
        width=arm.width,
        capture=capture and on_cuda(pair),
    )
    wall_s = time.perf_counter() - start
    texts = [text_of(pair, done) for done in completions]
    rows = [
        verdict(
            problem,
            text,
            rule,
            arm=arm.name,
            k=arm.k,
            temperature=arm.temperature,
            tokens=len(done.tokens),
            drafts=done.drafts,
            accepted_per_position=done.accepted_per_position,
        )
        for problem, text, done in zip(problems, texts, completions, strict=True)
    ]
    return Outcome(rows, _total(arm, rows, completions, wall_s), texts, [done.tokens for done in completions])


def equality(arm: Arm, outcome: Outcome, plain: Outcome) -> Record:
    """The questions whose tokens differ from plain decoding's."""
    pairs = zip(outcome.rows, outcome.tokens, plain.tokens, strict=True)
    differing = [row.id for row, tokens, want in pairs if tokens != want]
    return {"record": "equality", "arm": arm.name, "questions": len(outcome.rows), "differing_ids": differing}


def text_of(pair: Pair, completion: Completion) -> str:
    """The text of a completion, cut at the stop strings as a server would."""
    tokens = completion.tokens[:-1] if completion.tokens[-1:] == [EOS_ID] else completion.tokens
    return cut_at_stop(pair.tokenizer.decode(tokens))


def on_cuda(pair: Pair) -> bool:
    """Whether the pair runs on a GPU, where rounds are replayed as CUDA graphs."""
    return pair.target.embed.weight.is_cuda


def _total(arm: Arm, rows: Sequence[QuestionRow], completions: Sequence[Completion], wall_s: float) -> Record:
    """The arm's line: what rows cannot say (tokens verified, wall time) and what they add up to."""
    total: Record = {
        "record": "arm",
        "arm": arm.name,
        "k": arm.k,
        "temperature": arm.temperature,
        "threshold": arm.threshold,
        "questions": len(rows),
        "tokens": sum(len(done.tokens) for done in completions),
        "unfinished": sum(done.finish_reason == "length" for done in completions),
        "wall_s": round(wall_s, 3),
        "accuracy": sum(row.correct for row in rows) / len(rows),
        "invalid_rate": sum(row.invalid for row in rows) / len(rows),
    }
    drafts = [done.drafts for done in completions]
    if arm.k and sum(drafts):
        acceptance = Acceptance.of(
            drafts, [done.accepted_per_position for done in completions], sum(done.drafted for done in completions)
        )
        total |= {
            "drafts": acceptance.drafts,
            "drafted": acceptance.drafted,
            "accepted": acceptance.accepted,
            "mean_length": acceptance.mean_length,
        }
    return total


def synchronise(pair: Pair) -> None:
    """Wait for the device."""
    if on_cuda(pair):
        torch.cuda.synchronize()
