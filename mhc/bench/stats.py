"""What is said of samples: a median with its 5-95 % band, and a speed-up with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Band(NamedTuple):
    """Median with the 5 % and 95 % quantiles."""

    median: float
    low: float
    high: float


class Ratio(NamedTuple):
    """A ratio of medians with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def band(samples: Sequence[float] | np.ndarray) -> Band:
    """Median and 5-95 % band.

    Raises:
        ValueError: there are no samples.
    """
    if not len(samples):
        raise ValueError("samples must not be empty")
    low, mid, high = np.quantile(samples, [0.05, 0.5, 0.95])
    return Band(float(mid), float(low), float(high))


def ratio(
    slower: Sequence[float] | np.ndarray, faster: Sequence[float] | np.ndarray, seed: int = 0, resamples: int = 2000
) -> Ratio:
    """`median(slower) / median(faster)`: the speed-up, never a mean of ratios.

    The interval is a percentile bootstrap over the samples; it says how well this run fixes the ratio, not what
    another machine would give.

    Raises:
        ValueError: fewer than two samples on a side.
    """
    from scipy.stats import bootstrap

    if min(len(slower), len(faster)) < 2:
        raise ValueError(f"each side must have at least 2 samples, got {len(slower)} and {len(faster)}")

    def statistic(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    result = bootstrap(
        (np.asarray(slower, float), np.asarray(faster, float)),
        statistic,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    value = float(np.median(slower) / np.median(faster))
    return Ratio(value, float(result.confidence_interval.low), float(result.confidence_interval.high))
