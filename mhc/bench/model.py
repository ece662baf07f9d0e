"""A latency model: what an op does, times what each thing costs on a GPU. Fitted on one GPU, it predicts another.

    time = launches * a + barriers * b + sinkhorns * c                     what one row waits for
         + (projection + Sinkhorn work a multiprocessor) * (d, e)          what all rows add up to
         + bytes from L2 a multiprocessor * f + bytes from memory / bandwidth * g

Every coefficient is non-negative, fitted by least squares on relative errors, one set for each family of
implementations (they share a GPU, not a programmer); bytes cost at least what they cost the floor's copy. The counts
come from `mhc.bench.work`. To predict another GPU the coefficients stay, the counts a multiprocessor and the bandwidth
change: clocks are taken as equal. It is a model: its error on points that it was not fitted on is part of its answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mhc.bench.work import Work, work

if TYPE_CHECKING:
    import pandas as pd

TERMS = ("launch", "barrier", "Sinkhorn, one row", "projection", "Sinkhorn, all rows", "L2", "memory")
FAMILIES = ("floor", "mhc", "vllm")
# share of L2 beyond which a call's bytes no longer stay there, and beyond which none do
L2_STAYS, L2_GONE = 0.4, 0.8
HC, ITERS = 4, 20
_SINKHORN_FLOPS = 4 * HC * HC


@dataclass(frozen=True)
class Gpu:
    """What the model knows of a GPU: multiprocessors, the bandwidth of a large copy in GB/s, and L2 in MiB."""

    name: str
    sm_count: int
    bandwidth_gbs: float
    l2_mib: float


@dataclass(frozen=True)
class Model:
    """Fitted coefficients: family to one value a term of `TERMS`, and the GPU that they were fitted on."""

    gpu: Gpu
    coefficients: dict[str, np.ndarray]

    def terms(self, op: str, impl: str, tokens: int, hidden: int, gpu: Gpu | None = None) -> dict[str, float]:
        """Predicted us per call by term.

        Raises:
            ValueError: the family of `impl` was not fitted, or the op does not have it.
        """
        name = family(impl)
        if name not in self.coefficients:
            raise ValueError(f"impl must be of a fitted family ({', '.join(self.coefficients)}), got {impl!r}")
        counts = features(work(op, impl, tokens, hidden), tokens, gpu or self.gpu)
        return dict(zip(TERMS, (counts * self.coefficients[name]).tolist(), strict=True))

    def predict(self, op: str, impl: str, tokens: int, hidden: int, gpu: Gpu | None = None) -> float:
        """Predicted us per call."""
        return sum(self.terms(op, impl, tokens, hidden, gpu).values())


def family(impl: str) -> str:
    """The part of the name before the first underscore."""
    return impl.partition("_")[0]


def features(counted: Work, tokens: int, gpu: Gpu) -> np.ndarray:
    """The counts that the coefficients multiply, in the order of `TERMS`."""
    share = counted.bytes / (gpu.l2_mib * 2**20)
    missed = float(np.clip((share - L2_STAYS) / (L2_GONE - L2_STAYS), 0, 1))
    return np.array(
        [
            counted.launches,
            counted.barriers,
            counted.sinkhorns,
            counted.projected * HC * (HC + 2) / gpu.sm_count / 1e6,
            counted.sinkhorns * tokens * _SINKHORN_FLOPS / gpu.sm_count / 1e3,
            (1 - missed) * counted.bytes / gpu.sm_count / 1e6,
            missed * counted.bytes / (gpu.bandwidth_gbs * 1e3),
        ]
    )


def fit(points: pd.DataFrame, gpu: Gpu) -> Model:
    """Fit every family that has at least as many points as terms that occur in it.

    Args:
        points: columns op, impl, T, H, time_us: medians under graph replay with warm L2.
        gpu: what they were measured on.

    Raises:
        ValueError: no family has enough points.
    """
    from scipy.optimize import nnls

    coefficients: dict[str, np.ndarray] = {}
    bytes_terms = np.zeros(len(TERMS))
    for name in FAMILIES:  # the floor first: nobody moves bytes for less than a copy does
        rows = points[points.impl.map(family) == name]
        counts = np.array([features(work(p.op, p.impl, p.T, p.H), p.T, gpu) for p in rows.itertuples()])
        times = rows.time_us.to_numpy(float)
        if not len(rows) or len(rows) < np.count_nonzero(counts.any(axis=0)):
            continue
        extra, _ = nnls(counts / times[:, None], 1 - counts @ bytes_terms / times)
        coefficients[name] = bytes_terms + extra
        if name == "floor":
            bytes_terms[-2:] = extra[-2:]
    if not coefficients:
        raise ValueError(f"points must hold more rows of a family than it has terms, got {len(points)} rows")
    return Model(gpu, coefficients)


def holdout(points: pd.DataFrame, gpu: Gpu, every: int = 3) -> pd.DataFrame:
    """Predict each `every`-th T of every (op, impl, H) with a model fitted on the others.

    Returns:
        The held-out rows with `predicted_us` and `relative_error` (predicted / measured - 1).
    """
    ordered = points.sort_values(["op", "impl", "H", "T"])
    held = ordered.groupby(["op", "impl", "H"]).cumcount() % every == 1
    model = fit(ordered[~held], gpu)
    test = ordered[held & ordered.impl.map(family).isin(list(model.coefficients))].copy()
    test["predicted_us"] = [model.predict(p.op, p.impl, p.T, p.H) for p in test.itertuples()]
    test["relative_error"] = test.predicted_us / test.time_us - 1
    return test


def predict_all(
    model: Model, impls: Iterable[str], tokens: Iterable[int], gpu: Gpu, hidden: int = 4096
) -> pd.DataFrame:
    """Predicted first-pre times on `gpu`: T as rows, impl as columns, us."""
    import pandas as pd

    tokens, impls = list(tokens), [impl for impl in impls if family(impl) in model.coefficients]
    table = {impl: [model.predict("first_pre", impl, t, hidden, gpu) for t in tokens] for impl in impls}
    return pd.DataFrame(table, index=pd.Index(tokens, name="T"))
