"""The targets are judged by the samples they name and no others."""

from __future__ import annotations

import pandas as pd

from mhc.bench import targets

Row = tuple[str, str, int, str, str, float]  # op, impl, T, timer, protocol, us


def points(*rows: Row) -> pd.DataFrame:
    """Each with four equal samples in one round at H 4096 with warm L2."""
    columns = ("op", "impl", "T", "timer", "protocol", "us")
    frame = pd.DataFrame([dict(zip(columns, row, strict=True)) for row in rows])
    frame["samples_us"] = [[us] * 4 for us in frame.us]
    return frame.assign(H=4096, hc=4, l2="warm", status="ok", process="main", round=0)


def graph(tokens: int, fused_us: float, broadcast_us: float) -> tuple[Row, Row]:
    timed = (tokens, "cuda_graph", "rounds")
    return ("first_pre", "mhc_fused", *timed, fused_us), ("first_pre", "vllm_broadcast", *timed, broadcast_us)


def judged(frame: pd.DataFrame, label: str, tokens: int) -> tuple[float, bool] | None:
    (verdict,) = [v for v in targets.verdicts(frame) if v.target.startswith(label) and tokens == v.T]
    return None if verdict.ratio is None else (round(verdict.ratio.value, 6), bool(verdict.met))


def test_a_ratio_is_of_one_op_timer_and_t_and_says_whether_it_is_met():
    eager = ("first_pre", "vllm_broadcast", 1, "eager", "rounds", 80.0)
    frame = points(*graph(1, 4.0, 8.0), *graph(64, 6.0, 8.0), eager)
    assert judged(frame, "mhc_fused against vllm_broadcast", 1) == (2.0, True)
    assert judged(frame, "mhc_fused against vllm_broadcast", 64) == (round(8 / 6, 6), False)
    assert judged(frame, "mhc_fused against vllm_broadcast", 256) is None


def test_the_published_protocol_is_judged_by_the_first_pre_alone():
    frame = points(
        ("first_pre", "mhc_fused", 1, "eager", "published", 10.0),
        ("first_pre", "vllm_repeat", 1, "eager", "published", 70.0),
        ("first_pre_then_post_pre", "mhc_fused", 1, "eager", "published", 100.0),
        ("first_pre_then_post_pre", "vllm_repeat", 1, "eager", "published", 150.0),
        ("first_pre", "vllm_repeat", 1, "eager", "rounds", 1000.0),
    )
    assert judged(frame, "mhc_fused against vllm_repeat, eager by the published", 1) == (7.0, True)


def test_where_the_one_launch_kernel_is_slower_is_named_with_its_slow_down():
    frame = points(*graph(1, 4.0, 8.0), *graph(512, 9.0, 6.0))
    assert targets.never_slower(frame) == {("warm", 4096, 512): 1.5}
