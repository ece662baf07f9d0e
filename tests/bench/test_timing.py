"""The timers: their orders and counts, and what a graph keeps and frees."""

import weakref
from unittest import mock

import pytest
import torch

from mhc.bench import timing


def test_interleave_is_a_permutation_a_round_and_reproducible():
    first = list(timing.interleave("abcd", 3, seed=5))
    assert first == list(timing.interleave("abcd", 3, seed=5))
    for round_ in range(3):
        assert sorted(key for r, _, key in first if r == round_) == list("abcd")


def test_cold_sets_exceed_three_l2s():
    assert timing.cold_sets(50_000, 60 << 20) * 50_000 > 3 * (60 << 20)
    assert timing.cold_sets(1 << 30, 60 << 20) == 2
    with pytest.raises(ValueError, match="bytes_a_call"):
        timing.cold_sets(10, 60 << 20)


def test_calls_per_graph_are_bounded():
    assert timing.calls_for(1.0) == timing.MAX_CALLS
    assert timing.calls_for(20.0) == 20
    assert timing.calls_for(1e6) == timing.MIN_CALLS


@pytest.mark.parametrize("calls", [1, 3])
def test_calls_that_rotate_write_different_memory_and_one_call_writes_the_same(calls):
    written = weakref.WeakSet()
    most_before = 0

    def call():
        nonlocal most_before
        most_before = max(most_before, len(written))
        out = torch.empty(1)
        written.add(out)
        return out

    with mock.patch.object(timing, "torch") as fake:  # the graph is none; its calls are still made
        fake.cuda.Event.return_value.elapsed_time.return_value = 1.0
        timer = timing.GraphTimer([call] * calls)
    assert timer.calls_per_sample >= calls
    assert most_before == calls - 1
    assert len(written) == (calls if calls > 1 else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_keeps_what_its_calls_read():
    x = torch.ones(8, device="cuda")
    kept = weakref.ref(x)
    timer = timing.GraphTimer([lambda x=x: x.sum()])
    del x
    assert kept() is not None
    assert min(timer.sample(1)) > 0
