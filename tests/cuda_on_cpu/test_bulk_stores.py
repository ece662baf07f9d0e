"""Bulk copies from shared to global memory on the emulator: they run, and what breaks them is caught."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from . import sample_clusters
from .lowering import Lowered, lower
from .runner import Emulated, poisoned
from .test_emulator import NO_AUTO_SYNC, outcome, random, replaced


@pytest.fixture(scope="module")
def repeat() -> Lowered:
    return lower(sample_clusters.bulk_repeat(), NO_AUTO_SYNC)


@pytest.mark.parametrize("seed", range(4))
def test_bulk_stores(repeat: Lowered, seed: int) -> None:
    x, y = random(5, 128), poisoned(5, 3, 128, dtype=torch.float32)
    Emulated(repeat)(seed, x=x, y=y)
    assert torch.equal(y, x.unsqueeze(1).expand(5, 3, 128))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (replaced(r"tl::tma_store_wait<1[^;]*;", ""), "wrong"),
        (replaced(r"tl::tma_store_wait<0[^;]*;", ""), "exited before its bulk stores had read"),
        (replaced(r"(tl::tma_store\(.*)512", r"\g<1>528"), "should point into shared memory"),
        (replaced(r"\(&\(y\[", "(&(y[1 + "), "units of 16 bytes"),
    ],
    ids=["reuse", "exit", "size", "alignment"],
)
def test_a_broken_bulk_store_is_noticed(repeat: Lowered, edit: Callable[[str], str], says: str) -> None:
    x = random(5, 128)
    want = {"y": x.unsqueeze(1).expand(5, 3, 128)}
    assert re.search(says, outcome(Emulated(repeat, edit), want, x=x))
