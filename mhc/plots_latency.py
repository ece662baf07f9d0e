"""Figures of notebook 03: published times, the sweep with its floor, speed-ups, host against device, the model.

Every function draws on the axes that it is given, from tables made by `mhc.bench.compare` and `mhc.bench.model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mhc.bench.model import TERMS, Gpu, Model
from mhc.bench.published import PublishedRange
from mhc.plots import color, token_axis

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ORDER = (
    "vllm_repeat", "tilekernels_repeat", "torch_compile", "vllm_broadcast", "vllm_post_pre", "mhc_repeat",
    "mhc_two_launch", "mhc_fused", "mhc_post_pre", "mhc_noise_rows", "mhc_table", "mhc_collapsed", "floor_copy",
    "floor_launch",
)  # fmt: skip
TERM_COLORS = ("#54278f", "#756bb1", "#9e9ac8", "#e6550d", "#fdae6b", "#6baed6", "#08519c")


def published(ax: Axes, ranges: Iterable[PublishedRange], floor_us: float) -> None:
    """Published eager ranges as bars, with the bandwidth floor of the largest T as a line."""
    for row, item in enumerate(ranges):
        ax.barh(row, item.middle_us, color=color(item.impl), height=0.55)
        ax.plot([item.low_us, item.high_us], [row, row], color="#1f2328", linewidth=3, solid_capstyle="butt")
        ax.text(item.high_us + 1.5, row, f"{item.low_us:g} to {item.high_us:g} us", va="center", fontsize=9)
        ax.text(5, row, item.impl, va="center", color="white", fontsize=9)
    ax.axvline(floor_us, color=color("floor_copy"), linestyle="--")
    ax.annotate("bytes / peak bandwidth", (floor_us, 1.42), (4, 0), textcoords="offset points", fontsize=8)
    ax.set(yticks=[], xlabel="eager time of a call, us", xlim=(0, 140), ylim=(1.6, -0.5))


def sweep(ax: Axes, table: pd.DataFrame, title: str, impls: Iterable[str] | None = None) -> None:
    """Median time against T with 5-95 % bands, log-log; floors dashed. `table` holds one op and one H."""
    shown = [impl for impl in ORDER if impl in set(table.impl) and (impls is None or impl in impls)]
    for impl in shown:
        rows = table[table.impl == impl].sort_values("T")
        floor = impl.startswith("floor")
        ax.plot(
            rows["T"], rows.time_us, "--" if floor else "o-", color=color(impl), label=impl, zorder=2 if floor else 3
        )
        ax.fill_between(rows["T"], rows.low_us, rows.high_us, color=color(impl), alpha=0.25, linewidth=0)
    _time_axis(ax)
    ax.set_title(title)
    if len(table):
        token_axis(ax, table["T"])
    ax.legend(fontsize=8, ncols=2)


def speedup_lines(ax: Axes, lines: Mapping[str, pd.DataFrame], title: str) -> None:
    """Speed-ups against T with their intervals; `lines` maps an impl to a table of `compare.speedups`."""
    tokens: set[int] = set()
    for impl, table in lines.items():
        if not len(table):
            continue
        ax.plot(table.index, table.speedup, "o-", color=color(impl), label=impl)
        ax.fill_between(table.index, table.low, table.high, color=color(impl), alpha=0.25, linewidth=0)
        tokens |= set(table.index)
    ax.axhline(1, color="#5f6b7a", linewidth=1)
    ax.set(title=title, ylabel="ratio of medians", ylim=(0, None))
    if tokens:
        token_axis(ax, tokens)
        ax.legend(fontsize=8)


def host_and_device(ax: Axes, clocks: Mapping[str, pd.DataFrame], title: str) -> None:
    """For each impl the host's cost, the device's time and the eager time, side by side; `clocks` maps a timer to
    a table with columns impl and time_us at one T."""
    names = [impl for impl in ORDER if any(impl in set(table.impl) for table in clocks.values())]
    shades = {"cpu_call": 1.0, "cuda_graph": 0.55, "eager": 0.25}
    for offset, (timer, table) in enumerate(clocks.items()):
        times = table.set_index("impl").time_us
        for row, impl in enumerate(names):
            if impl in times:
                y = row + 0.26 * (offset - 1)
                ax.barh(y, times[impl], height=0.24, color=color(impl), alpha=shades.get(timer, 0.7))
                ax.text(times[impl], y, f" {timer} {times[impl]:.1f}", va="center", fontsize=7)
    ax.set(title=title, xlabel="us per call", yticks=range(len(names)), yticklabels=names)
    ax.margins(x=0.18)
    ax.invert_yaxis()


def held_out(ax: Axes, test: pd.DataFrame) -> None:
    """Predicted over measured time of the points that the model was not fitted on."""
    for impl in [name for name in ORDER if name in set(test.impl)]:
        rows = test[test.impl == impl]
        ax.plot(rows.time_us, 100 * rows.relative_error, "o", color=color(impl), label=impl)
    ax.axhline(0, color="#5f6b7a", linewidth=1)
    ax.set_xscale("log")
    ax.set(xlabel="measured, us", ylabel="predicted / measured - 1, %", title="Model: error on held-out points")
    ax.legend(fontsize=8, ncols=2)


def breakdown(ax: Axes, model: Model, op: str, impls: Iterable[str], tokens: int, hidden: int, gpu: Gpu) -> None:
    """What the model says a call's time is made of, stacked, for each impl."""
    names = list(impls)
    for row, impl in enumerate(names):
        left = 0.0
        for (term, us), shade in zip(model.terms(op, impl, tokens, hidden, gpu).items(), TERM_COLORS, strict=True):
            ax.barh(row, us, left=left, color=shade, height=0.6, label=term if row == 0 else None)
            left += us
        ax.text(left, row, f" {left:.1f}", va="center", fontsize=8)
    ax.set(
        yticks=range(len(names)), yticklabels=names, xlabel="us per call",
        title=f"Model: {op}, T = {tokens:,}, H = {hidden}, {gpu.name}",
    )  # fmt: skip
    ax.margins(x=0.12)
    ax.invert_yaxis()
    ax.legend(fontsize=8, ncols=min(4, len(TERMS)), loc="upper center", bbox_to_anchor=(0.45, -0.22))


def prediction(ax: Axes, table: pd.DataFrame, error: float, title: str, measured: pd.DataFrame | None = None) -> None:
    """Predicted times (T as rows, impl as columns) with a band of +- `error`; `measured` curves of that GPU on top."""
    for impl in [name for name in ORDER if name in table.columns]:
        ax.plot(table.index, table[impl], "--", color=color(impl), label=f"{impl}, model")
        low, high = table[impl] / (1 + error), table[impl] * (1 + error)
        ax.fill_between(table.index, low, high, color=color(impl), alpha=0.18, linewidth=0)
    if measured is not None:
        for impl in [name for name in ORDER if name in set(measured.impl)]:
            rows = measured[measured.impl == impl].sort_values("T")
            ax.plot(rows["T"], rows.time_us, "o", color=color(impl), label=f"{impl}, measured")
    _time_axis(ax)
    ax.set_title(title)
    token_axis(ax, table.index)
    ax.legend(fontsize=8, ncols=2)


def _time_axis(ax: Axes) -> None:
    """A log axis in us that labels 1, 2, 5, 10, ... as plain numbers."""
    from matplotlib import ticker

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    ax.set_ylabel("time of a call, us")
