"""From a recorded split (`python -m mhc draft-split`) to what the first pre is of a whole draft forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from mhc.bench.records import Record, find, load
from mhc.bench.stats import Ratio, ratio
from mhc.dspark.split_command import FIELDS

PARTS = ("first_pre", "attention", "ffn", "post_pre", "head", "logits")


def newest(folder: str | Path, preset: str = "v4_flash") -> Record:
    """The newest split of a preset in `folder`.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [record for path in find(folder, "draft-split") if (record := load(path, FIELDS)).run["preset"] == preset]
    if not found:
        raise FileNotFoundError(
            f"No split of the {preset} draft has been recorded in {folder}/ yet: `python -m mhc draft-split` makes one"
        )
    return found[-1]


def by_arm(record: Record) -> pd.DataFrame:
    """Medians in microseconds of forward and first pre, and what each arm saves of repeat's forward, in per cent.

    Indexed by requests and arm, the baseline first; the interval of the saving is a 95 % bootstrap over the samples.
    """
    samples = _samples(record)
    table = []
    for requests, arm in sorted({key[:2] for key in samples}, key=lambda key: (key[0], key[1] != "repeat", key[1])):
        forward, baseline = samples[requests, arm, "forward"], samples[requests, "repeat", "forward"]
        kept = Ratio(1.0, 1.0, 1.0) if arm == "repeat" else ratio(forward, baseline)
        first = pd.Series(samples[requests, arm, "first_pre"]).median()
        row: dict[str, Any] = {"requests": requests, "arm": arm, "forward_us": pd.Series(forward).median()}
        row |= {"first_pre_us": first, "first pre, % of forward": 100 * first / row["forward_us"]}
        row |= {"saved, %": 100 * (1 - kept.value), "low": 100 * (1 - kept.high), "high": 100 * (1 - kept.low)}
        table.append(row)
    return pd.DataFrame(table).set_index(["requests", "arm"])


def by_part(record: Record, arm: str = "broadcast") -> pd.DataFrame:
    """Medians in microseconds of each part that makes up the forward, a row a batch size."""
    samples = _samples(record)
    counts = sorted({requests for requests, *_ in samples})
    rows = [[pd.Series(samples[requests, arm, part]).median() for part in PARTS] for requests in counts]
    return pd.DataFrame(rows, index=pd.Index(counts, name="requests"), columns=list(PARTS))


def apart(record: Record) -> pd.DataFrame:
    """How far each arm's outputs are from repeat's, see `mhc.dspark.parts.arms_difference`.

    Raises:
        ValueError: the record was interrupted before its arms were compared.
    """
    if record.end is None:
        raise ValueError(f"{record.path} was interrupted: it does not say how far the arms are apart")
    return pd.DataFrame(record.end["difference_to_repeat"]).T.rename_axis("arm")


def _samples(record: Record) -> dict[tuple[int, str, str], list[float]]:
    merged: dict[tuple[int, str, str], list[float]] = {}
    for point in record.points.itertuples():
        merged.setdefault((point.requests, point.expansion, point.part), []).extend(point.samples_us)
    return merged
