"""Figures of notebook 05: time saved a step, throughput in pairs, and what an engine step is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mhc.plots import color

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ORDER = ("unpatched", "vllm_kernel", "mhc", "mhc_fused", "mhc_table", "mhc_post_pre")
PART_COLORS = ("#d55e00", "#56b4e9", "#c3c7cd")


def saved(ax: Axes, table: pd.DataFrame, title: str, targets: Mapping[int, float] | None = None) -> None:
    """us saved of a whole draft step against unpatched, with 95 % intervals; `table` is of `serving_stats.saved`."""
    tokens = sorted(table["T"].unique())
    impls = [impl for impl in ORDER if impl in set(table.impl)]
    width = 0.8 / max(1, len(impls))
    for place, impl in enumerate(impls):
        rows = table[table.impl == impl].set_index("T")
        for row, t in enumerate(tokens):
            if t not in rows.index:
                continue
            x, r = row + (place - (len(impls) - 1) / 2) * width, rows.loc[t]
            ax.bar(x, r.saved_us, width=0.92 * width, color=color(impl), label=impl if row == 0 else None)
            ax.plot([x, x], [r.low_us, r.high_us], color="#1f2328", linewidth=1.4)
            ax.annotate(f"{r.share:.2%}", (x, max(r.high_us, 0)), (0, 3), textcoords="offset points", ha="center",
                        fontsize=7)  # fmt: skip
    for row, t in enumerate(tokens):
        if targets and t in targets:
            ax.plot([row - 0.42, row + 0.42], [targets[t]] * 2, "--", color="#5f6b7a", linewidth=1,
                    label="target of mhc" if row == 0 else None)  # fmt: skip
    ax.axhline(0, color="#5f6b7a", linewidth=0.8)
    ax.set(title=title, xticks=range(len(tokens)), xticklabels=[f"{t:,}" for t in tokens],
           xlabel="draft tokens a step", ylabel="us saved a draft step")  # fmt: skip
    ax.set_xlim(-0.6, max(len(tokens), 2) - 0.4)
    ax.margins(y=0.15)
    ax.legend(fontsize=8)


def throughput(ax: Axes, table: pd.DataFrame, title: str) -> None:
    """Gain in output tokens a second against unpatched, in pairs, with 95 % intervals; `serving_stats.throughput`."""
    impls = [impl for impl in ORDER if impl in table.index and impl != "unpatched"]
    for row, impl in enumerate(impls):
        r = table.loc[impl]
        ax.plot([100 * r.low, 100 * r.high], [row, row], color=color(impl), linewidth=4, solid_capstyle="butt")
        ax.plot(100 * r.gain, row, "o", color="#1f2328")
        ax.annotate(f"{r.gain:+.2%}", (100 * r.gain, row), (0, 8), textcoords="offset points", ha="center", fontsize=8)
    ax.axvline(0, color="#5f6b7a", linewidth=1)
    ax.set(title=title, yticks=range(len(impls)), yticklabels=impls, xlabel="output tok/s against unpatched, %",
           ylim=(len(impls) - 0.4, -0.7))  # fmt: skip


def step(ax: Axes, rows: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Engine steps as stacked shares; the first pre's share is written beside each bar."""
    for row, (name, parts) in enumerate(rows.items()):
        whole, left = sum(parts.values()), 0.0
        for (part, us), shade in zip(parts.items(), PART_COLORS, strict=True):
            ax.barh(row, 100 * us / whole, left=left, color=shade, height=0.6, label=part if row == 0 else None)
            left += 100 * us / whole
        first = next(iter(parts.values()))
        ax.text(101, row, f"{name}: first pre {first:.1f} us of {whole / 1e3:.1f} ms, {first / whole:.3%}", va="center",
                fontsize=8)  # fmt: skip
    ax.set(title=title, yticks=[], xlabel="share of the engine step, %", xlim=(0, 185))
    ax.set_xticks([0, 25, 50, 75, 100])
    ax.invert_yaxis()
    ax.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.28))
