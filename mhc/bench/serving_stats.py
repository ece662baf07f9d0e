"""What a serving record says: time saved a step, throughput in pairs, equal tokens, and where the step's time is.

Modes are compared in pairs: the same round of two modes. Intervals are 95 % percentile bootstraps of the mean
difference over rounds; they say how well this run fixes the difference, not what another machine would give.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mhc.bench import records
from mhc.bench.records import Record
from mhc.bench.serving_model import REAL_TARGET_LAYERS, TARGET_LAYERS

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "unpatched"
# of a whole draft step, plugin with our kernels against unpatched, us by draft tokens (H200, this model)
REPLAY_TARGET_US = {7: 10.0, 112: 12.0, 448: 27.0}
# of an engine step at 112 draft tokens, with our post + pre everywhere
STEP_TARGET_TOKENS, STEP_TARGET_SHARE = 112, 0.005
RESAMPLES = 4000


def serving_records(folder: str | Path) -> list[Record]:
    """Every serving record in `folder`, oldest first."""
    return [records.load(path) for path in records.find(folder, "serving")]


def newest(found: list[Record], *, tp: int, op: str, **where: Any) -> Record | None:
    """The newest record of `tp` GPUs with measured points of `op` whose columns equal `where`, or None."""
    return next((r for r in reversed(found) if len(rows(r.points, op=op, tp=tp, **where))), None)


def rows(points: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The measured rows whose columns equal `where`."""
    chosen = points[points.status == "ok"] if len(points) else points
    for column, value in where.items():
        if column not in chosen:
            return chosen.iloc[:0]
        chosen = chosen[chosen[column] == value]
    return chosen


def mean_interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean and its 95 % bootstrap interval.

    Raises:
        ValueError: fewer than two values.
    """
    if len(differences) < 2:
        raise ValueError(f"differences must be at least 2, got {len(differences)}")
    generator = np.random.default_rng(seed)
    drawn = generator.choice(differences, (RESAMPLES, len(differences))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(differences.mean()), float(low), float(high)


def saved(points: pd.DataFrame, op: str = "draft_step_replay", **where: Any) -> pd.DataFrame:
    """us that a mode saves of a replayed step against unpatched: one row a (T, impl).

    Returns:
        Columns T, impl, step_us (median, unpatched), saved_us, low_us, high_us, share (of the unpatched step), n.
    """
    import pandas as pd

    found = []
    chosen = rows(points, op=op, **where)
    for tokens, group in chosen.groupby("T") if len(chosen) else ():
        samples = {row.impl: np.asarray(row.samples_us, float) for row in group.itertuples()}
        if BASELINE not in samples:
            continue
        base = samples[BASELINE]
        for impl, ours in samples.items():
            if impl != BASELINE:
                mean, low, high = mean_interval(base - ours)
                step = float(np.median(base))
                found.append((int(tokens), impl, step, mean, low, high, mean / step, len(ours)))
    columns = ["T", "impl", "step_us", "saved_us", "low_us", "high_us", "share", "n"]
    return pd.DataFrame(found, columns=columns).sort_values(["T", "impl"], ignore_index=True)


def throughput(points: pd.DataFrame, mode: str, **where: Any) -> pd.DataFrame:
    """Output tokens a second of every mode, and its gain in pairs with the same round of unpatched.

    Returns:
        Index impl; columns tok_s, tok_s_low, tok_s_high (median, 5-95 %), latency_s (median), gain, low, high (mean of
        the pairs, relative, with its interval; NaN for unpatched), n, accepted (draft tokens a step and request).
    """
    import pandas as pd

    chosen = rows(points, op="serving", mode=mode, **where)
    by_impl = {impl: group.set_index("round") for impl, group in chosen.groupby("impl")} if len(chosen) else {}
    found = {}
    for impl, group in by_impl.items():
        tok_s = group.tok_s.str[0].astype(float)
        low, mid, high = np.quantile(tok_s, [0.05, 0.5, 0.95])
        drafts = sum(a.get("num_drafts", 0) for a in group.accepted)
        accepted = sum(a.get("num_accepted_tokens", 0) for a in group.accepted) / drafts if drafts else float("nan")
        gain = (float("nan"),) * 3
        if impl != BASELINE and BASELINE in by_impl:
            pairs = (tok_s / by_impl[BASELINE].tok_s.str[0].astype(float) - 1).dropna().to_numpy()
            gain = mean_interval(pairs) if len(pairs) > 1 else gain
        found[impl] = (mid, low, high, group.latency_s.str[0].median(), *gain, len(group), accepted)
    columns = ["tok_s", "tok_s_low", "tok_s_high", "latency_s", "gain", "low", "high", "n", "accepted"]
    return pd.DataFrame.from_dict(found, orient="index", columns=columns).rename_axis("impl")


def equal_tokens(points: pd.DataFrame) -> pd.DataFrame:
    """Of the served batches, how many gave the tokens of the first unpatched one of their kind: index mode and impl."""
    import pandas as pd

    found = {}
    chosen = rows(points, op="serving")
    for (mode, batch, tp), group in chosen.groupby(["mode", "batch", "tp"]) if len(chosen) else ():
        base = group[group.impl == BASELINE].sort_values("round")
        if not len(base):
            continue
        for impl, of_impl in group.groupby("impl"):
            same = int((of_impl.token_sha256 == base.token_sha256.iloc[0]).sum())
            found[mode, impl, int(batch), int(tp)] = (same, len(of_impl))
    index = pd.MultiIndex.from_tuples(found, names=["mode", "impl", "batch", "tp"]) if found else None
    return pd.DataFrame(list(found.values()), columns=["equal", "batches"], index=index)


def shares(points: pd.DataFrame) -> pd.DataFrame:
    """The draft step's device time and the whole engine step's wall time: index mode and impl."""
    chosen = rows(points, op="draft_forward")
    table = chosen.assign(draft_us=[float(np.median(s)) for s in chosen.samples_us] if len(chosen) else [])
    if not len(table):
        return table
    table = table.assign(share=table.draft_us / table.step_us)
    return table.set_index(["mode", "impl"])[["batch", "draft_us", "step_us", "share"]]


def step_gain(points: pd.DataFrame, draft_tokens: int = STEP_TARGET_TOKENS) -> dict[str, float] | None:
    """What `mhc_post_pre` saves of draft and target step together, as a share of the engine's step; None: not recorded.

    Returns:
        draft_us, target_us, step_us, share, and real_share: the same, projected to the real number of target layers,
        with the step's time scaled by the layers of target and draft (a projection, not a measurement).
    """
    draft, target = saved(points), saved(points, op="target_step_replay")
    draft = draft[(draft["T"] == draft_tokens) & (draft.impl == "mhc_post_pre")]
    at = rows(points, op="target_step_replay")
    batch = rows(points, op="draft_step_replay", T=draft_tokens)
    if not len(draft) or not len(batch) or not len(at):
        return None
    target = target[target["T"].isin(at[at.batch == batch.batch.iloc[0]]["T"])]
    if not len(target):
        return None
    draft_us, target_us = float(draft.saved_us.iloc[0]), float(target.saved_us.iloc[0])
    draft_step, target_step = float(draft.step_us.iloc[0]), float(target.step_us.iloc[0])
    layers = REAL_TARGET_LAYERS / TARGET_LAYERS
    return {
        "draft_us": draft_us,
        "target_us": target_us,
        "step_us": draft_step + target_step,
        "share": (draft_us + target_us) / (draft_step + target_step),
        "real_share": (draft_us + layers * target_us) / (draft_step + layers * target_step),
    }


def text(record: Record) -> str:
    """The tables that `python -m mhc bench serving` ends with."""
    points = record.points
    parts = [record.caption, f"engine up after {record.run['engine_start_s']:g} s: {record.run['engine']}"]
    for op in ("draft_step_replay", "target_step_replay"):
        table = saved(points, op=op)
        if len(table):
            parts.append(f"\n{op}: us saved against {BASELINE}, mean with 95 % interval")
            parts.append(table.round({"step_us": 1, "saved_us": 2, "low_us": 2, "high_us": 2, "share": 5}).to_string())
    for tokens, bound in REPLAY_TARGET_US.items():
        table = saved(points)
        at = table[(table["T"] == tokens) & (table.impl == "mhc")]
        state = f"{at.saved_us.iloc[0]:.1f} {'met' if at.saved_us.iloc[0] >= bound else 'NOT MET'}" if len(at) else "?"
        parts.append(f"  target: mhc saves at least {bound:g} us of a draft step of {tokens} tokens: {state}")
    for mode in ("graph", "eager"):
        table = throughput(points, mode)
        if len(table):
            parts.append(f"\nserving, {mode}\n{table.round(4).to_string()}")
    for title, table in (("tokens equal to unpatched", equal_tokens(points)), ("draft step", shares(points))):
        if len(table):
            parts.append(f"\n{title}\n{table.round(4).to_string()}")
    for op in ("refit", "divergence"):
        found = rows(points, op=op)
        if len(found):
            parts.append(f"\n{op}\n{found.dropna(axis=1, how='all').to_string()}")
    gain = step_gain(points)
    if gain:
        parts.append(f"\nmhc_post_pre at {STEP_TARGET_TOKENS} draft tokens: {gain}")
    missing = points[points.status != "ok"] if len(points) else points
    for (op, impl, status, reason), group in (
        missing.groupby(["op", "impl", "status", "reason"]) if len(missing) else ()
    ):
        parts.append(f"  {status}: {op} {impl}, {len(group)} points: {reason}")
    return "\n".join(parts)
