"""The parts of a draft round: right shapes, every part timed, the table."""

import pytest
import torch

from mhc import __main__ as main
from mhc.dspark import V4Config
from mhc.dspark.parts import arms_difference, draft_parts, random_draft
from mhc.dspark.split_command import FIELDS, measure, table

PARTS = {"forward", "first_pre", "attention", "ffn", "post_pre", "head", "logits", "context", "markov"}


@pytest.mark.parametrize("ffn", ["dense", "moe"])
def test_parts_run_on_inputs_of_the_forward(ffn):
    draft = random_draft(V4Config.tiny(ffn), "cpu")
    parts = draft_parts(draft, 3, 20, "broadcast")
    assert set(parts) == PARTS
    whole = parts["forward"]()
    assert whole.logits.shape == (3, 4, 32)
    assert parts["first_pre"]().residual.shape == (12, 4, 64)
    assert [tensor.shape for tensor in parts["attention"]()] == [(3, 4, 64)] * 2
    assert [tensor.shape for tensor in parts["ffn"]()] == [(12, 64)] * 2
    assert len(parts["post_pre"]()) == 2 * draft.config.draft_layers
    assert torch.equal(parts["logits"](), whole.logits)
    assert parts["markov"]().tokens.shape == (3, 4)
    parts["context"]()
    assert not whole.logits.requires_grad


def test_difference_between_arms():
    draft = random_draft(V4Config.tiny("dense"), "cpu")
    apart = arms_difference(draft, 2, 8, "broadcast")
    assert apart["layer_input"] <= 2**-7 * apart["layer_input_max"]
    assert apart["logits"] < 0.05 * apart["logits_max"]
    with torch.no_grad():
        draft.layers[0].hc_attn_fn.data.mul_(-9)  # unseen by the version counter: a stale fold
    assert arms_difference(draft, 2, 8, "broadcast")["logits"] > apart["logits"]


def test_measure_covers_both_arms():
    draft = random_draft(V4Config.tiny("dense"), "cpu")
    points = list(measure(draft, [1, 2], 8, rounds=2, samples=2, seed=0, timer="cpu_call"))
    assert all(set(FIELDS) == set(point) for point in points)
    seen = {(point["requests"], point["expansion"], point["part"]) for point in points}
    assert {(count, arm, "forward") for count in (1, 2) for arm in ("broadcast", "repeat")} <= seen
    assert {part for _, _, part in seen} == PARTS
    assert " 100.0%" in table(points)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main.main(["draft-split", "--preset", "tiny"]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
