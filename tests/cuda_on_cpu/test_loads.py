"""Loads that arrive at an mbarrier when they land, on the emulator: they run, and what breaks them is caught."""

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
def relay() -> Lowered:
    return lower(sample_clusters.relay(), NO_AUTO_SYNC)


@pytest.mark.parametrize("seed", range(4))
def test_a_warp_loads_for_another(relay: Lowered, seed: int) -> None:
    x, y = random(7, 128), poisoned(7, 128, dtype=torch.float32)
    Emulated(relay)(seed, x=x, y=y)
    assert torch.equal(y, x)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (replaced(r"loaded\[.*\]\.wait\(.*\);", ""), "poison|wrong|wait at mbarrier"),
        (replaced(r"used\[.*\]\.wait\(.*\);", ""), "poison|wrong|more arrivals"),
        (replaced(r"tl::mbarrier_cp_async_arrive_noinc\(.*\);", ""), "wait at mbarrier"),
        (replaced(r"(loaded\[[^;]*)\.init\(32\)", r"\1.init(33)"), "wait at mbarrier"),
    ],
    ids=["wait", "reuse", "arrival", "too many"],
)
def test_a_broken_relay_is_noticed(relay: Lowered, edit: Callable[[str], str], says: str) -> None:
    x = random(7, 128)
    assert re.search(says, outcome(Emulated(relay, edit), {"y": x}, x=x))
