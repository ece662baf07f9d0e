"""House style of every figure: one theme, one colour per implementation, a token axis in powers of two.

    plots.style()                       once, in a notebook's first cell
    plots.token_axis(ax, [1, 8, 64])    log-2 axis with the measured T as ticks
    plots.caption(ax, record.caption)   where and when, under the axes

Plots that belong to one notebook live in `mhc/plots_<topic>.py` and use these.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe-Ito hues, told apart by colour-blind readers: warm for what others run, cool for this package, grey for floors
PALETTE = {
    "vllm_repeat": "#d55e00",
    "vllm_broadcast": "#e69f00",
    "vllm_post_pre": "#e69f00",
    "torch_compile": "#cc79a7",
    "tilekernels_repeat": "#a6761d",
    "mhc_repeat": "#8c6bb1",
    "mhc_two_launch": "#56b4e9",
    "mhc_fused": "#0072b2",
    "mhc_post_pre": "#0072b2",
    "mhc_table": "#009e73",
    "mhc_noise_rows": "#66c2a5",
    "mhc_collapsed": "#1b4d3e",
    "floor_copy": "#8a8f98",
    "floor_launch": "#c3c7cd",
    # the arms of an A/B
    "repeat": "#d55e00",
    "broadcast": "#0072b2",
    "table": "#009e73",
    "collapsed": "#1b4d3e",
    # ways to serve
    "unpatched": "#d55e00",
    "vllm_kernel": "#e69f00",
    "mhc": "#56b4e9",
}


def style() -> None:
    """Set the theme for every later figure; in a notebook also sharp PNGs, deterministic and without a date."""
    import matplotlib as mpl
    import seaborn as sns
    from IPython import get_ipython

    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", font="DejaVu Sans")
    mpl.rcParams.update(
        {
            "figure.figsize": (7.0, 3.8),
            "figure.constrained_layout.use": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.edgecolor": "#5f6b7a",
            "axes.titlesize": "medium",
            "axes.titlelocation": "left",
            "grid.color": "#e4e7eb",
            "legend.frameon": False,
            "lines.linewidth": 1.6,
            "lines.markersize": 4.5,
        }
    )
    shell = get_ipython()
    if shell is not None and shell.has_trait("kernel"):
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("retina", metadata={"Software": None})


def color(impl: str) -> str:
    """The colour of an implementation.

    Raises:
        ValueError: `impl` has none yet: add it to PALETTE, so that it looks the same in every figure.
    """
    if impl not in PALETTE:
        raise ValueError(f"impl must be one of {', '.join(PALETTE)}, got {impl!r}")
    return PALETTE[impl]


def token_axis(ax: Axes, tokens: Iterable[int], label: str = "T, tokens") -> None:
    """A log-2 x axis whose ticks are the values of `tokens`; every other one is labelled when they are many."""
    import matplotlib.ticker as ticker

    ticks = sorted({int(value) for value in tokens})
    if not ticks or ticks[0] < 1:
        raise ValueError(f"tokens must be positive, got {ticks}")
    every = 1 + (len(ticks) - 1) // 12
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.xaxis.set_major_formatter(
        ticker.FixedFormatter([f"{t:,}" if i % every == 0 else "" for i, t in enumerate(ticks)])
    )
    ax.set_xlabel(label)


def caption(ax: Axes, text: str) -> None:
    """Small grey text under the axes, wrapped: the record's caption, or "measured here, <device>"."""
    ax.annotate(
        textwrap.fill(text, 80),
        (0, 0),
        (0, -38),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color="#5f6b7a",
        va="top",
    )


def streams_svg() -> str:
    """The README's picture: three ways to the same layer input. Made by code, so that its letters are the package's.

    Written to `notebooks/figures/streams.svg` by `python -m mhc.plots`.
    """
    rows = [
        (
            "repeat",
            "what every layer runs",
            "hc copies of x",
            4,
            ("flat(r) · fnᵀ", "K = hc·H"),
            ("gates, Sinkhorn", "pre, post, comb"),
            ("Σ preⱼ·rⱼ", "RMSNorm"),
        ),
        (
            "broadcast",
            "the same result, one launch",
            "x, once",
            1,
            ("x · fn_bᵀ", "K = H, fn_b = Σ fnⱼ"),
            ("gates, Sinkhorn", "pre, post, comb"),
            ("P·x, P = Σ preⱼ", "RMSNorm"),
        ),
        (
            "table",
            "the same result, looked up",
            "x, once",
            1,
            ("table[token]", "made at load time"),
            ("a row of 21", "P, post, comb"),
            ("P·x", "RMSNorm"),
        ),
    ]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 400" font-family="DejaVu Sans, Arial, sans-serif" '
        'font-size="13" role="img" aria-label="Three ways to the first layer input: repeat, broadcast, table">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#5f6b7a"/></marker></defs>',
        '<rect width="900" height="400" rx="8" fill="#ffffff"/>',
    ]
    for row, (name, subtitle, streams, copies, *steps) in enumerate(rows):
        y, tint = 70 + 125 * row, PALETTE[name]
        parts += [
            f'<text x="24" y="{y - 36}" font-size="15" font-weight="bold" fill="{tint}">{name}</text>',
            f'<text x="{34 + 9.6 * len(name):.0f}" y="{y - 36}" fill="#5f6b7a">{subtitle}</text>',
        ]
        parts += [
            f'<rect x="{24 + 7 * c}" y="{y - 7 * c + 14}" width="104" height="26" rx="3" fill="{tint}" '
            f'fill-opacity="0.18" stroke="{tint}"/>'
            for c in reversed(range(copies))
        ]
        parts.append(f'<text x="24" y="{y + 60}" fill="#1f2328">{streams}</text>')
        for step, (first, second) in enumerate(steps):
            x = 200 + 190 * step
            parts += [
                f'<path d="M{x - 38} {y + 27}H{x - 4}" stroke="#5f6b7a" marker-end="url(#tip)"/>',
                f'<rect x="{x}" y="{y}" width="150" height="54" rx="5" fill="#f6f8fa" stroke="#c9d1da"/>',
                f'<text x="{x + 75}" y="{y + 23}" text-anchor="middle" fill="#1f2328">{first}</text>',
                f'<text x="{x + 75}" y="{y + 42}" text-anchor="middle" font-size="11.5" fill="#5f6b7a">{second}</text>',
            ]
        parts += [
            f'<path d="M732 {y + 27}H766" stroke="#5f6b7a" marker-end="url(#tip)"/>',
            f'<text x="774" y="{y + 31}" fill="#1f2328">layer input</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    from pathlib import Path

    Path("notebooks/figures/streams.svg").write_text(streams_svg(), encoding="utf-8")
