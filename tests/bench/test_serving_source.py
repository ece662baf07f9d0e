"""The patched forward on a CPU, and Amdahl's bound."""

from __future__ import annotations

import pytest
import torch

import mhc
from mhc.bench import serving_bound, serving_source
from mhc.vllm_plugin.source import examine

CONFIG = mhc.MHCConfig(128, 4)


def test_excerpt_is_what_the_plugin_would_patch():
    match = examine(serving_source.EXCERPT, serving_source.EXCERPT_LAYER)
    assert serving_source.EXCERPT.splitlines()[match.line - 1].strip() == match.statement


def test_without_vllm_the_excerpt_stands_in():
    found = serving_source.find()
    assert "no vLLM is installed" in found.origin
    assert found.draft == serving_source.EXCERPT


def test_both_ways_agree_and_differ_in_what_the_layer_sees():
    source = serving_source.find()
    plain, patched = (serving_source.run_forward(source, active, 9, CONFIG) for active in (False, True))
    assert plain.first_layer_shape == (9, 4, 128)
    assert patched.first_layer_shape == (9, 128)
    assert torch.equal(plain.residual, patched.residual)
    torch.testing.assert_close(plain.layer_input, patched.layer_input, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(plain.hidden, patched.hidden, rtol=2**-6, atol=1e-2)


def test_bound_of_a_part_that_takes_no_time():
    assert serving_bound.most_gain(1e6, 1, 2.0) == pytest.approx(1.0)  # half of the time gone: twice the throughput
    assert serving_bound.most_gain(0.0, 5, 1.0) == 0
    with pytest.raises(ValueError, match="must be shorter than whole_s"):
        serving_bound.most_gain(1e6, 2, 2.0)


def test_steps_of_a_batch():
    assert serving_bound.most_steps(128) == 129
    assert serving_bound.expected_steps(128, 7, 0.0) == 128
    assert serving_bound.expected_steps(128, 7, 1.0) == 16


def test_only_the_target_is_scaled_to_other_depths():
    parts = serving_bound.step_parts(10.0, 100.0, 400.0, layers=43, of_layers=4)
    assert parts == {"first pre": 10.0, "rest of the draft step": 90.0, "target and the rest": 4300.0}
