"""Faults put into the package before a notebook runs: each must make it fail.

A mutation is code that runs in the notebook's kernel before its first cell, in the same process, on the same modules.
It patches *every* name that a notebook may use (`mhc.fold` and `mhc.weights.fold` are two names of one function).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`source` breaks the package for the notebook whose name starts with `notebook` ("01")."""

    notebook: str
    name: str
    source: str


WRONG_FOLD = """
import mhc, mhc.reference, mhc.weights

def wrong(fn, hc_mult):  # drops the last stream
    rows, width = fn.shape
    return fn.view(rows, hc_mult, width // hc_mult)[:, :-1].sum(1)

mhc.fold = mhc.weights.fold = mhc.reference.fold = wrong
"""

WRONG_FLOOR = """
from mhc.bench import work

right = work.floor_bytes
work.floor_bytes = lambda *arguments: tuple(2 * count for count in right(*arguments))
"""

MUTATIONS: list[Mutation] = [
    Mutation("01", "fold-drops-a-stream", WRONG_FOLD),
    Mutation("03", "floor-counts-bytes-twice", WRONG_FLOOR),
]
