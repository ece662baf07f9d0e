"""From records to what a figure shows: the newest record of a kind, curves with bands, speed-ups with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhc.bench import records
from mhc.bench.published import prior
from mhc.bench.stats import band, ratio
from mhc.bench.targets import own, samples

if TYPE_CHECKING:
    import pandas as pd


def latency_records(folder: str | Path) -> list[records.Record]:
    """Every latency record in `folder`, oldest first; an H20 owner's file dropped in is one of them."""
    return [records.load(path) for path in records.find(folder, "latency")]


def newest(
    found: list[records.Record], *, gpu: str | None = None, other_than: str | None = None, **where: Any
) -> records.Record | None:
    """The newest record with measured points whose columns equal `where`; None where there is none.

    Args:
        found: oldest first.
        gpu, other_than: a part of the GPU's name that must be there, or must not.
        where: column to value, such as `protocol="published"`.
    """
    for record in reversed(found):
        name = record.run["gpu"] or ""
        right_gpu = bool(name) and (gpu is None or gpu in name) and (other_than is None or other_than not in name)
        if right_gpu and len(record.points) and len(select(record.points, **where)):
            return record
    return None


def select(points: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The measured rows (status ok, floors of the main process) whose columns equal `where`."""
    rows = own(points)
    rows = rows[rows.status == "ok"]
    for column, value in where.items():
        if column not in rows:
            return rows.iloc[:0]
        rows = rows[rows[column] == value]
    return rows


def curves(points: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """One row an (op, impl, H, T): `time_us` (median) with `low_us` and `high_us` (5 and 95 %), over all rounds."""
    import pandas as pd

    rows = []
    for (op, impl, hidden, tokens), group in select(points, **where).groupby(["op", "impl", "H", "T"]):
        mid, low, high = band([s for measured in group.samples_us for s in measured])
        rows.append({"op": op, "impl": impl, "H": hidden, "T": tokens, "time_us": mid, "low_us": low, "high_us": high})
    return pd.DataFrame(rows, columns=["op", "impl", "H", "T", "time_us", "low_us", "high_us"])


def prior_curves() -> pd.DataFrame:
    """The earlier run as `curves`; it kept no samples, so its bands are empty."""
    table = prior()
    return table.assign(low_us=table.time_us, high_us=table.time_us)


def speedups(points: pd.DataFrame, impl: str, baseline: str, **where: Any) -> pd.DataFrame:
    """`baseline / impl` at every T that both have: `speedup`, `low`, `high` (95 % bootstrap), indexed by T."""
    import pandas as pd

    rows = {}
    chosen = select(points, **where)
    for tokens in sorted(chosen["T"].unique()):
        ours, theirs = (samples(chosen, impl=name, T=tokens) for name in (impl, baseline))
        if min(len(ours), len(theirs)) >= 2:
            rows[int(tokens)] = ratio(theirs, ours)._asdict()
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["value", "low", "high"])
    return frame.rename(columns={"value": "speedup"}).rename_axis("T")


def median_speedups(table: pd.DataFrame, impl: str, baseline: str) -> pd.DataFrame:
    """As `speedups`, from `curves` of a run that kept no samples: no intervals."""
    wide = table.pivot_table(index="T", columns="impl", values="time_us")
    if not {impl, baseline} <= set(wide.columns):
        return wide.iloc[:0, :0].reindex(columns=["speedup", "low", "high"])
    value = (wide[baseline] / wide[impl]).dropna()
    return value.to_frame("speedup").assign(low=value, high=value)
