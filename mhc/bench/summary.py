"""A latency record as text: medians with the floor, then every target with met or not met, then what did not run."""

from __future__ import annotations

import pandas as pd

from mhc.bench.records import Record
from mhc.bench.targets import medians, never_slower, own, verdicts


def text(record: Record) -> str:
    """The tables that `python -m mhc bench latency` ends with."""
    points, main = record.points, own(record.points)
    parts = [record.caption, _limits(record)]
    published = main.get("protocol", pd.Series("rounds", index=main.index)) == "published"
    keys = ["H", "op", "timer", "l2"]
    for frame, note in ((main[~published], ""), (main[published], ", published protocol")):
        for (hidden, op, timer, l2), rows in frame[frame.status == "ok"].groupby(keys, sort=False):
            table = medians(rows)
            parts.append(
                f"\n{op}, H={hidden}, {timer}, {l2} L2{note}, median us per call\n{table.round(2).to_string()}"
            )
    if "process" in points and (points.process == "peers").any():
        parts.append(_process_check(points))
    parts.append("\ntargets (H200, H 4096)")
    for v in verdicts(points):
        where = f" T={v.T}" if v.T else ""
        state = "not measured" if v.ratio is None else f"{v.ratio.value:.2f} {'met' if v.met else 'NOT MET'}"
        parts.append(f"  {v.target}{where}: bound {v.bound:g}, {state}")
    slower = never_slower(points)
    parts.append(f"  mhc_fused slower than vllm_broadcast at: {slower or 'no point'}")
    for (impl, op, status, reason), rows in points[points.status != "ok"].groupby(["impl", "op", "status", "reason"]):
        parts.append(f"  {status}: {impl} {op}, {len(rows)} points: {reason}")
    return "\n".join(parts)


def _limits(record: Record) -> str:
    run = record.run
    bandwidth, launch = run["copy_bandwidth_gbs"], run["empty_launch_us"]
    return "limits not measured" if not bandwidth else f"copy {bandwidth:.0f} GB/s, empty launch {launch:.2f} us"


def _process_check(points: pd.DataFrame) -> str:
    """How far the same floor differs between the two processes: what the second process itself changes."""
    floors = points[points.impl.str.startswith("floor") & (points.status == "ok") & (points.timer == "cuda_graph")]
    frame = floors.explode("samples_us").astype({"samples_us": float})
    both = frame.pivot_table(
        index=["op", "H", "T", "l2", "impl"], columns="process", values="samples_us", aggfunc="median"
    )
    if not {"main", "peers"} <= set(both.columns):
        return "\nthe floors ran in one process only"
    off = (both["peers"] / both["main"] - 1).dropna()
    return f"\nsame floor, peers' process against main: median {off.median():+.1%}, worst {off.abs().max():.1%}"
