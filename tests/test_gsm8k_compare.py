"""From a recorded evaluation to tables: a record written by hand, and each table against a count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mhc import plots_acceptance
from mhc.bench.records import run_line
from mhc.gsm8k import compare
from mhc.gsm8k.rows import Record

QUESTIONS, K = 24, 3


def row(arm: str, number: int, k: int, temperature: float, accepted: list[int], correct: bool) -> Record:
    return {
        "record": "question",
        "arm": arm,
        "id": number,
        "k": k,
        "temperature": temperature,
        "drafts": 10,
        "accepted_per_position": accepted[:k],
        "tokens": 10 + sum(accepted[:k]),
        "prediction": 1,
        "gold": 1 if correct else 2,
        "correct": correct,
        "invalid": False,
        "text_sha256": f"{arm}{number}" if number < 2 else str(number),  # the first two texts differ between arms
    }


@pytest.fixture
def evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> compare.Evaluation:
    monkeypatch.setenv("MHC_GIT_SHA", "0" * 40)
    lines = [run_line("gsm8k", seed=0, engine="mini", k=K, questions=QUESTIONS, max_tokens=8)]
    for arm in ("broadcast", "repeat"):
        for temperature in (1.0, 0.0):
            for number in range(QUESTIONS):
                accepted = [9, 6, 3] if number % 2 else [8, 4, 2]
                lines.append(row(arm, number, K, temperature, accepted, correct=number < (3 if arm == "repeat" else 1)))
        lines.append(total(arm, 0.0, drafted=720, accepted=384))
    for k in (1, 2):
        lines += [row("broadcast", number, k, 1.0, [8, 5], False) for number in range(QUESTIONS)]
    lines += [
        total("broadcast_c0.5", 0.5, drafted=480, accepted=360),
        total("broadcast_c0.9", 0.9, drafted=0, accepted=0),
    ]
    difference = {"arm": "broadcast", "blocks": 200, "differing": 3, "first_position": [0, 1, 2], "logit_error": 0.1}
    lines.append({"record": "difference", **difference})
    lines.append({"record": "equality", "arm": "broadcast", "questions": QUESTIONS, "differing_ids": [3, 4]})
    for arm, wall in (("plain", 2.0), ("repeat", 1.25), ("broadcast", 1.0)):
        fields = {"arm": arm, "requests": 1, "launch": "eager", "tokens": 100, "wall_s": [wall, wall * 2, wall / 2]}
        lines.append({"record": "throughput", **fields})
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return compare.Evaluation.newest(tmp_path)


def total(arm: str, threshold: float, drafted: int, accepted: int) -> Record:
    fields = {"k": K, "temperature": 1.0, "threshold": threshold, "drafts": 240, "drafted": drafted}
    return {"record": "arm", "arm": arm, **fields, "accepted": accepted, "mean_length": 1 + accepted / 240}


def test_arms_and_headline(evaluation: compare.Evaluation) -> None:
    assert evaluation.arms == ["repeat", "broadcast"]
    assert evaluation.caption.endswith("(interrupted)")  # it has no end line
    table = compare.headline(evaluation)
    assert table.loc[(1.0, "repeat"), "accuracy, %"] == pytest.approx(100 * 3 / 24)
    assert table.loc[(1.0, "repeat"), "mean length"] == pytest.approx(1 + (18 + 14) / 20)


def test_by_position(evaluation: compare.Evaluation) -> None:
    table = compare.by_position(evaluation, "broadcast")
    assert table.rate.tolist() == pytest.approx([0.85, 0.5, 0.25])
    assert table.conditional.tolist() == pytest.approx([0.85, 0.5 / 0.85, 0.5])
    assert (table.low < table.rate).all()
    assert (table.rate < table.high).all()


def test_paired(evaluation: compare.Evaluation) -> None:
    pair = compare.paired(evaluation, "repeat", "broadcast", 1.0)
    assert pair.differing_texts == 2
    assert pair.length == (0, 0, 0)
    assert (pair.correct.only_first, pair.correct.only_second, pair.correct.p_value) == (2, 0, 0.5)


def test_answer_and_differences(evaluation: compare.Evaluation) -> None:
    text = compare.answer(evaluation, [compare.paired(evaluation, "repeat", "broadcast", t) for t in (1.0, 0.0)])
    assert "On 24 questions" in text
    assert "is 2.600; the other arms differ from it by broadcast +0.0000 (+0.0000 to +0.0000), in" in text
    assert "2 of 24 greedy texts differ" in text
    row = compare.differences(evaluation).loc["broadcast"]
    assert (row["differing, %"], row["first differing at 1 to k"]) == (1.5, [0, 1, 2])


def test_training_curves(tmp_path: Path) -> None:
    assert compare.training_curves(tmp_path) == {}
    point = {"record": "training", "model": "draft", "phase": "train", "step": 20, "loss": 1.0, "tau": 2.0}
    lines = [{"record": "run", "what": "train-draft", "started": "2026"}, point, point | {"phase": "dev", "tau": 3.0}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = compare.training_curves(tmp_path)
    assert curves["draft"].tau.tolist() == [2.0, 3.0]
    plt = pytest.importorskip("matplotlib.pyplot")
    fig, ax = plt.subplots()
    plots_acceptance.training([ax], curves)
    assert ax.get_ylabel() == "expected acceptance length, tokens"
    assert [line.get_ydata().tolist() for line in ax.lines] == [[2.0], [3.0]]
    plt.close(fig)


def test_a_sharpening_has_a_curve_of_its_own(tmp_path: Path) -> None:
    point = {"record": "training", "model": "target", "phase": "dev", "step": 20, "answer": 1.0}
    sharp = point | {"model": "sharpening", "answer": 2.0, "own": 0.5}
    lines = [{"record": "run", "what": "train-target", "started": "2026"}, point, sharp, sharp | {"phase": "train"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = compare.training_curves(tmp_path)
    assert list(curves) == ["target", "sharpening"]
    plt = pytest.importorskip("matplotlib.pyplot")
    fig, axes = plt.subplots(1, 2)
    plots_acceptance.training(axes, curves)
    assert [ax.lines[1].get_ydata().tolist() for ax in axes] == [[1.0], [0.5]]
    plt.close(fig)


def test_by_draft_length(evaluation: compare.Evaluation) -> None:
    table = compare.by_draft_length(evaluation)
    assert table.length.tolist() == pytest.approx([1.8, 2.3, 2.6])
    assert table.predicted.tolist() == pytest.approx([1.85, 2.35, 2.6])


def test_by_threshold(evaluation: compare.Evaluation) -> None:
    table = compare.by_threshold(evaluation)
    assert table.index.tolist() == [0.0, 0.5, 0.9]
    assert table["verified tokens a round"].tolist() == [3, 2, 0]
    assert table["accepted of verified, %"].tolist()[:2] == pytest.approx([100 * 384 / 720, 75])
    assert np.isnan(table["accepted of verified, %"].iloc[2])


def test_speed(evaluation: compare.Evaluation) -> None:
    table = compare.speed(evaluation)
    assert table[("median", "plain")].iloc[0] == 50
    assert table[("speed-up", "broadcast")].iloc[0] == 2
    assert table[("low", "broadcast")].iloc[0] == 50


def test_subsets_spread_more_when_small(evaluation: compare.Evaluation) -> None:
    rows = evaluation.rows("broadcast")
    small, large = rows.subset_lengths(2), rows.subset_lengths(20)
    assert small.high - small.low > large.high - large.low
    assert large.covers(rows.length().value)
    assert not large.covers(2.2)


def test_no_record_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="python -m mhc gsm8k record"):
        compare.Evaluation.newest(tmp_path)
    (tmp_path / "r.jsonl").write_text('{"record": "run", "what": "latency"}\n')
    with pytest.raises(ValueError, match="is no record of"):
        compare.Evaluation(tmp_path / "r.jsonl")


def test_figures_draw(evaluation: compare.Evaluation) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    fig, axes = plt.subplots(2, 4)
    axes = axes.flatten()
    plots_acceptance.positions(axes[0], {arm: compare.by_position(evaluation, arm) for arm in evaluation.arms})
    plots_acceptance.draft_lengths(axes[1], compare.by_draft_length(evaluation))
    plots_acceptance.truncation(axes[2:4], compare.by_threshold(evaluation))
    calibration = {
        "position": 1,
        "confidence": [0.2, 0.9],
        "accepted": [0.3, 0.8],
        "count": [3, 9],
        "expected_error": 0.1,
    }
    plots_acceptance.calibration(axes[4], [calibration, calibration | {"position": 2}])
    flip = {"arm": "broadcast", "gap": 0.01, "logit_error": 0.02}
    plots_acceptance.flips(axes[5], [flip, flip | {"arm": "table"}], 100)
    plots_acceptance.flips(axes[6], [], 100)
    plots_acceptance.speed(axes[7], compare.speed(evaluation))
    assert len(axes[0].patches) == 2 * K
    assert [text.get_text() for text in axes[5].get_legend().get_texts()] == ["broadcast", "table"]
    assert sorted(text.get_text() for text in axes[2].texts) == ["0", "0.5", "0.9"]
    assert "no draft of 100 differs" in axes[6].texts[0].get_text()
    fig.canvas.draw()
    plt.close(fig)
