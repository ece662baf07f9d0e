"""Figures of notebook 01: how the streams collapse, Sinkhorn's way to the Birkhoff polytope, what fails where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mhc import plots, reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

GREY = "#5f6b7a"


def fold_walks(x: Tensor, fn: Tensor, rows: tuple[int, ...]) -> Figure:
    """One row of fn by stream and its fold; the running sums of both dot products, which end in one number.

    Args:
        x: [H], fn: [M, hc, H].
        rows: mixing rows to walk through.
    """
    import matplotlib.pyplot as plt
    import seaborn as sns

    hc, hidden = fn.shape[1:]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.7), width_ratios=(1, 1.25))
    shown = fn[rows[0], :, :48]
    strips = torch.cat([shown, torch.full((1, shown.shape[1]), torch.nan), shown.sum(0, keepdim=True)])
    limit = strips.nan_to_num().abs().max().item()
    sns.heatmap(
        strips.numpy(), ax=left, cmap="RdBu_r", vmin=-limit, vmax=limit, cbar_kws={"label": "weight", "shrink": 0.8}
    )
    left.set_yticks(np.array([*range(hc), hc + 1]) + 0.5, [f"fn, stream {j}" for j in range(hc)] + ["fold"], rotation=0)
    left.set_xticks([])
    left.set_xlabel(f"channels 0 to {shown.shape[1] - 1} of H")
    left.set_title("Equal inputs see only the sum of the weights")
    for row in rows:
        repeated = torch.cat([torch.zeros(1), (fn[row] * x).flatten().cumsum(0)])
        folded = torch.cat([torch.zeros(1), (fn[row].sum(0) * x).cumsum(0)])
        right.plot(np.linspace(0, hc, len(repeated)), repeated, color=plots.color("repeat"), lw=1)
        right.plot(np.linspace(0, 1, len(folded)), folded, color=plots.color("broadcast"), lw=1)
        right.plot([1, hc], [folded[-1]] * 2, color=plots.color("broadcast"), lw=1, ls=":")
        right.plot(hc, repeated[-1], "o", color=plots.color("repeat"), zorder=3)
        right.plot(1, folded[-1], "o", color=plots.color("broadcast"), zorder=3)
    right.plot([], [], color=plots.color("repeat"), label=f"flat(r) · fn, {hc * hidden:,} terms")
    right.plot([], [], color=plots.color("broadcast"), label=f"x · fold(fn), {hidden:,} terms")
    right.set_xticks(range(hc + 1), ["0", "H", *(f"{j}H" for j in range(2, hc + 1))])
    right.set_xlabel("terms summed")
    right.set_ylabel("running dot product")
    right.set_title(f"Rows {', '.join(map(str, rows))} of fn: two walks, one end")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure


def indifference(curves: DataFrame, range_p: tuple[float, float], half_ulp: float) -> Figure:
    """Relative change of the layer input against P, by mean square of x.

    Args:
        curves: columns `P`, `mean_square`, `measured`, `predicted`.
        range_p: the interval of P that the weights of the notebook produce.
        half_ulp: relative size of half a bf16 step.
    """
    import matplotlib.pyplot as plt
    import seaborn as sns

    figure, ax = plt.subplots(figsize=(7.4, 4.0))
    colors = sns.color_palette("crest", curves["mean_square"].nunique())
    for color, (mean_square, curve) in zip(colors, curves.groupby("mean_square", sort=True), strict=True):
        ax.plot(curve["P"], curve["predicted"].clip(lower=1e-16), color=color, lw=1.4)
        ax.plot(
            curve["P"],
            curve["measured"].clip(lower=1e-16),
            "o",
            color=color,
            label=f"$10^{{{round(np.log10(mean_square))}}}$",
        )
    ax.plot(curves["P"], (curves["P"] - 1).abs(), ".", ms=2, color=GREY)
    ax.annotate("un-normed P·x: |P - 1|", (5e-6, 2.2), color=GREY, fontsize=9)
    ax.axhline(half_ulp, color=plots.color("repeat"), lw=1, ls="--")
    ax.annotate("half a bf16 step", (4.3e-6, half_ulp * 1.6), color=plots.color("repeat"), fontsize=9)
    ax.axvspan(*range_p, color=plots.color("broadcast"), alpha=0.12, lw=0)
    ax.annotate("P of these weights", (range_p[0] * 0.9, 3e-8), ha="right", color=plots.color("broadcast"), fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="P = Σ pre, the mixing weights' only trace", ylim=(1e-8, 30))
    ax.set_ylabel("relative change of the layer input\nfrom its value at P = 1")
    ax.set_title("The norm divides P out: points measured, lines predicted")
    ax.legend(title="mean(x²)", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def polytope(starts: Tensor, iters: int, residuals: DataFrame) -> Figure:
    """Left: hc = 2, where column-stochastic matrices are a square and the Birkhoff polytope its diagonal.
    Right: hc = 4, the row sums' distance from 1 by iteration.

    Args:
        starts: [N, 2, 2] logits.
        iters: iterations drawn on the left.
        residuals: columns `iteration`, `size`, `residual`, `predicted`.
    """
    import matplotlib.pyplot as plt
    import seaborn as sns

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.8, 4.1), width_ratios=(1, 1.35))
    paths = torch.stack([reference.sinkhorn(starts, n, 1e-6)[:, 0] for n in range(1, iters + 1)], 1)  # [N, iters, 2]
    left.plot([0, 1], [1, 0], color="#009e73", lw=3, alpha=0.6, zorder=1, label="Birkhoff polytope")
    for path in paths:
        left.plot(*path.T, color=GREY, lw=0.9, zorder=2)
        left.scatter(*path.T, c=range(iters), cmap="viridis_r", s=14, zorder=3)
        left.plot(*path[0], "s", color=plots.color("repeat"), ms=5, zorder=4)
    left.plot([], [], "s", color=plots.color("repeat"), ms=5, label="after one iteration")
    left.plot([], [], "o", color="#440154", ms=4, label=f"after {iters}")
    left.set(xlabel="comb[0, 0]", ylabel="comb[0, 1]", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    left.set_title("hc = 2: columns sum to 1 everywhere")
    left.legend(loc="upper right", fontsize=8)
    colors = sns.color_palette("flare", residuals["size"].nunique())
    for color, (size, curve) in zip(colors, residuals.groupby("size", sort=True), strict=True):
        right.plot(curve["iteration"], curve["residual"], "o-", ms=3, color=color, label=f"{size:g}")
        right.plot(curve["iteration"], curve["predicted"], ls="--", lw=1, color=color)
    right.axvline(20, color=GREY, lw=1, ls=":")
    right.annotate("V4: 20", (19.5, 0.6), color=GREY, fontsize=9, ha="right")
    right.set(yscale="log", ylim=(1e-9, 2), xlabel="iterations", ylabel="largest |row sum - 1|")
    right.set_title("hc = 4: linear convergence, at rate σ₂² (dashed)")
    right.legend(title="std of logits", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def comb_map(size: float, iters: int, seed: int = 0) -> Figure:
    """One comb matrix and its row and column sums, for logits of standard deviation `size`."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    logits = size * torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    comb = reference.sinkhorn(logits, iters, 1e-6)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.3), width_ratios=(1.15, 1))
    sns.heatmap(comb.numpy(), ax=left, annot=True, fmt=".3f", vmin=0, vmax=1, cmap="crest", square=True, linewidths=1)
    left.set(xlabel="to stream k", ylabel="from stream j")
    left.tick_params(axis="y", rotation=0)
    left.set_title(f"comb, logits of std {size:g}, {iters} iterations")
    right.barh(np.arange(4) - 0.18, comb.sum(1), 0.32, color=plots.color("repeat"), label="row sums")
    right.barh(np.arange(4) + 0.18, comb.sum(0), 0.32, color=plots.color("broadcast"), label="column sums")
    right.axvline(1, color=GREY, lw=1)
    right.set(yticks=range(4), xlim=(0.4, 1.9), xlabel="sum", ylabel="stream")
    right.invert_yaxis()
    right.set_title("Columns are exact, rows converge")
    right.legend(loc="lower right")
    return figure


def violations(table: DataFrame) -> Figure:
    """How far each claim is from true, by situation: rows claims, columns situations, values relative."""
    import matplotlib.pyplot as plt
    import seaborn as sns
    from matplotlib.colors import BoundaryNorm, ListedColormap

    figure, ax = plt.subplots(figsize=(8.6, 4.3))
    labels = table.map(lambda value: "exact" if value < 1e-13 else f"{value:.0e}")
    bounds = [1e-16, 1e-13, 1e-5, 1e-3, 1e-1, 1e1]
    sns.heatmap(
        table.clip(lower=2e-16),
        ax=ax,
        annot=labels,
        fmt="",
        cmap=ListedColormap(["#1b7837", "#a6d96a", "#fee090", "#fc8d59", "#d73027"]),
        norm=BoundaryNorm(bounds, 5),
        linewidths=2,
        cbar_kws={"label": "relative violation", "ticks": bounds, "format": "%.0e"},
        annot_kws={"fontsize": 9},
    )
    ax.set(xlabel="", ylabel="")
    ax.tick_params(axis="x", rotation=0)
    ax.set_title("Green: the claim holds, exactly or up to eps. Yellow to red: it does not")
    return figure
