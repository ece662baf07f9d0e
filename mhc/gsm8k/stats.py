"""Acceptance metrics by name, and the statistics that compare two arms on the same questions.

Names: `drafts` verification rounds, `accepted_per_position[i]` rounds whose draft token i (and so all before it) was
accepted, `k` draft length. Tokens of one answer depend on each other: every interval resamples whole questions.

Source: the metrics of vLLM's `spec_decode` counters; Wilson 1927 and McNemar 1947 through statsmodels; the bootstrap
of scipy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

RESAMPLES = 9_999


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def covers(self, value: float) -> bool:
        """Whether `value` lies in the interval."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Acceptance:
    """Totals of drafting, and every rate that goes by the name of acceptance.

    Args:
        drafts: rounds in which a draft was verified.
        drafted: draft tokens verified (`k * drafts` unless drafts were truncated).
        accepted: draft tokens accepted.
        accepted_per_position: [k] rounds in which position i was accepted.

    Raises:
        ValueError: no drafts, more accepted than drafted, or an accepted token beyond a rejected one.
        AssertionError: the identity `mean length = 1 + sum of the per-position rates` fails: two counters disagree.
    """

    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]

    def __post_init__(self) -> None:
        survivors = (self.drafts, *self.accepted_per_position)
        if self.drafts < 1:
            raise ValueError(f"drafts must be at least 1, got {self.drafts}")
        if not self.accepted <= self.drafted <= self.drafts * self.k:
            raise ValueError(f"drafted must be {self.accepted} to {self.drafts * self.k}, got {self.drafted}")
        if any(later > earlier for earlier, later in pairwise(survivors)):
            raise ValueError(f"accepted_per_position must never increase, got {self.accepted_per_position}")
        assert self.accepted == sum(self.accepted_per_position), (
            f"mean acceptance length {self.mean_length} is not 1 + sum of per-position rates: "
            f"{self.accepted} accepted, {sum(self.accepted_per_position)} by position"
        )

    @property
    def k(self) -> int:
        """Draft length."""
        return len(self.accepted_per_position)

    @property
    def mean_length(self) -> float:
        """Mean acceptance length: `1 + accepted / drafts` tokens a round, the bonus token counted."""
        return 1 + self.accepted / self.drafts

    @property
    def rate_per_position(self) -> tuple[float, ...]:
        """Unconditional: accepted at position i / drafts; never increasing."""
        return tuple(count / self.drafts for count in self.accepted_per_position)

    @property
    def conditional_per_position(self) -> tuple[float, ...]:
        """Accepted at i given that all before it were: `rate[i] / rate[i - 1]`, nan where nothing got so far."""
        survivors = (self.drafts, *self.accepted_per_position)
        pairs = pairwise(survivors)
        return tuple(later / earlier if earlier else float("nan") for earlier, later in pairs)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @classmethod
    def of(cls, drafts: ArrayLike, accepted_per_position: ArrayLike, drafted: int | None = None) -> Acceptance:
        """From per-question counts `drafts` [N] and `accepted_per_position` [N, k]."""
        total = int(np.sum(drafts))
        per_position = np.asarray(accepted_per_position).sum(0)
        accepted = int(per_position.sum())
        drafted = total * len(per_position) if drafted is None else drafted
        return cls(total, drafted, accepted, tuple(int(count) for count in per_position))


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's 95 % interval of a proportion.

    Raises:
        ValueError: not `0 <= successes <= trials` with at least one trial.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"successes must be 0 to trials >= 1, got {successes} of {trials}")
    low, high = proportion_confint(successes, trials, alpha=0.05, method="wilson")
    return Interval(successes / trials, float(low), float(high))


class Discordance(NamedTuple):
    """What McNemar's exact test looks at: questions that one arm alone got right."""

    only_first: int
    only_second: int
    p_value: float


def mcnemar_exact(first: Sequence[bool], second: Sequence[bool]) -> Discordance:
    """Exact McNemar test of two arms' verdicts on the same questions.

    Raises:
        ValueError: the arms have different lengths or no questions.
    """
    a, b = _paired(first, second)
    a, b = a.astype(bool), b.astype(bool)
    table = [[int((a & b).sum()), int((a & ~b).sum())], [int((~a & b).sum()), int((~a & ~b).sum())]]
    return Discordance(table[0][1], table[1][0], float(mcnemar(table, exact=True).pvalue))


def ratio_interval(numerator: ArrayLike, denominator: ArrayLike, *, seed: int = 0) -> Interval:
    """Bootstrap over questions of `sum(numerator) / sum(denominator)`, e.g. a per-position acceptance rate.

    Args:
        numerator, denominator: [N], one value a question.
        seed: of the resampling.

    Raises:
        ValueError: the lengths differ or there are no questions.
    """
    return _bootstrap(_paired(numerator, denominator), lambda n, d, axis=-1: n.sum(axis) / d.sum(axis), seed)


def mean_length_interval(drafts: ArrayLike, accepted: ArrayLike, *, seed: int = 0) -> Interval:
    """Mean acceptance length `1 + sum(accepted) / sum(drafts)` with its bootstrap interval over questions [N]."""
    return Interval(*(1 + value for value in ratio_interval(accepted, drafts, seed=seed)))


def paired_length_difference(
    first: tuple[ArrayLike, ArrayLike], second: tuple[ArrayLike, ArrayLike], *, seed: int = 0
) -> Interval:
    """Mean acceptance length of the second arm minus the first's, questions resampled together.

    Args:
        first, second: (drafts [N], accepted [N]) of each arm, the same questions in the same order.

    Raises:
        ValueError: the lengths differ or there are no questions.
    """

    def difference(d1: NDArray, a1: NDArray, d2: NDArray, a2: NDArray, axis: int = -1) -> NDArray:
        return a2.sum(axis) / d2.sum(axis) - a1.sum(axis) / d1.sum(axis)

    return _bootstrap(_paired(*first, *second), difference, seed)


@dataclass(frozen=True)
class Reliability:
    """A calibration curve: per bin the mean confidence, the accepted share and the count; empty bins are left out."""

    confidence: NDArray
    accepted: NDArray
    count: NDArray

    @property
    def expected_error(self) -> float:
        """ECE: `sum count * |confidence - accepted| / sum count`."""
        return float(np.average(np.abs(self.confidence - self.accepted), weights=self.count))


def reliability(confidence: ArrayLike, accepted: ArrayLike, bins: int = 10) -> Reliability:
    """Calibration of predicted acceptance [N] in [0, 1] against outcomes [N], in equal-width bins.

    Raises:
        ValueError: the lengths differ or there are no predictions.
    """
    c, a = _paired(confidence, accepted)
    index = np.minimum((c * bins).astype(int), bins - 1)
    count = np.bincount(index, minlength=bins)
    full = count > 0
    mean_c, mean_a = (np.bincount(index, weights=values, minlength=bins)[full] / count[full] for values in (c, a))
    return Reliability(mean_c, mean_a, count[full])


def _paired(*columns: ArrayLike) -> list[NDArray]:
    arrays = [np.asarray(column, dtype=float) for column in columns]
    if any(array.ndim != 1 or array.shape != arrays[0].shape or not array.size for array in arrays):
        raise ValueError(f"paired values must be equally long [N >= 1], got {[list(a.shape) for a in arrays]}")
    return arrays


def _bootstrap(data: list[NDArray], statistic, seed: int) -> Interval:  # type: ignore[no-untyped-def]
    value = float(statistic(*data))
    if len(data[0]) == 1:
        raise ValueError("an interval needs at least 2 questions, got 1")
    result = stats.bootstrap(
        data,
        statistic,
        n_resamples=RESAMPLES,
        batch=1_000,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return Interval(value, float(result.confidence_interval.low), float(result.confidence_interval.high))
