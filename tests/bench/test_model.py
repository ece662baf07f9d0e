"""Statistics, byte counts, the latency model and the figures, on numbers that are known beforehand."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from mhc import plots, plots_latency
from mhc.bench import compare, model, published, stats, work

GPU = model.Gpu("known", 132, 4300.0, 60.0)
TRUTH = {
    "floor": np.array([1.2, 0, 0, 0, 0, 18.0, 1.0]),
    "mhc": np.array([1.3, 0.8, 0.05, 3.0, 0.1, 20.0, 1.1]),
}
TOKENS = [2**n for n in range(13)]


def synthetic(noise: float = 0.0) -> pd.DataFrame:
    rng, rows = np.random.default_rng(0), []
    for op in work.OPS:
        for impl in work.IMPLS[op]:
            if model.family(impl) not in TRUTH or impl in ("mhc_noise_rows", "floor_launch"):
                continue
            for hidden in (4096, 7168):
                for t in TOKENS:
                    counts = model.features(work.work(op, impl, t, hidden), t, GPU)
                    time = float(counts @ TRUTH[model.family(impl)]) * (1 + noise * rng.standard_normal())
                    rows.append({"op": op, "impl": impl, "T": t, "H": hidden, "time_us": time})
    return pd.DataFrame(rows)


def test_the_fit_finds_the_costs_that_made_the_times():
    fitted = model.fit(synthetic(), GPU)
    for name, costs in TRUTH.items():
        seen = costs > 0
        np.testing.assert_allclose(fitted.coefficients[name][seen], costs[seen], rtol=0.02)


def test_held_out_points_are_not_in_the_fit_and_their_error_follows_the_noise():
    test = model.holdout(synthetic(noise=0.03), GPU)
    assert 0.2 < len(test) / len(synthetic()) < 0.45
    assert 0.005 < test.relative_error.abs().median() < 0.06
    assert model.holdout(synthetic(), GPU).relative_error.abs().max() < 1e-3


def test_a_gpu_of_half_the_size_is_slower_where_work_counts_and_not_where_launches_do():
    fitted = model.fit(synthetic(), GPU)
    half = model.Gpu("half", 66, 2150.0, 60.0)
    small, large = (fitted.predict("first_pre", "mhc_fused", t, 4096, half) for t in (1, 4096))
    assert small < 1.05 * fitted.predict("first_pre", "mhc_fused", 1, 4096)
    assert 1.8 < large / fitted.predict("first_pre", "mhc_fused", 4096, 4096) < 2.05


def test_an_unfitted_family_is_refused():
    fitted = model.fit(synthetic(), GPU)
    with pytest.raises(ValueError, match="fitted family"):
        fitted.predict("first_pre", "vllm_repeat", 1, 4096)
    with pytest.raises(ValueError, match="points must hold"):
        model.fit(synthetic().iloc[:1], GPU)


def test_the_model_describes_the_earlier_run():
    test = model.holdout(published.prior(), model.Gpu("H200", 132, published.PRIOR_COPY_GBS, 60.0))
    assert test.relative_error.abs().median() < 0.15


def test_ratio_of_medians_and_its_interval():
    rng = np.random.default_rng(1)
    slow, fast = 3 * np.exp(0.05 * rng.standard_normal(200)), np.exp(0.05 * rng.standard_normal(200))
    found = stats.ratio(slow, fast)
    assert found.value == np.median(slow) / np.median(fast)
    assert found.low < 3 < found.high
    assert found.high - found.low < 0.2
    # medians: one wild sample moves neither
    assert stats.ratio([*slow, 1e6], fast).value == pytest.approx(found.value, rel=0.01)
    with pytest.raises(ValueError, match="at least 2"):
        stats.ratio([1.0], [1.0, 2.0])


def test_band():
    found = stats.band(range(101))
    assert (found.median, found.low, found.high) == (50, 5, 95)
    with pytest.raises(ValueError, match="empty"):
        stats.band([])


def test_bytes_by_hand():
    read, written = work.floor_bytes("first_pre", 10, 4096)
    assert read == 10 * 4096 * 2 + 10 * 8 + 10 * 21 * 4 + 4096 * 2
    assert written == 10 * 4096 * 2 * 5 + 10 * 20 * 4
    read, written = work.floor_bytes("post_pre", 1000, 4096)
    assert read + written == pytest.approx(1000 * 81_920 + 24 * 16384 * 4, rel=0.01)


@pytest.mark.parametrize("op", work.OPS)
def test_no_implementation_moves_less_than_the_floor_of_its_op(op):
    for impl in set(work.IMPLS[op]) - {"floor_launch", "mhc_collapsed"}:
        assert work.work(op, impl, 64, 4096).bytes >= sum(work.floor_bytes(op, 64, 4096)) * 0.999


def test_work_refuses_unknown_names():
    with pytest.raises(ValueError, match="op must be"):
        work.work("pre", "mhc_fused", 1, 4096)
    with pytest.raises(ValueError, match="impl of post_pre must be"):
        work.work("post_pre", "mhc_table", 1, 4096)


def test_published_figures_fit_their_own_ratio():
    repeat, broadcast = published.H20_EAGER
    assert repeat.middle_us / broadcast.middle_us == pytest.approx(published.H20_SPEEDUP, rel=0.02)


def test_every_figure_draws():
    with mpl.rc_context():
        mpl.use("agg")
        plots.style()
        table = compare.prior_curves()
        first = table[table.op == "first_pre"]
        gpu = model.Gpu("NVIDIA H20", 78, 3600.0, 60.0)
        fitted = model.fit(published.prior(), GPU)
        _, axes = plt.subplots(2, 4)
        ax = axes.ravel()
        plots_latency.published(ax[0], published.H20_EAGER, 3.0)
        plots_latency.sweep(ax[1], first, "sweep")
        assert len(ax[1].lines) == 3
        gain = compare.median_speedups(first, "vllm_broadcast", "vllm_repeat")
        assert gain.speedup.loc[1] == pytest.approx(9.84 / 6.80)
        plots_latency.speedup_lines(ax[2], {"vllm_broadcast": gain, "mhc_fused": gain.iloc[:0]}, "speed-ups")
        at64 = first[first["T"] == 64]
        plots_latency.host_and_device(ax[3], {"cpu_call": at64, "cuda_graph": at64}, "clocks")
        plots_latency.held_out(ax[4], model.holdout(published.prior(), GPU))
        plots_latency.breakdown(ax[5], fitted, "first_pre", ["vllm_repeat"], 64, 4096, gpu)
        predicted = model.predict_all(fitted, ["vllm_repeat", "mhc_fused"], [1, 64], gpu)
        assert list(predicted.columns) == ["vllm_repeat"]
        plots_latency.prediction(ax[6], predicted, 0.2, "prediction", first)
        plt.close("all")


def test_plots_know_every_implementation():
    for op in work.OPS:
        for impl in work.IMPLS[op]:
            assert plots.color(impl)
            assert impl in plots_latency.ORDER
