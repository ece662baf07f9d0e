"""Figures of notebook 02: measured errors beside their bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mhc import plots
from mhc.arithmetic import ARITHMETICS
from mhc.arms import FOLDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

GREY = "#5f6b7a"
COLORS = {"tf32_truncate": "#d55e00", "tf32_nearest": "#e69f00", "bf16x3": "#009e73", "fp32": "#0072b2"}
PAIR_COLORS = ("#d55e00", "#e69f00", "#8c6bb1", "#0072b2")
NAMES = {"tf32_truncate": "TF32, truncated", "tf32_nearest": "TF32, nearest", "bf16x3": "bf16x3", "fp32": "fp32"}


def arms(errors: DataFrame, bounds: DataFrame, quantity: str) -> Figure:
    """Small multiples by case: every arm's measured error (dots, one a seed) under its bound (bar).

    Args:
        errors, bounds: columns `case`, `how`, `arithmetic` and the quantity.
        quantity: column to draw, e.g. `mixes`.
    """
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(errors["case"]))
    columns = 4
    figure, axes = plt.subplots(
        -(-(len(cases) + 1) // columns), columns, figsize=(11.2, 5.8), sharex=True, sharey=True, squeeze=False
    )
    place = {
        (how, arithmetic): len(ARITHMETICS) * 1.25 * i + j
        for i, how in enumerate(FOLDS)
        for j, arithmetic in enumerate(ARITHMETICS)
    }
    for ax, case in zip(axes.flat, cases, strict=False):
        for (how, arithmetic), x in place.items():
            for table, marker in ((errors, "o"), (bounds, "_")):
                arm = table[(table["case"] == case) & (table["how"] == how) & (table["arithmetic"] == arithmetic)]
                size = {"o": 4, "_": 11}[marker]
                ax.plot([x] * len(arm), arm[quantity], marker, ms=size, mew=1.8, color=COLORS[arithmetic])
        ax.set(yscale="log")
        ax.set_title(case.replace("_", " "))
        ax.set_xticks([place[how, "tf32_truncate"] + 1.5 for how in FOLDS], FOLDS)
        ax.tick_params(axis="x", labelbottom=True)
        ax.grid(axis="x", visible=False)
    for ax in axes.flat[len(cases) :]:
        ax.axis("off")
    key = axes.flat[len(cases)]
    for arithmetic in ARITHMETICS:
        key.plot([], [], "o", color=COLORS[arithmetic], label=NAMES[arithmetic])
    key.plot([], [], "o", color=GREY, label="measured, a dot a seed")
    key.plot([], [], "_", ms=11, mew=1.8, color=GREY, label="a-priori bound")
    key.legend(loc="center", fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"largest error of {quantity}")
    return figure


def scaling(by_tokens: DataFrame, by_hidden: DataFrame) -> Figure:
    """Error of mixes, comb and layer input against T and against H; band: the seeds.

    Args:
        by_tokens, by_hidden: columns `how`, `arithmetic`, `mixes`, `comb`, `layer_input_ulp` and `T` or `H`.
    """
    import matplotlib.pyplot as plt

    quantities = {"mixes": "mixes", "comb": "comb", "layer_input_ulp": "layer input, bf16 ulp"}
    figure, axes = plt.subplots(2, 3, figsize=(11.2, 6.0), sharey="col")
    for line, table, letter in zip(axes, (by_tokens, by_hidden), ("T", "H"), strict=True):
        for ax, (quantity, name) in zip(line, quantities.items(), strict=True):
            for (how, arithmetic), arm in table.groupby(["how", "arithmetic"]):
                spread = arm.groupby(letter)[quantity].agg(["min", "median", "max"])
                style = "--" if how == "repeat" else "-"
                label = f"{how}, {NAMES[arithmetic]}"
                ax.plot(spread.index, spread["median"], style, marker="o", color=COLORS[arithmetic], label=label)
                ax.fill_between(spread.index, spread["min"], spread["max"], color=COLORS[arithmetic], alpha=0.15, lw=0)
            if quantity == "layer_input_ulp":
                ax.set_ylim(0, 2.6)
            else:
                ax.set_yscale("log")
            plots.token_axis(ax, table[letter].unique(), {"T": "T, tokens", "H": "H, hidden size"}[letter])
            ax.tick_params(axis="x", labelsize=8)
            ax.set_title(f"{name} by {letter}")
    for ax in axes[:, 0]:
        ax.set_ylabel("largest error")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def sinkhorn(accuracy: DataFrame, amplification: DataFrame) -> Figure:
    """Left: iterations against distance from the limit, and the rounding error of fp32. Right: comb against logits.

    Args:
        accuracy: columns `size`, `iterations`, `truncation`, `rounding`.
        amplification: columns `arithmetic`, `logits`, `comb`, `bound`.
    """
    import matplotlib.pyplot as plt
    import seaborn as sns

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.6, 4.1))
    colors = sns.color_palette("flare", accuracy["size"].nunique())
    for color, (size, curve) in zip(colors, accuracy.groupby("size", sort=True), strict=True):
        label = f"std {size:g}"
        left.plot(curve["iterations"], curve["truncation"].clip(lower=1e-12), "o-", color=color, label=label)
        left.plot(curve["iterations"], curve["rounding"], "--", color=color)
    left.plot([], [], "-", color=GREY, label="to the limit")
    left.plot([], [], "--", color=GREY, label="fp32 rounding")
    left.axvline(20, color=GREY, lw=1, ls=":")
    left.set(yscale="log", ylim=(1e-9, 1), xlabel="iterations (V4: 20)", ylabel="largest distance in comb")
    plots.token_axis(left, accuracy["iterations"].unique(), "iterations (V4: 20)")
    left.set_title("Iterations add convergence, not rounding")
    left.legend(fontsize=8, ncols=2, loc="lower left")
    for arithmetic, arm in amplification.groupby("arithmetic"):
        right.plot(arm["logits"], arm["comb"], "o", color=COLORS[arithmetic], label=NAMES[arithmetic])
        right.plot(arm["logits"], arm["bound"], "_", ms=9, mew=1.6, color=COLORS[arithmetic])
    ends = np.array([amplification["logits"].min(), amplification["logits"].max()])
    right.plot(ends, ends, color=GREY, lw=1, ls=":")
    right.annotate("as large as the logits' error", (6e-6, 4e-6), ha="left", va="top", fontsize=8, color=GREY)
    right.plot([], [], "_", ms=9, mew=1.6, color=GREY, label="bound, from the logits' error")
    right.set(xscale="log", yscale="log", xlabel="largest error of comb's logits", ylabel="largest error of comb")
    right.set_title("Sinkhorn damps what it is given")
    right.legend(fontsize=8, loc="upper left")
    return figure


def survival(curves: DataFrame, guaranteed: dict[str, float]) -> Figure:
    """Share of layer inputs whose error exceeds a number of bf16 ulp.

    Args:
        curves: columns `norm`, `err_ulp`, `share`.
        guaranteed: norm -> the bound, in ulp.
    """
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7.4, 3.9))
    colors = {"none": "#5f6b7a", "analytic": "#0072b2", "spec": "#d55e00"}
    names = {"none": "y, un-normed", "analytic": "analytic norm of P·x", "spec": "spec: norm of bf16(y)"}
    for norm, curve in curves.groupby("norm", sort=False):
        under = norm == "none"  # coincides with the analytic norm
        ax.plot(
            curve["err_ulp"],
            curve["share"],
            color=colors[norm],
            label=names[norm],
            lw=6 if under else 2,
            alpha=0.4 if under else 1,
        )
        ax.axvline(guaranteed[norm], color=colors[norm], ls=":", lw=1.2)
        ax.plot(guaranteed[norm], 1e-6, "v", color=colors[norm], ms=7, clip_on=False)
    ax.plot([], [], "v", color=GREY, ls=":", label="guaranteed")
    ax.set(yscale="log", ylim=(1e-6, 1.5), xlim=(0, max(guaranteed.values()) * 1.08))
    ax.set(xlabel="error of the layer input in bf16 ulp", ylabel="share of elements above")
    ax.set_title("Rounding y to bf16 before the norm costs another ulp")
    ax.legend(loc="upper right", bbox_to_anchor=(0.9, 1.0))
    return figure


def cancellation(points: DataFrame, harmless: float) -> Figure:
    """Error of the norm's factor against how far the streams cancel, from inner products and from a sum of squares.

    Args:
        points: columns `kappa`, `norm`, `error`, `bound`.
        harmless: condition number at which the bound of inner products is a bf16 ulp.
    """
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7.4, 4.2))
    colors = {"inner_products": "#0072b2", "two_passes": "#d55e00"}
    names = {"inner_products": "inner products", "two_passes": "two passes, of bf16(y)"}
    for norm, points_of in points.groupby("norm", sort=False):
        line = points_of.sort_values("kappa")
        ax.plot(line["kappa"], line["error"].clip(lower=1e-9), "o", ms=3, color=colors[norm], label=names[norm])
        ax.plot(line["kappa"], line["bound"], "--", color=colors[norm])
    ax.plot([], [], "--", color=GREY, label="a-priori bound")
    ax.axhline(2**-8, color=GREY, lw=1, ls=":")
    ax.annotate("one bf16 ulp", (1, 2**-8 * 1.3), fontsize=9, color=GREY)
    ax.axvline(harmless, color=GREY, lw=1, ls=":")
    ax.set(xscale="log", yscale="log", ylim=(1e-9, 3e3), xlabel="condition number κ of the weighted streams")
    ax.set_ylabel("relative error of the norm's factor")
    ax.set_title(f"Inner products err by κ² u: up to κ = {harmless:.0f} by less than y's own rounding may")
    ax.legend(loc="upper left")
    return figure


def public(mixes: DataFrame, steps: DataFrame, seen: tuple[float, float]) -> Figure:
    """Repeat against broadcast by arithmetic: largest difference of mixes and of the bf16 layer input, over T.

    Markers are the median over the seeds, bars their range.

    Args:
        mixes, steps: columns `pair`, `T`, `seed`, `difference`.
        seen: the public figures for the two panels.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11.4, 4.0))
    pairs = list(dict.fromkeys(mixes["pair"]))
    looks = dict(zip(pairs, zip(PAIR_COLORS, "osD^", strict=True), strict=True))
    for ax, table, value in zip(axes, (mixes, steps), seen, strict=True):
        for k, (pair, curve) in enumerate(table.groupby("pair", sort=False)):
            spread = curve.groupby("T")["difference"].agg(["min", "median", "max"])
            color, marker = looks[pair]
            # side by side, so that equal steps stay visible
            beside = spread.index.to_numpy() * 1.09 ** (k - 1.5)
            error = [spread["median"] - spread["min"], spread["max"] - spread["median"]]
            ax.errorbar(beside, spread["median"], error, fmt=marker, color=color, label=pair, lw=1, ms=5)
        ax.axhline(value, color="k", lw=1, ls="--")
        plots.token_axis(ax, table["T"].unique())
    axes[0].set(yscale="log", ylabel="largest difference of the mixes")
    axes[0].annotate(f"published: {seen[0]:.2e}", (1, seen[0] * 1.3), fontsize=9)
    axes[1].set_ylabel("largest difference of the layer input")
    axes[1].set_yscale("symlog", base=2, linthresh=2**-9, linscale=0.6)
    axes[1].set_yticks([0, *(2.0**-n for n in range(9, 2, -1))], ["0", *(f"$2^{{-{n}}}$" for n in range(9, 2, -1))])
    axes[1].annotate(f"published: {seen[1]}", (1, seen[1] * 1.15), fontsize=9)
    axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="repeat vs broadcast")
    axes[0].set_title("TF32 in either path suffices")
    axes[1].set_title("One bf16 step, or none")
    return figure


def signs(table: DataFrame, half_width: float) -> Figure:
    """Share of errors that point away from zero, with the binomial band of unbiased rounding.

    Args:
        table: columns `what`, `share`, `n`.
        half_width: of the band, in standard deviations.
    """
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7.6, 3.9))
    y = np.arange(len(table))
    band = half_width * 0.5 / np.sqrt(table["n"])
    ax.barh(y, 2 * band, left=0.5 - band, height=0.7, color=plots.color("broadcast"), alpha=0.2, lw=0)
    outside = (table["share"] - 0.5).abs() > band
    ax.scatter(table["share"], y, c=np.where(outside, plots.color("repeat"), plots.color("broadcast")), s=42, zorder=3)
    ax.axvline(0.5, color=GREY, lw=1)
    ax.set_yticks(y, table["what"])
    ax.invert_yaxis()
    ax.set(xlim=(-0.03, 1.03), xlabel="share of errors pointing away from zero")
    ax.set_title(f"Only truncation is biased (band: ±{half_width:g} σ of a fair coin)")
    return figure


def collapse(points: DataFrame, deficit: float) -> Figure:
    """Cost of the column-sum collapse in bf16 ulp of the new stream, against how far the stream cancels.

    Args:
        points: columns `ratio` (|r'| / |x|), `err_ulp`, `bound_ulp`, binned, the largest of each bin.
        deficit: bound on 1 - column sum.
    """
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7.4, 3.9))
    ax.plot(points["ratio"], points["bound_ulp"], color=GREY, ls="--", label="bound")
    ax.plot(points["ratio"], points["err_ulp"], "o", color=plots.color("collapsed"), label="measured, largest of a bin")
    ax.axhline(0.5, color=plots.color("repeat"), lw=1, ls=":")
    ax.annotate("half a bf16 step", (points["ratio"].max(), 0.56), ha="right", fontsize=9, color=plots.color("repeat"))
    ax.set(xscale="log", yscale="log", xlabel="|r'| / |x|: small where the output cancels the embedding")
    ax.set_ylabel("|full - collapsed| in bf16 ulp of r'")
    ax.set_title(f"Columns lack at most {deficit:.0e}: below half a step unless r' cancels 200-fold")
    ax.legend()
    return figure
