"""What the kernels set out to reach on an H200 (H 4096, graph replay, warm L2, medians of a run), and what they did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mhc.bench.stats import Ratio, ratio

if TYPE_CHECKING:
    import pandas as pd

HIDDEN = 4096
_T16 = dict.fromkeys((1, 2, 4, 8, 16))


def _by_tokens(small: float, t64: float, t256: float, t1024: float, t4096: float) -> dict[int, float]:
    return dict.fromkeys(_T16, small) | {64: t64, 256: t256, 1024: t1024, 4096: t4096}


@dataclass(frozen=True)
class Target:
    """`baseline / impl >= bound` (a speed-up), or `impl / baseline <= bound` (a distance from a floor)."""

    op: str
    impl: str
    baseline: str
    bounds: dict[int, float]
    at_most: bool = False

    @property
    def label(self) -> str:
        return f"{self.impl} {'over' if self.at_most else 'against'} {self.baseline}, {self.op}"


TARGETS = (
    Target("first_pre", "mhc_fused", "vllm_broadcast", _by_tokens(1.6, 1.6, 1.6, 1.25, 1.2)),
    Target("first_pre", "mhc_table", "vllm_broadcast", _by_tokens(4, 3.3, 2.5, 1.5, 1.35)),
    Target("first_pre", "mhc_table", "floor_copy", _by_tokens(1.4, 1.4, 1.3, 1.1, 1.08), at_most=True),
    Target("first_pre_then_post_pre", "mhc_collapsed", "vllm_repeat", _by_tokens(2.2, 2.2, 2.5, 2.6, 2.6)),
    Target("post_pre", "mhc_post_pre", "vllm_post_pre", _by_tokens(1.4, 1.8, 1.8, 1.5, 1.5)),
)
HOST_COST_US = 12.0
PUBLISHED_SPEEDUP = 6.0  # against vllm_repeat, eager by the published protocol, T 1 to 256


def own(points: pd.DataFrame) -> pd.DataFrame:
    """The points without the floors of the peers' process, which are there to compare the processes."""
    if "process" not in points:
        return points
    return points[(points.process == "main") | ~points.impl.str.startswith("floor")]


def samples(points: pd.DataFrame, **where: object) -> np.ndarray:
    """All samples, over rounds, of the rows whose columns equal `where`; empty where there are none."""
    rows = points[points.status == "ok"]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return np.concatenate([np.asarray(s, float) for s in rows.samples_us]) if len(rows) else np.empty(0)


def medians(points: pd.DataFrame, **where: object) -> pd.DataFrame:
    """Median us per call with T as rows and impl as columns, of the rows whose columns equal `where`."""
    rows = points[points.status == "ok"]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows.explode("samples_us").astype({"samples_us": float}).pivot_table(
        index="T", columns="impl", values="samples_us", aggfunc="median"
    )  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """A target at one T: the measured ratio (None: not measured) and whether it is met."""

    target: str
    T: int
    bound: float
    ratio: Ratio | None
    met: bool | None


def verdicts(points: pd.DataFrame) -> list[Verdict]:
    """Every target at every T that it names, from a latency record's points."""
    found = []
    points = own(points)
    graph = points[(points.timer == "cuda_graph") & (points.l2 == "warm") & (points.H == HIDDEN)]
    for target in TARGETS:
        for tokens, bound in target.bounds.items():
            ours = samples(graph, op=target.op, impl=target.impl, T=tokens)
            theirs = samples(graph, op=target.op, impl=target.baseline, T=tokens)
            if min(len(ours), len(theirs)) < 2:
                found.append(Verdict(target.label, tokens, bound, None, None))
                continue
            value = ratio(ours, theirs) if target.at_most else ratio(theirs, ours)
            met = value.value <= bound if target.at_most else value.value >= bound
            found.append(Verdict(target.label, tokens, bound, value, met))
    host = points[(points.timer == "cpu_call") & (points.H == HIDDEN) & points.impl.str.startswith("mhc_")]
    for impl in sorted(host[host.status == "ok"].impl.unique()):
        for op in sorted(host[host.impl == impl].op.unique()):
            if op == "first_pre_then_post_pre":
                continue  # two calls
            cost = float(np.median(samples(host, op=op, impl=impl)))
            label = f"{impl}, {op}: host cost a call in us"
            found.append(Verdict(label, 0, HOST_COST_US, Ratio(cost, cost, cost), cost <= HOST_COST_US))
    published = points[(points.get("protocol") == "published")] if "protocol" in points else points.iloc[:0]
    for impl in ("mhc_fused", "mhc_table", "mhc_collapsed"):
        for tokens in sorted(published["T"].unique()):
            ours = samples(published, op="first_pre", impl=impl, T=tokens)
            theirs = samples(published, op="first_pre", impl="vllm_repeat", T=tokens)
            if min(len(ours), len(theirs)) >= 2:
                value = ratio(theirs, ours)
                label = f"{impl} against vllm_repeat, eager by the published protocol"
                found.append(Verdict(label, int(tokens), PUBLISHED_SPEEDUP, value, value.value >= PUBLISHED_SPEEDUP))
    return found


def never_slower(points: pd.DataFrame) -> dict[tuple[str, int, int], float]:
    """(l2, H, T) where `mhc_fused` is slower than `vllm_broadcast`, with its slow-down; empty is the aim."""
    slower: dict[tuple[str, int, int], float] = {}
    graph = points[(points.timer == "cuda_graph") & (points.op == "first_pre")]
    for (l2, hidden), rows in graph.groupby(["l2", "H"]):
        table = medians(rows)
        if {"mhc_fused", "vllm_broadcast"} <= set(table.columns):
            pair = (table["mhc_fused"] / table["vllm_broadcast"]).dropna()
            slower |= {(str(l2), int(hidden), int(t)): float(value) for t, value in pair.items() if value > 1}
    return slower
