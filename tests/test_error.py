"""The a-priori bounds: they hold for every case, they are not vacuous, and adversaries reach them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mhc
from mhc import MHCConfig, error, reference
from mhc.arithmetic import ARITHMETICS, err_ulp, steps_bf16
from mhc.arms import CASES, FOLDS, NORMS, Inputs, evaluate, exact, make_inputs
from mhc.error import PreError, measure, pre_bound

CONFIG = MHCConfig(hidden_size=512)


def errors(inputs: Inputs, how: str, arithmetic: str, norm: str = "spec") -> PreError:
    return measure(evaluate(inputs, CONFIG, how, arithmetic, norm), exact(inputs, CONFIG), norm)


@pytest.mark.parametrize("case", CASES)
def test_every_arm_stays_below_its_bound(case: str) -> None:
    inputs = make_inputs(case, 8, CONFIG, seed=3)
    for how, arithmetic, norm in itertools.product(FOLDS, ARITHMETICS, NORMS):
        measured, bound = errors(inputs, how, arithmetic, norm), pre_bound(inputs, CONFIG, how, arithmetic, norm)
        for name, got, limit in zip(bound._fields, measured, bound, strict=True):
            assert (got <= limit).all(), f"{how} {arithmetic} {norm} {name}: {got.max():.3e} above {limit.max():.3e}"
        assert bound.mixes.max() < 1e3 * measured.mixes.max(), f"{how} {arithmetic} vacuous"
        assert bound.post.max() < 1e3 * measured.post.max(), f"{how} {arithmetic} vacuous"


def test_an_adversary_reaches_the_truncation_bound() -> None:
    inputs = make_inputs("aligned", 1, CONFIG, seed=0)
    measured = errors(inputs, "fold64", "tf32_truncate").mixes[0, 0]
    bound = pre_bound(inputs, CONFIG, "fold64", "tf32_truncate").mixes[0, 0]
    assert bound / 4 < measured <= bound


def test_folding_first_is_never_the_worse_bound() -> None:
    for case in CASES:
        inputs = make_inputs(case, 4, CONFIG, seed=1)
        for arithmetic in ("tf32_truncate", "fp32"):
            folded, repeated = (pre_bound(inputs, CONFIG, how, arithmetic) for how in ("fold64", "repeat"))
            assert (folded.mixes <= repeated.mixes * 1.01).all()


def test_a_cancelling_fold_keeps_seven_digits_only_in_fp64() -> None:
    inputs = make_inputs("cancelling", 8, CONFIG, seed=0)
    size = exact(inputs, CONFIG).mixes.abs().mean()
    relative = {how: errors(inputs, how, "fp32").mixes.max() / size for how in FOLDS}
    assert relative["fold64"] < 1e-6
    assert relative["fold"] > 1e3 * relative["fold64"]
    assert relative["repeat"] > 1e3 * relative["fold64"]


def test_the_analytic_norm_is_a_correct_rounding_and_the_specs_is_not() -> None:
    inputs = make_inputs("gaussian", 64, CONFIG, seed=0)
    analytic = errors(inputs, "fold64", "fp32", "analytic").layer_input_ulp.max()
    spec = errors(inputs, "fold64", "fp32", "spec").layer_input_ulp.max()
    assert analytic < 0.51 < 1 < spec < 2.52
    assert pre_bound(inputs, CONFIG, "fold64", "fp32", "analytic").layer_input_ulp.max() < 0.51


def test_the_public_op_obeys_the_bound_of_a_serial_sum() -> None:
    for case in CASES:
        inputs = make_inputs(case, 8, CONFIG, seed=2)
        x, fn, scale, base, norm_weight = inputs
        out = mhc.pre_broadcast(x, mhc.fold(fn, 4), scale, base, norm_weight, CONFIG)
        truth = exact(inputs, CONFIG)
        bound = pre_bound(inputs, CONFIG, "fold64", "fp32", sum_depth=CONFIG.hidden_size)
        assert ((out.post.squeeze(-1) - truth.post).abs() <= bound.post).all()
        assert ((out.comb - truth.comb).abs().amax((1, 2)) <= bound.comb).all()
        assert (err_ulp(out.layer_input, truth.layer_input).amax(1) <= bound.layer_input_ulp).all()


@pytest.mark.parametrize("case", CASES)
def test_broadcast_and_repeat_stay_within_their_joint_bound(case: str) -> None:
    inputs = make_inputs(case, 8, CONFIG, seed=4)
    broadcast = evaluate(inputs, CONFIG, "fold64", "fp32")
    repeat = evaluate(inputs, CONFIG, "repeat", "tf32_truncate")
    bound = error.broadcast_bound(inputs, CONFIG, "fp32")
    assert ((broadcast.mixes - repeat.mixes).abs() <= bound.mixes).all()
    assert ((broadcast.comb - repeat.comb).abs().amax((1, 2)) <= bound.comb).all()
    steps = steps_bf16(broadcast.layer_input, repeat.layer_input).amax(1)
    assert (steps <= 2 * bound.layer_input_ulp).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: make_inputs("cauchy", 1, CONFIG, 0), "case must be one of gaussian, .*, got 'cauchy'"),
        (lambda i: evaluate(i, CONFIG, "fold32", "fp32"), "how must be one of repeat, fold, fold64, got 'fold32'"),
        (lambda i: evaluate(i, CONFIG, "fold", "fp32", "l2"), "norm must be one of spec, analytic, none, got 'l2'"),
        (lambda i: evaluate(i, CONFIG, "fold", "fp8"), "arithmetic must be one of .*, got 'fp8'"),
        (lambda i: pre_bound(i, CONFIG, "fold", "fp8"), "arithmetic must be one of .*, got 'fp8'"),
        (lambda i: pre_bound(i, CONFIG, "fold32", "fp32"), "how must be one of"),
    ],
)
def test_refusals(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(make_inputs("gaussian", 1, CONFIG, 0))  # type: ignore[operator]


# ---- Sinkhorn and the column-sum collapse ----


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 20), st.floats(0.01, 12), st.floats(1e-7, 1))
def test_sinkhorn_errs_less_than_its_bound(seed: int, hc: int, iters: int, size: float, off: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = MHCConfig(hidden_size=64, hc_mult=hc, sinkhorn_iters=iters)
    logits = size * torch.randn(1, hc, hc, dtype=torch.float64, generator=generator)
    truth = reference.sinkhorn(logits, iters, config.sinkhorn_eps)
    # adversaries sit in the corners of the box
    signs = torch.randint(0, 2, (64, hc, hc), generator=generator) * 2 - 1
    moved = reference.sinkhorn((logits + off * signs).float(), iters, config.sinkhorn_eps)
    rounding = 2.0**-24 * (logits.abs().max() + off)
    assert (moved - truth).abs().max() <= error.sinkhorn_bound(logits, torch.tensor([off]) + rounding, config).item()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 20), st.floats(0.01, 60))
def test_a_column_lacks_no_more_than_the_deficit(seed: int, hc: int, iters: int, size: float) -> None:
    config = MHCConfig(hidden_size=64, hc_mult=hc, sinkhorn_iters=iters)
    logits = size * torch.randn(16, hc, hc, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits[0] = 0
    logits[0, :, 0] = size  # every row wants the same column
    lacking = 1 - reference.sinkhorn(logits, iters, config.sinkhorn_eps).sum(-2)
    assert lacking.min() > 0
    assert lacking.max() <= error.column_deficit(config) + 1e-15


@pytest.mark.parametrize("output", ["random", "cancelling"])
def test_the_collapse_costs_less_than_its_bound(output: str) -> None:
    inputs = make_inputs("large_base", 32, CONFIG, seed=0)
    stages = evaluate(inputs, CONFIG, "fold64", "fp32")
    x = inputs.x
    written: Tensor = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    if output == "cancelling":
        written = -x.float() / stages.post[:, :1]
    written = written.bfloat16()
    full = reference.post(written, reference.expand(x, 4), stages.post, stages.comb)
    collapsed = reference.post_collapsed(written, x, stages.post)
    bound = error.collapse_bound(written, x, stages.post, CONFIG)
    difference = (full.double() - collapsed.double()).abs()
    assert (difference <= bound).all()
    assert bound.max() < 100 * difference.max()
