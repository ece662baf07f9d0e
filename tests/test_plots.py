"""`mhc.plots`: one look for every figure, and figures that do not change from run to run."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from mhc import plots


@pytest.fixture
def ax():
    with mpl.rc_context():
        mpl.use("agg")
        plots.style()
        _, ax = plt.subplots()
        yield ax
        plt.close("all")


def test_token_axis_labels_the_measured_sizes(ax):
    plots.token_axis(ax, [64, 1, 8, 8])
    assert ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "8", "64"]


def test_token_axis_thins_labels_not_ticks(ax):
    plots.token_axis(ax, [2**n for n in range(14)])
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert (len(labels), labels[0], labels[1], labels[12]) == (14, "1", "", "4,096")


def test_refusals(ax):
    with pytest.raises(ValueError, match=r"impl must be one of .*, got 'mine'"):
        plots.color("mine")
    with pytest.raises(ValueError, match="tokens must be positive"):
        plots.token_axis(ax, [0, 1])


def test_colours_of_one_figure_differ():
    shown = ["vllm_repeat", "vllm_broadcast", "torch_compile", "mhc_two_launch", "mhc_fused", "mhc_table", "floor_copy"]
    assert len({plots.color(impl) for impl in shown}) == len(shown)


def test_a_figure_is_the_same_bytes_twice(ax):
    ax.plot([1, 8], [2.0, 3.0], color=plots.color("mhc_fused"))
    plots.token_axis(ax, [1, 8])
    plots.caption(ax, "recorded on a GPU")
    files = [io.BytesIO(), io.BytesIO()]
    for file in files:
        ax.figure.savefig(file, format="png", metadata={"Software": None})
    assert files[0].getvalue() == files[1].getvalue()


def test_streams_svg_is_well_formed_and_stands_alone():
    text = plots.streams_svg()
    ElementTree.fromstring(text)
    assert "href" not in text
    assert "repeat" in text
