"""What is read off a serving record, from points that are made up."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mhc.bench import serving_stats as stats


def point(op, impl, **values):
    return {"op": op, "impl": impl, "mode": "graph", "batch": 16, "tp": 1, "status": "ok", "reason": "", **values}


def replays(op, tokens, steps, rounds=50):
    drift = np.linspace(0, 40, rounds)  # of the clock: it hits all modes of a round alike
    return [point(op, impl, T=tokens, samples_us=list(step + drift)) for impl, step in steps.items()]


def served(impl, tok_s, **values):
    return [
        point("serving", impl, round=i, order=0, tok_s=[t], latency_s=[2048 / t], token_sha256="a",
              accepted={"num_drafts": 100.0, "num_accepted_tokens": 50.0}) | values
        for i, t in enumerate(tok_s)
    ]  # fmt: skip


def test_saved_time_is_taken_in_pairs_so_that_drift_cancels():
    points = pd.DataFrame(replays("draft_step_replay", 112, {"unpatched": 3400.0, "mhc": 3386.0}))
    row = stats.saved(points).iloc[0]
    assert (row["T"], row.impl, row.n) == (112, "mhc", 50)
    assert row.saved_us == pytest.approx(14)
    assert row.high_us - row.low_us < 1e-6  # the drift of 40 us is in neither
    assert row.share == pytest.approx(14 / 3420)


def test_interval_covers_a_known_mean():
    generator = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        mean, low, high = stats.mean_interval(generator.normal(5, 2, 40), seed)
        assert low <= mean <= high
        covered += low <= 5 <= high
    assert 180 <= covered <= 198
    with pytest.raises(ValueError, match="at least 2"):
        stats.mean_interval(np.array([1.0]))


def test_gain_compares_the_same_round():
    base = [1000.0, 1100.0, 1200.0, 1300.0]
    points = pd.DataFrame(served("unpatched", base) + served("mhc", [1.01 * t for t in base[::-1]][::-1]))
    table = stats.throughput(points, "graph")
    assert table.loc["mhc", "gain"] == pytest.approx(0.01)
    assert table.loc["mhc", "high"] - table.loc["mhc", "low"] < 1e-9
    assert np.isnan(table.loc["unpatched", "gain"])
    assert table.loc["unpatched", "tok_s"] == 1150
    assert table.loc["mhc", "accepted"] == 0.5
    assert not len(stats.throughput(points, "eager"))


def test_failed_rounds_count_for_nothing():
    points = pd.DataFrame(served("unpatched", [1000.0, 1000.0]) + served("mhc", [9999.0], status="skipped", reason="x"))
    assert stats.throughput(points, "graph").index.tolist() == ["unpatched"]


def test_shares_of_the_draft_step():
    points = pd.DataFrame([point("draft_forward", "mhc", samples_us=[3000.0, 3100.0, 3200.0], step_us=12400.0)])
    assert stats.shares(points).loc[("graph", "mhc"), "share"] == pytest.approx(0.25)


def test_step_gain_adds_draft_and_target_and_projects_the_target_alone():
    points = pd.DataFrame(
        replays("draft_step_replay", 112, {"unpatched": 3400.0, "mhc_post_pre": 3380.0})
        + replays("target_step_replay", 128, {"unpatched": 6000.0, "mhc_post_pre": 5960.0})
    )
    gain = stats.step_gain(points)
    assert gain["share"] == pytest.approx(60 / (3420 + 6020))
    assert gain["real_share"] == pytest.approx((20 + 43 / 4 * 40) / (3420 + 43 / 4 * 6020))
    assert stats.step_gain(points[points.op == "draft_step_replay"]) is None


def test_an_empty_record_has_empty_tables():
    empty = pd.DataFrame()
    assert not len(stats.saved(empty))
    assert not len(stats.throughput(empty, "graph"))
    assert not len(stats.equal_tokens(empty))
    assert not len(stats.shares(empty))
    assert stats.step_gain(empty) is None
