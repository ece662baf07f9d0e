"""Options that take several values, separated by commas."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def ints(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
