"""One JSONL row a question, and reading them back.

A row: `record: "question", arm, id, k, temperature, drafts, accepted_per_position [k], tokens, prediction, gold,
correct, invalid, text_sha256`. `drafts` and `accepted_per_position` are null where the engine does not say them for a
single request (any server; plain decoding has k 0 and an empty list).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from mhc.gsm8k.data import Problem, sha256
from mhc.gsm8k.prompts import Number, Rule, extract, gold

Record = dict[str, Any]


@dataclass(frozen=True)
class QuestionRow:
    """What one question gave in one arm."""

    arm: str
    id: int
    k: int
    temperature: float
    drafts: int | None
    accepted_per_position: Sequence[int] | None
    tokens: int | None
    prediction: int | float | None
    gold: int | float
    correct: bool
    invalid: bool
    text_sha256: str

    def record(self) -> Record:
        """As a JSON object."""
        return {"record": "question", **asdict(self)}


def verdict(
    problem: Problem,
    text: str,
    rule: Rule,
    *,
    arm: str,
    k: int,
    temperature: float,
    tokens: int | None,
    drafts: int | None = None,
    accepted_per_position: Sequence[int] | None = None,
) -> QuestionRow:
    """Judge a text (already cut at the stop strings) by `rule`, see `prompts.extract`."""
    prediction, right = extract(text, rule), gold(problem, rule)
    return QuestionRow(
        arm=arm,
        id=problem.id,
        k=k,
        temperature=temperature,
        drafts=drafts,
        accepted_per_position=accepted_per_position,
        tokens=tokens,
        prediction=None if prediction is None else _plain(prediction),
        gold=_plain(right),
        correct=prediction == right,
        invalid=prediction is None,
        text_sha256=sha256(text.encode()),
    )


def _plain(number: Number) -> int | float:
    if isinstance(number, int):
        return number
    return int(number) if number == number.to_integral_value() else float(Decimal(number))


def dumps(record: Record) -> str:
    """One compact JSON line, without its newline."""
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False)


def read(path: str | Path) -> list[Record]:
    """All records of a JSONL file.

    Raises:
        ValueError: a line is not a JSON object; the message names file and line.
    """
    return [_loads(line, path, number) for number, line in enumerate(Path(path).read_bytes().splitlines(), 1)]


def questions(records: Iterable[Record], **where: object) -> list[Record]:
    """The question rows whose fields equal `where`, ordered by id.

    Raises:
        ValueError: no row matches, or a question appears twice.
    """
    rows = [r for r in records if r["record"] == "question" and all(r[key] == value for key, value in where.items())]
    rows.sort(key=lambda row: row["id"])
    ids = [row["id"] for row in rows]
    if not rows or len(set(ids)) != len(ids):
        raise ValueError(f"{where} must select each question once, got {len(ids)} rows of {len(set(ids))} questions")
    return rows


def _loads(line: bytes, path: str | Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(record, dict) or "record" not in record:
        raise ValueError(f"{path}, line {number}: must be an object with a field `record`, got {line[:60]!r}")
    return record
