"""The serving bench without vLLM or a GPU: arguments, phases and records with an engine that is made up."""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

import pytest
from serving_fake import Fake

from mhc.bench import command, records, serving, serving_engine, serving_model, serving_phases, serving_stats
from mhc.bench.serving_engine import Settings
from mhc.bench.serving_phases import Plan, Timetable


def arguments(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["serving", *words])


def measured(tmp_path, engine, *words, budget_s=60.0):
    settings, plan = serving.plan(arguments("--tokens", "8", "--rounds", "3", "--replays", "12", *words))
    return records.load(serving.record(engine, settings, plan, tmp_path, time.perf_counter(), budget_s))


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    monkeypatch.setenv("MHC_GIT_SHA", "0123456789abcdef")


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def record(tmp_path, fake):
    return measured(tmp_path, fake)


def test_record_holds_every_phase_mode_and_round(record):
    assert record.complete
    assert record.run["what"] == "serving"
    assert record.run["model"]["hidden_size"] == 4096
    assert record.run["weights"] == "random"
    ok = record.points
    assert set(ok.status) == {"ok"}
    replays = ok[ok.op == "draft_step_replay"]
    assert sorted(set(replays["T"])) == [7, 112, 448]
    assert set(replays.impl) == set(serving.DEFAULT_MODES)
    assert replays.samples_us.map(len).eq(12).all()
    for mode in ("graph", "eager"):
        served = ok[(ok.op == "serving") & (ok["mode"] == mode)]
        assert sorted(served["round"]) == sorted([0, 1, 2] * 4)
        assert served.token_sha256.nunique() == 1


def test_rounds_are_shuffled_and_graphs_are_off_when_eager(fake, record):
    served = record.points[(record.points.op == "serving") & (record.points["mode"] == "graph")]
    orders = {tuple(rows.sort_values("order").impl) for _, rows in served.groupby("round")}
    assert len(orders) > 1
    steps = record.points[record.points.op == "serving"]
    for point in steps.itertuples():
        used = point.counted["graph_steps"] > 0
        assert used == (point.mode == "graph")
        assert (point.counted["eager_steps"] > 0) == (point.mode == "eager")


def test_first_kernels_and_drafts_are_kept_as_evidence(record):
    at = record.points[(record.points.op == "draft_step_replay") & (record.points["T"] == 112)].set_index("impl")
    assert at.loc["unpatched", "first_kernels"][1] == ["repeat", 5.5]
    assert len(at.loc["unpatched", "first_kernels"]) == serving_phases.FIRST_KERNELS
    assert at.kernels["unpatched"] == 22
    assert at.kernels["mhc"] == 1
    assert (at.drafts_as_unpatched == 1).all()


def test_refit_says_whether_weights_and_graphs_follow_and_return(record):
    refit = record.points[record.points.op == "refit"].set_index("impl")
    assert refit.follows.all()
    assert refit.same_storage.all()
    assert (refit.drafts_as_before == 0).all()
    assert (refit.drafts_as_unpatched == 1).all()
    assert (refit.drafts_restored == 1).all()


def test_a_divergence_is_recorded_with_how_near_a_tie_it_is(tmp_path):
    record = measured(tmp_path, Fake(diverges=("mhc",)), "--phases", "graph")
    found = serving_stats.rows(record.points, op="divergence")
    assert found.impl.tolist() == ["mhc"]
    assert found[["request", "position"]].iloc[0].tolist() == [1, 7]
    assert found.logprobs.iloc[0] == [-1.25, -1.26]
    equal = serving_stats.equal_tokens(record.points)
    assert equal.loc[("graph", "mhc"), "equal"].tolist() == [0]
    assert equal.loc[("graph", "vllm_kernel"), "equal"].tolist() == [3]


def test_an_absent_mode_is_one_row_with_its_reason_and_is_not_run(tmp_path):
    fake = Fake(absent=("mhc_post_pre",))
    record = measured(tmp_path, fake)
    missing = record.points[record.points.impl == "mhc_post_pre"]
    assert missing.status.tolist() == ["absent"]
    assert missing.reason.tolist() == ["made up to be absent"]
    assert "mhc_post_pre" not in fake.captured
    assert "target_step_replay" not in set(record.points.op)


def test_no_time_is_left_to_waste_and_what_is_left_out_is_said(tmp_path, monkeypatch):
    fake = Fake(time_s=1.0)
    monkeypatch.setattr(serving_phases, "time", SimpleNamespace(perf_counter=lambda: fake.clock_s))
    settings, plan = serving.plan(arguments("--phases", "graph,eager,replay", "--rounds", "3"))
    record = records.load(serving.record(fake, settings, plan, tmp_path, started=0.0, budget_s=10.0))
    assert record.complete
    points = record.points
    ran, skipped = points[points.status == "ok"], points[points.status == "skipped"]
    assert set(skipped.reason) == {serving_phases.LATE}
    # four warm-ups, five batches, and one and a half more would not have fitted
    assert len(ran[ran.op == "serving"]) == 5
    assert len(fake.log) == 10
    assert len(points[(points.op == "serving") & (points["mode"] == "eager")]) == 12
    assert (skipped.op == "draft_step_replay").sum() == 3
    assert set(ran["mode"]) == {"graph"}


def test_a_phase_that_fails_is_recorded_and_the_next_one_runs(tmp_path, fake, monkeypatch):
    def broken(part, tokens, names, rounds, seed):
        raise RuntimeError("made up")

    monkeypatch.setattr(fake, "mhc_replay", broken, raising=False)
    record = measured(tmp_path, fake, "--phases", "replay,graph")
    failed = record.points[record.points.status == "failed"]
    assert failed[["op", "reason"]].to_numpy().tolist() == [["replay", "RuntimeError: made up"]]
    assert (record.points.op == "serving").sum() == 12


def test_eager_alone_needs_no_graphs(tmp_path, fake):
    settings, _ = serving.plan(arguments("--phases", "eager"))
    assert not settings.graphs
    assert "compilation_config" not in serving_engine.arguments(tmp_path, settings, 0)
    measured(tmp_path, fake, "--phases", "eager")
    assert not fake.captured


def test_engine_arguments_follow_the_settings(tmp_path):
    given = serving_engine.arguments(tmp_path, Settings(tp=2, batches=(1, 16)), 3)
    assert given["tensor_parallel_size"] == 2
    assert given["enable_expert_parallel"]
    assert given["compilation_config"]["cudagraph_capture_sizes"] == [7, 8, 112, 128]
    assert given["speculative_config"] == {"method": "dspark", "num_speculative_tokens": 7}
    assert given["max_num_batched_tokens"] == 1024
    one = serving_engine.arguments(tmp_path, Settings(batches=(128,), acceptance_length=3.0), 3)
    assert "tensor_parallel_size" not in one
    assert one["max_num_batched_tokens"] == 2048
    assert one["speculative_config"]["synthetic_acceptance_length"] == 3.0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--modes", "unpatched,fast"], "modes must be different ones of"),
        (["--modes", "mhc"], "modes must contain unpatched"),
        (["--phases", "graph,graph"], "phases must be different ones of"),
        (["--rounds", "1"], "rounds must be at least 2, got 1"),
        (["--batch", "0"], "batches must be positive"),
        (["--tp", "0"], "tp must be at least 1"),
        (["--acceptance-length", "9"], "acceptance_length must be 0 or between 1 and 8"),
    ],
)
def test_wrong_arguments_are_named(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        serving.plan(arguments(*words))


def test_without_vllm_or_a_gpu_it_is_one_sentence(capsys, monkeypatch):
    assert command.run(arguments()) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err
    monkeypatch.setattr(serving.installed, "find", lambda: ("0.26.0", None))
    assert command.run(arguments("--tp", "99")) == 2
    assert "needs 99 CUDA GPUs" in capsys.readouterr().err


def test_prompts_differ_and_hold_no_special_token():
    rows = serving_model.prompts(64, 8, seed=5)
    assert len({tuple(row) for row in rows}) == 64
    assert all(100 <= token < serving_model.CONFIG["dspark_noise_token_id"] - 100 for row in rows for token in row)


def test_model_folder_is_a_config(tmp_path):
    import json

    written = json.loads((serving_model.write(tmp_path / "m") / "config.json").read_text())
    assert written == serving_model.CONFIG
    assert {0, 4, 128} == set(written["compress_ratios"])


def test_plan_and_timetable_keep_to_their_limits():
    times = Timetable(time.perf_counter() - 10, 20.0)
    assert times.has(5)
    assert not times.has(15)
    with pytest.raises(ValueError, match="replays must be at least 2"):
        Plan(("unpatched",), ("graph",), 1, 1, 1, 2, (1,), 1, 1, 0)
