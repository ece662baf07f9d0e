"""The sweep without a GPU: plans, rounds, statuses and the two-process protocol, with clocks that are made up."""

import argparse
import io
import json
from unittest import mock

import pytest
import torch

from mhc import MHCConfig
from mhc.bench import executor, floor, hardware, impls, latency, records, summary
from mhc.bench.inputs import Buffers, Inputs
from mhc.bench.work import IMPLS, OPS


class Fake:
    """An executor whose clock is `speed[impl] * T` us; `vllm_repeat` is absent."""

    def __init__(self):
        self.log = []

    def prepare(self, point):
        if point.impl == "vllm_repeat":
            return {"status": "absent", "reason": "not here", "error": None, "calls_per_sample": 1}
        return {"status": "ok", "reason": "", "error": 1e-7, "calls_per_sample": 40}

    def sample(self, point, n):
        self.log.append(point)
        speed = {"mhc_fused": 1.0, "vllm_broadcast": 2.0, "mhc_table": 0.5, "floor_copy": 0.4}.get(point.impl, 3.0)
        return [speed * point.T * (1 + 0.01 * i) for i in range(n)]

    def release(self):
        self.log.append("release")


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("MHC_GIT_SHA", "0123456")
    run = records.run_line("latency", seed=0) | {"gpu": "NVIDIA H200"}
    main, peers = Fake(), Fake()
    groups = latency.plan(["first_pre"], None, [1, 64], [4096], ["cuda_graph"], ["warm", "cold"])
    with records.Recorder(tmp_path / "a.jsonl", run) as recorder:
        for group in groups:
            latency.measure(group, {"main": main, "peers": peers}, recorder, rounds=3, samples=5, seed=1)
    return records.load(tmp_path / "a.jsonl"), main, peers


def test_every_point_is_sampled_in_every_round_in_shuffled_order(sweep):
    record, *_ = sweep
    ok = record.points[record.points.status == "ok"]
    for _, rows in ok.groupby(["impl", "T", "l2", "process"]):
        assert sorted(rows["round"]) == [0, 1, 2]
    orders = [
        tuple(rows.sort_values("order").impl) for _, rows in ok[(ok["T"] == 64) & (ok.l2 == "warm")].groupby("round")
    ]
    assert len(set(orders)) == 3


def test_peers_run_in_their_process_and_floors_in_both(sweep):
    record, main, peers = sweep
    where = record.points.groupby("impl").process.unique().map(set)
    assert where["vllm_broadcast"] == {"peers"}
    assert where["mhc_fused"] == {"main"}
    assert where["floor_copy"] == {"main", "peers"}
    assert main.log[-1] == peers.log[-1] == "release"


def test_what_did_not_run_is_one_row_with_its_reason(sweep):
    record, *_ = sweep
    rows = record.points[record.points.impl == "vllm_repeat"]
    assert set(rows.status) == {"absent"}
    assert set(rows.reason) == {"not here"}
    assert len(rows) == 4  # two T, two L2 states


def test_summary_states_ratios_targets_and_absences(sweep):
    text = summary.text(sweep[0])
    assert "mhc_fused against vllm_broadcast, first_pre T=64: bound 1.6, 2.00 met" in text
    assert "mhc_table over floor_copy, first_pre T=64: bound 1.4, 1.25 met" in text
    assert "mhc_fused slower than vllm_broadcast at: no point" in text
    assert "absent: vllm_repeat first_pre, 4 points: not here" in text
    assert "mhc_post_pre against vllm_post_pre, post_pre T=1: bound 1.4, not measured" in text


def test_a_used_up_budget_leaves_skipped_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("MHC_GIT_SHA", "0123456")
    group = latency.plan(["post_pre"], ["mhc_post_pre"], [1], [4096], ["cuda_graph"], ["warm"])[0]
    with records.Recorder(tmp_path / "a.jsonl", records.run_line("latency", seed=0)) as recorder:
        latency.measure(group, {"main": Fake()}, recorder, 3, 5, 0, deadline=0.0)
    points = records.load(tmp_path / "a.jsonl").points
    assert points.status.tolist() == ["skipped"]
    assert "budget" in points.reason[0]


def test_plan_covers_every_impl_and_keeps_host_timers_to_small_T():
    groups = latency.plan(OPS, None, [1, 4096], [4096, 5120], ["cuda_graph", "cpu_call"], ["warm"])
    points = [point for group in groups for point in group]
    graph = {(p.op, p.impl) for p in points if p.timer == "cuda_graph"}
    assert graph == {(op, impl) for op in OPS for impl in IMPLS[op]}
    host = [p for p in points if p.timer == "cpu_call"]
    assert {(p.T, p.H) for p in host} == {(1, 4096)}


def test_torch_compile_is_planned_at_few_T():
    groups = latency.plan(OPS, ["torch_compile", "floor_copy"], [1, 2, 64], [4096], ["cuda_graph"], ["warm"])
    planned = {(p.impl, p.T) for group in groups for p in group}
    assert {t for impl, t in planned if impl == "torch_compile"} == {1, 64}
    assert ("floor_copy", 2) in planned


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"ops": ["first"]}, "unknown.*first"),
        ({"impls": ["mine"]}, "unknown.*mine"),
        ({"timers": ["wall"]}, "unknown.*wall"),
        ({"l2": ["warm", "hot"]}, "unknown.*hot"),
        ({"tokens": [1, 0]}, "T must be at least 1, got 0"),
        ({"hidden": [4096, 100]}, "hidden_size must be .* got 100"),
    ],
    ids=["op", "impl", "timer", "l2", "T", "H"],
)
def test_plan_refuses_what_cannot_be_measured(bad, says):
    arguments = {"ops": OPS, "impls": None, "tokens": [1], "hidden": [4096], "timers": ["eager"], "l2": ["warm"]}
    with pytest.raises(ValueError, match=says):
        latency.plan(**arguments | bad)


def test_the_process_protocol_answers_and_reports_errors():
    point = list(executor.Point("first_pre", "mhc_fused", 2, 4096, 4, "cuda_graph", "warm"))
    commands = [["prepare", point], ["sample", point, 2], ["release"], ["versions"], ["dance"]]
    answers = io.StringIO()
    executor.serve(Fake(), io.StringIO("".join(json.dumps(c) + "\n" for c in commands)), answers)
    prepared, sampled, released, versions, refused = map(json.loads, answers.getvalue().splitlines())
    assert prepared["result"]["status"] == "ok"
    assert sampled["result"] == [2.0, 2.02]
    assert released["result"] is None
    assert "torch" in versions["result"]
    assert "dance" in refused["error"]


def test_a_real_second_process_answers_and_its_death_is_an_error():
    remote = executor.Remote(seed=0, vocab=16)
    assert remote.versions()["torch"]
    remote._process.kill()
    with pytest.raises(RuntimeError, match="process ended"):
        remote.versions()


@pytest.fixture(scope="module")
def small():
    return Inputs(MHCConfig(64), seed=0, device="cpu", vocab=50)


@pytest.mark.parametrize(
    ("op", "impl"),
    [
        ("first_pre", "mhc_repeat"),
        ("first_pre", "mhc_two_launch"),
        ("first_pre", "mhc_noise_rows"),
        ("post_pre", "mhc_post_pre"),
        ("first_pre_then_post_pre", "mhc_fused"),
        ("first_pre_then_post_pre", "mhc_table"),
        ("first_pre_then_post_pre", "mhc_collapsed"),
    ],
)
def test_implementations_agree_with_fp64_before_they_are_timed(small, op, impl):
    calls, error = impls.prepare(small, op, impl, tokens=14, sets=3)
    assert len(calls) == 3
    assert 0 < error < 1e-5
    with mock.patch.object(Buffers, "_randn", side_effect=AssertionError("drawn while a graph is captured")):
        for call in calls:
            call()


def test_noise_rows_take_whole_blocks(small):
    with pytest.raises(impls.Skip, match="T = 64 is no multiple") as skip:
        impls.prepare(small, "first_pre", "mhc_noise_rows", 64, 1)
    assert skip.value.status == "skipped"
    b = small.buffers(14, 1)[0]
    assert torch.equal(b.blocks[::7], b.x[::7])
    assert torch.equal(b.blocks[8:14], small.embedding[-1].expand(6, -1))


def rounded_elsewhere(streams):
    """Streams whose every third element is the bf16 neighbour that a slightly different sum rounds to."""
    bits = streams.view(torch.int16).clone()
    bits.view(-1)[::3] += 1
    return bits.view(torch.bfloat16)


def replay(post_pre, change):
    """`post_pre` whose new streams are changed, and whose pre reads the changed ones."""

    def call(output, residual, post, comb, *weights):
        streams = change(post_pre(output, residual, post, comb, *weights).residual)
        return (streams, *impls.mhc.ops.pre(streams, *weights)[1:])

    return call


def test_a_next_pre_is_held_to_the_streams_that_it_read(small, monkeypatch):
    post_pre = impls.mhc.post_pre
    b = small.buffers(14, 1)[0]
    truth = impls._next_expected("post_pre", small, b, b.streams, 5e-5)[0]

    def to_the_other_side(streams):  # still within one rounding of the exact value
        up = rounded_elsewhere(streams)
        keep = (up.double() - truth).abs() <= impls.ROUNDING_BF16 * truth.abs()
        return torch.where(keep, up, streams)

    monkeypatch.setattr(impls.mhc, "post_pre", replay(post_pre, to_the_other_side))
    rounded = truth.to(torch.bfloat16)
    assert not torch.equal(to_the_other_side(rounded), rounded)
    _, error = impls.prepare(small, "post_pre", "mhc_post_pre", 14, 1)
    assert error < 1e-5


@pytest.mark.parametrize("op", ["post_pre", "first_pre_then_post_pre"])
def test_streams_off_by_more_than_a_rounding_are_never_timed(small, monkeypatch, op):
    impl = "mhc_post_pre" if op == "post_pre" else "mhc_fused"
    monkeypatch.setattr(impls.mhc, "post_pre", replay(impls.mhc.post_pre, lambda s: s + s.abs() * 2**-6))
    with pytest.raises(impls.Skip, match="streams is off") as skip:
        impls.prepare(small, op, impl, 14, 1)
    assert skip.value.status == "failed"


@pytest.mark.parametrize("change", [lambda s: s[:, :2], lambda s: s * float("nan")])
def test_streams_of_another_shape_or_nan_are_never_timed(small, monkeypatch, change):
    def call(*args):
        out = impls.mhc.ops.post_pre(*args)
        return (change(out.residual), *out[1:])

    monkeypatch.setattr(impls.mhc, "post_pre", call)
    with pytest.raises(impls.Skip, match="streams"):
        impls.prepare(small, "post_pre", "mhc_post_pre", 14, 1)


def test_a_wrong_or_unwritten_output_is_never_timed(small, monkeypatch):
    def broken(*args, **kwargs):
        out = impls.mhc.ops.pre_broadcast(*args, **kwargs)
        out.comb[-1, 0, 0] = float("nan")
        return out

    monkeypatch.setattr(impls.mhc, "pre_broadcast", broken)
    with pytest.raises(impls.Skip, match="comb is off by nan") as skip:
        impls.prepare(small, "first_pre", "mhc_two_launch", 5, 1)
    assert skip.value.status == "failed"


def test_check_rejects_a_transposed_comb(small):
    b = small.buffers(4, 1)[0]
    _, post, comb, y = impls._first_expected(small, b.x)
    with pytest.raises(impls.Skip, match="comb"):
        impls.check((None, post.float(), comb.transpose(1, 2).float(), y.bfloat16()), (None, post, comb, y), 1e-4)


def test_buffers_are_reproducible_and_sets_have_their_own_weights(small):
    again = Inputs(MHCConfig(64), seed=0, device="cpu", vocab=50)
    one, two = small.buffers(6, 2)
    assert torch.equal(one.streams, again.buffers(6, 1)[0].streams)
    assert not torch.equal(one.x, two.x)
    assert one.first is small.first
    assert two.first.fn.data_ptr() != one.first.fn.data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_one_sentence_says_what_to_do(capsys):
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    assert latency.run(parser.parse_args([])) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="no CUDA GPU"):
        hardware.copy_bandwidth_gbs()


def test_floor_lengths_hold_the_bytes_and_vectorise():
    for nbytes in (2, 32, 33, 16476):
        elements = floor.length(nbytes)
        assert elements % floor.ROUND_TO == 0
        assert nbytes <= 2 * elements < nbytes + 2 * floor.ROUND_TO
    with pytest.raises(ValueError, match="source must be 1-D bfloat16"):
        floor.copy(torch.zeros(16), torch.zeros(16, dtype=torch.bfloat16))
