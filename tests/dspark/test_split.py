"""The parts of a draft round: right shapes, every part timed, the table."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
import torch

from mhc import __main__ as main
from mhc import plots_acceptance
from mhc.bench import records
from mhc.dspark import V4Config, split_record
from mhc.dspark.expansion import EXPANSIONS
from mhc.dspark.parts import arms_difference, draft_parts, random_draft
from mhc.dspark.split_command import FIELDS, measure, table

PARTS = {"forward", "first_pre", "attention", "ffn", "post_pre", "head", "logits", "context", "markov"}


@pytest.mark.parametrize("ffn", ["dense", "moe"])
@pytest.mark.parametrize("expansion", sorted(EXPANSIONS))
def test_parts_run_on_inputs_of_the_forward(ffn, expansion):
    draft = random_draft(V4Config.tiny(ffn), "cpu")
    parts = draft_parts(draft, 3, 20, expansion)
    assert set(parts) == PARTS
    whole = parts["forward"]()
    assert whole.logits.shape == (3, 4, 32)
    assert parts["first_pre"]().residual.shape == ((12, 64) if expansion == "collapsed" else (12, 4, 64))
    assert [tensor.shape for tensor in parts["attention"]()] == [(3, 4, 64)] * 2
    assert [tensor.shape for tensor in parts["ffn"]()] == [(12, 64)] * 2
    assert len(parts["post_pre"]()) == 2 * draft.config.draft_layers
    assert torch.equal(parts["logits"](), whole.logits)
    assert parts["markov"]().tokens.shape == (3, 4)
    parts["context"]()
    assert not whole.logits.requires_grad


@pytest.mark.parametrize("expansion", sorted(set(EXPANSIONS) - {"repeat"}))
def test_difference_between_arms(expansion):
    draft = random_draft(V4Config.tiny("dense"), "cpu")
    apart = arms_difference(draft, 2, 8, expansion)
    assert apart["layer_input"] <= 2**-7 * apart["layer_input_max"]
    assert apart["logits"] < 0.05 * apart["logits_max"]
    with torch.no_grad():
        draft.layers[0].hc_attn_fn.data.mul_(-9)  # unseen by the version counter: a stale fold
    assert arms_difference(draft, 2, 8, expansion)["logits"] > apart["logits"]


def test_measure_covers_every_arm():
    draft = random_draft(V4Config.tiny("dense"), "cpu")
    points = list(measure(draft, [1, 2], 8, rounds=2, samples=2, seed=0, timer="cpu_call"))
    assert all(set(FIELDS) == set(point) for point in points)
    seen = {(point["requests"], point["expansion"], point["part"]) for point in points}
    every = {
        (count, arm, part) for count in (1, 2) for arm in EXPANSIONS for part in ("forward", "first_pre", "post_pre")
    }
    assert every <= seen
    assert {part for _, _, part in seen} == PARTS
    assert " 100.0%" in table(points)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record of real measurements on the CPU, as the command writes it."""
    monkeypatch.setenv("MHC_GIT_SHA", "0" * 40)
    draft = random_draft(V4Config.tiny("dense"), "cpu")
    line = records.run_line("draft-split", seed=0, preset="tiny", context=8)
    with records.Recorder(records.free_path(tmp_path, line), line, FIELDS) as recorder:
        for point in measure(draft, [1, 2], 8, rounds=1, samples=3, seed=0, timer="cpu_call"):
            recorder.point(**point)
        recorder.close(difference_to_repeat={"broadcast": arms_difference(draft, 2, 8, "broadcast")})
    return split_record.newest(tmp_path, "tiny")


def test_a_record_becomes_tables(record):
    arms = split_record.by_arm(record)
    assert arms.index.tolist() == [(n, arm) for n in (1, 2) for arm in ("repeat", "broadcast", "collapsed", "table")]
    repeat, broadcast = arms.loc[(2, "repeat")], arms.loc[(2, "broadcast")]
    assert repeat["saved, %"] == 0
    assert broadcast["saved, %"] == pytest.approx(100 * (1 - broadcast.forward_us / repeat.forward_us))
    assert broadcast.low <= broadcast["saved, %"] <= broadcast.high
    share = 100 * broadcast.first_pre_us / broadcast.forward_us
    assert broadcast["first pre, % of forward"] == pytest.approx(share)
    parts = split_record.by_part(record)
    assert parts.index.tolist() == [1, 2]
    assert parts.loc[2, "first_pre"] == broadcast.first_pre_us
    assert split_record.apart(record).loc["broadcast", "layer_input_steps"] <= 2
    fig, ax = plt.subplots()
    plots_acceptance.draft_round(ax, parts)
    assert len(ax.patches) == parts.size
    plt.close(fig)


def test_no_record_says_what_to_do(record, tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m mhc draft-split"):
        split_record.newest(record.path.parent)  # that of a tiny draft is none of v4_flash's
    with pytest.raises(ValueError, match="interrupted"):
        split_record.apart(replace(record, end=None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main.main(["draft-split", "--preset", "tiny"]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
