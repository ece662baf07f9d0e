"""Figures of notebook 04: acceptance by position and draft length, truncation, calibration, flips, speed.

Every function draws on the axes that it is given, from tables made by `mhc.gsm8k.compare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mhc.plots import color

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

INK, MUTED = "#1f2328", "#8a8f98"


def positions(ax: Axes, tables: Mapping[str, pd.DataFrame]) -> None:
    """Unconditional acceptance by position with 95 % intervals (bars) and conditional (dashes), an arm a colour."""
    width = 0.8 / len(tables)
    for number, (arm, table) in enumerate(tables.items()):
        x = table.index + (number - (len(tables) - 1) / 2) * width
        errors = [table.rate - table.low, table.high - table.rate]
        ax.bar(x, table.rate, width * 0.92, color=color(arm), label=arm, yerr=errors, error_kw={"elinewidth": 1.2})
        ax.plot(x, table.conditional, "_", color=INK, markersize=9, markeredgewidth=1.6)
    ax.plot([], [], "_", color=INK, label="given all before it")
    ax.set(xlabel="position in the draft", ylabel="accepted / drafts", ylim=(0, 1))
    ax.set_xticks(next(iter(tables.values())).index)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars, which fill the axes


def draft_lengths(ax: Axes, table: pd.DataFrame) -> None:
    """Measured mean length against k, over what the full-length run predicts and over full acceptance."""
    ax.plot(table.index, table.index + 1, ":", color=MUTED, label="everything accepted")
    ax.plot(table.index, table.predicted, "--", color=INK, label="1 + first k rates of the longest draft")
    errors = [table.length - table.low, table.high - table.length]
    ax.errorbar(table.index, table.length, errors, fmt="o", color=color("broadcast"), capsize=3, label="measured")
    ax.set(xlabel="k, draft length", ylabel="mean acceptance length, tokens")
    ax.legend()


def truncation(axes: Sequence[Axes], table: pd.DataFrame) -> None:
    """What a confidence threshold trades: length kept against tokens verified, and the share of them accepted."""
    left, right = axes
    left.plot(table["verified tokens a round"], table["mean length"], "o-", color=color("broadcast"))
    # thresholds that cut alike share a point and a label
    labels: dict[tuple[float, float], list[str]] = {}
    for threshold, row in table.iterrows():
        where = (round(row["verified tokens a round"], 2), round(row["mean length"], 2))
        labels.setdefault(where, []).append(f"{threshold:g}")
    for where, same in labels.items():
        left.annotate(", ".join(same), where, (4, -10), textcoords="offset points", fontsize=8)
    left.set(xlabel="draft tokens verified a round", ylabel="mean acceptance length, tokens")
    right.plot(table.index, table["accepted of verified, %"], "o-", color=color("broadcast"))
    right.set(xlabel="confidence threshold", ylabel="accepted of verified tokens, %", ylim=(0, 100))


def calibration(ax: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    """Predicted against actual acceptance, a line a position; the area of a dot is its share of the anchors."""
    import matplotlib as mpl

    shades = mpl.colormaps["viridis"]
    ax.plot([0, 1], [0, 1], ":", color=MUTED)
    for record in records:
        shade = shades((record["position"] - 1) / max(1, len(records) - 1) * 0.9)
        label = f"{record['position']} (ECE {100 * record['expected_error']:.1f} %)"
        ax.plot(record["confidence"], record["accepted"], "-", color=shade, label=label)
        total = sum(record["count"])
        ax.scatter(record["confidence"], record["accepted"], [200 * n / total for n in record["count"]], color=shade)
    ax.set(xlabel="confidence", ylabel="probability of acceptance", xlim=(0, 1), ylim=(0, 1))
    ax.legend(title="position", fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def flips(ax: Axes, records: Sequence[Mapping[str, Any]], blocks: int) -> None:
    """Differing drafts, an arm a colour: the lead of repeat's token over the arm's, against the logits' difference."""
    if records:
        points = [(record["arm"], max(record["logit_error"], 1e-6), max(record["gap"], 1e-6)) for record in records]
        for arm in dict.fromkeys(arm for arm, _, _ in points):
            own = [(error, gap) for name, error, gap in points if name == arm]
            ax.loglog(*zip(*own, strict=True), "o", color=color(arm), alpha=0.7, label=arm)
        values = [value for _, *pair in points for value in pair]
        limits = [min(values) / 2, max(values) * 2]
        ax.plot(limits, limits, "--", color=INK)
        ax.annotate("lead = difference", (limits[1], limits[1]), (-4, -12), textcoords="offset points", ha="right")
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    else:
        ax.text(0.5, 0.5, f"no draft of {blocks:,} differs", ha="center", transform=ax.transAxes)
        ax.set(xticks=[], yticks=[])
    ax.set(xlabel="difference of the two tokens' logits between the arms", ylabel="lead of the chosen token")


def training(axes: Sequence[Axes], curves: Mapping[str, pd.DataFrame]) -> None:
    """Over the steps, of each step and held out (dots): the target's loss of answer tokens, the draft's `tau`.

    A sharpening's answers are the target's own, held out as well.
    """
    for ax, (name, curve) in zip(axes, curves.items(), strict=True):
        train, dev = curve[curve.phase == "train"], curve[curve.phase == "dev"]
        figure = "tau" if "tau" in curve else "answer"
        ax.plot(train.step, train[figure], "-", color=MUTED, linewidth=1, label="of a step")
        held_out = "own" if "own" in curve else figure
        ax.plot(dev.step, dev[held_out], "o", color=color("broadcast"), markersize=4, label="held out")
        label = {"tau": "expected acceptance length, tokens", "answer": "loss of answer tokens, nats"}[figure]
        ax.set(xlabel="step", ylabel=label, title=name)
        ax.legend()


def draft_round(ax: Axes, table: pd.DataFrame) -> None:
    """Where a draft forward's time goes, a bar a batch size: the first pre in its colour, the rest in greys."""
    left, greys = 0 * table.iloc[:, 0], ["#5f6b7a", "#8a8f98", "#aeb4bc", "#c9ced5", "#e0e4e8"]
    names = [f"{requests} request{'s' * (requests > 1)}" for requests in table.index]
    for part in table.columns:
        shade = color("broadcast") if part == "first_pre" else greys.pop(0)
        ax.barh(names, table[part], left=left, color=shade, label=part.replace("_", " "))
        left = left + table[part]
    ax.invert_yaxis()
    ax.set(xlabel="time of one draft forward, microseconds")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)


def speed(ax: Axes, table: pd.DataFrame) -> None:
    """Tokens a second: plain grey, the arms in their colours, whiskers from the slowest to the fastest round."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    arms = [arm for arm in ("plain", "repeat", "broadcast") if ("median", arm) in table.columns]
    for number, arm in enumerate(arms):
        x = [place + (number - 1) * 0.27 for place in range(len(table))]
        middle = table[("median", arm)]
        errors = [middle - table[("low", arm)], table[("high", arm)] - middle]
        # points, not bars: a logarithmic axis has no zero for a bar to stand on
        shade = MUTED if arm == "plain" else color(arm)
        ax.errorbar(x, middle, errors, fmt="o", markersize=8, capsize=4, color=shade, label=arm)
    names = [
        f"{launch.replace('_', ' ')}\n{requests} request{'s' * (requests > 1)}" for launch, requests in table.index
    ]
    ax.set_xticks(range(len(table)), names)
    ax.set(ylabel="tokens a second", yscale="log", xlim=(-0.6, len(table) - 0.4))
    low, high = table["low"].min().min(), table["high"].max().max()
    ax.set_ylim(low / 1.5, high * 1.5)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
