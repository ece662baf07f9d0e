"""Acceptance metrics and statistics against hand calculations and simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mhc.gsm8k import stats


def test_metrics_by_hand() -> None:
    a = stats.Acceptance.of(drafts=[4, 6], accepted_per_position=[[4, 2, 1], [5, 3, 0]])
    assert (a.drafts, a.drafted, a.accepted, a.accepted_per_position) == (10, 30, 15, (9, 5, 1))
    assert a.mean_length == 2.5  # the bonus token counts
    assert a.rate_per_position == (0.9, 0.5, 0.1)
    assert a.mean_length == pytest.approx(1 + sum(a.rate_per_position))
    assert a.conditional_per_position == pytest.approx((0.9, 5 / 9, 0.2))
    assert a.draft_acceptance_rate == 0.5
    truncated = stats.Acceptance.of([4, 6], [[4, 2, 1], [5, 3, 0]], drafted=20)
    assert truncated.draft_acceptance_rate == 0.75


def test_nothing_accepted() -> None:
    a = stats.Acceptance.of([3], [[0, 0]])
    assert a.mean_length == 1
    assert a.conditional_per_position[0] == 0
    assert math.isnan(a.conditional_per_position[1])


def test_counters_that_disagree_fail_the_identity() -> None:
    with pytest.raises(AssertionError, match="is not 1 \\+ sum of per-position rates"):
        stats.Acceptance(drafts=10, drafted=30, accepted=14, accepted_per_position=(9, 5, 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 0, 0, (0,)), "drafts must be at least 1, got 0"),
        ((2, 1, 2, (2, 0)), "drafted must be 2 to 4, got 1"),
        ((2, 4, 3, (1, 2)), "must never increase, got \\(1, 2\\)"),
        ((2, 4, 3, (3, 0)), "must never increase"),
    ],
)
def test_impossible_counts(fields: tuple[int, int, int, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.Acceptance(*fields)


def test_wilson_by_formula() -> None:
    n, p, z = 1319, 1253 / 1319, 1.959963984540054
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    interval = stats.wilson(1253, n)
    assert (interval.value, interval.low, interval.high) == pytest.approx((p, centre - half, centre + half))
    assert interval.covers(p)
    assert not interval.covers(0.9)
    with pytest.raises(ValueError, match="got 3 of 2"):
        stats.wilson(3, 2)


def test_mcnemar_by_binomial() -> None:
    first = [True] * 8 + [False] * 2 + [True] * 5 + [False] * 5
    second = [False] * 8 + [True] * 2 + [True] * 5 + [False] * 5
    test = stats.mcnemar_exact(first, second)
    assert (test.only_first, test.only_second) == (8, 2)
    assert test.p_value == pytest.approx(2 * sum(math.comb(10, i) for i in range(3)) / 2**10)
    assert stats.mcnemar_exact(first, first).p_value == 1
    with pytest.raises(ValueError, match="equally long"):
        stats.mcnemar_exact([True], [True, False])


def simulate(rng: np.random.Generator, rate: float, questions: int = 200) -> tuple[np.ndarray, np.ndarray]:
    drafts = rng.integers(5, 40, questions)
    return drafts, rng.binomial(drafts * 7, rate)


def test_length_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(40):
        drafts, accepted = simulate(rng, 0.4)
        hits += stats.mean_length_interval(drafts, accepted, seed=trial).covers(1 + 7 * 0.4)
    assert hits >= 33  # 38 expected; fewer than 33 has probability under 1 %


def test_questions_are_resampled_whole() -> None:
    # the tokens of a question share its fate: intervals from tokens taken one by one would be far too narrow
    drafts = np.full(50, 20)
    accepted = np.repeat([0, 140], 25)
    interval = stats.mean_length_interval(drafts, accepted)
    assert interval.high - interval.low > 1.5


def test_paired_difference() -> None:
    rng = np.random.default_rng(1)
    base = simulate(rng, 0.4)
    assert stats.paired_length_difference(base, base) == (0, 0, 0)
    better = (base[0], np.minimum(base[1] + 1, base[0] * 7))
    interval = stats.paired_length_difference(base, better)
    assert interval.low > 0
    # pairing is the point: unpaired intervals of the same arms overlap
    assert stats.mean_length_interval(*base).high > stats.mean_length_interval(*better).low


def test_reliability() -> None:
    curve = stats.reliability([0.05, 0.15, 0.15, 1.0], [0, 1, 0, 1])
    assert curve.count.tolist() == [1, 2, 1]
    assert curve.confidence == pytest.approx([0.05, 0.15, 1.0])
    assert curve.accepted == pytest.approx([0, 0.5, 1])
    assert curve.expected_error == pytest.approx((0.05 + 2 * 0.35) / 4)
