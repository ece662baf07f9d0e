"""The random pair answered live, and notebook 04 without a record and with a small one made by the real driver."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gsm8k_tools import problems

from mhc.dspark.artifacts import TOKENIZER, Pair, save_weights, update_card
from mhc.gsm8k import compare, live
from mhc.gsm8k.mini import Arm, encode_prompts, equality, run_arm
from mhc.gsm8k.record import Scope, record
from mhc.report import Notebook, execute

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "04_gsm8k_acceptance.ipynb"
ARMS = ("repeat", "broadcast")


@pytest.fixture(scope="module")
def answers() -> compare.Arms:
    return live.answer(live.random_pair(), live.made_up(8), ARMS, max_tokens=16)


def test_greedy_texts_are_plain_and_not_all_alike(answers: compare.Arms) -> None:
    assert compare.equality(answers).differing.tolist() == [0, 0]
    assert len(set(answers.rows("broadcast", temperature=0.0).text)) > 4


def test_arms_agree_and_something_is_accepted(answers: compare.Arms) -> None:
    for temperature in (0.0, 1.0):
        pair = compare.paired(answers, *ARMS, temperature)
        assert (pair.differing_texts, pair.length.value) == (0, 0)
    assert 1.2 < answers.rows("broadcast").acceptance().mean_length < answers.k


def test_counters_account_for_every_token(answers: compare.Arms) -> None:
    for arm in answers.arms:
        for temperature in (0.0, 1.0):
            uncounted = answers.rows(arm, temperature=temperature).uncounted()
            assert set(uncounted) <= {0, 1}
    rows = answers.rows("broadcast")
    rows.drafts = rows.drafts + 2  # rounds that were not
    assert np.all(rows.uncounted() >= 2)


def test_equality_names_the_questions_that_differ() -> None:
    pair, asked = live.random_pair(), live.made_up(3)
    arm = Arm(None, 0, 0.0)
    outcome = run_arm(pair, asked, encode_prompts(pair, asked), arm, max_tokens=4)
    other = outcome._replace(tokens=[outcome.tokens[0], [0], outcome.tokens[2]])
    assert equality(arm, other, outcome)["differing_ids"] == [1]
    with pytest.raises(ValueError, match="pair must have a draft"):
        live.answer(Pair(pair.target, None, pair.tokenizer), asked, ARMS)


def shown(executed: Notebook) -> str:
    return "\n".join(output.get("text/markdown", "") for output in data(executed))


def data(executed: Notebook) -> list[dict[str, str]]:
    return [output["data"] for cell in executed.node.cells for output in cell.get("outputs", []) if "data" in output]


def test_notebook_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_RECORDS", str(tmp_path))
    executed = execute(NOTEBOOK, small=True, stop_on_error=True)
    assert executed.failures == []
    text = shown(executed)
    assert "No GPU run of GSM8K has been recorded" in text
    assert all(command in text for command in ("mhc train target", "mhc train draft", "mhc gsm8k record"))
    claims = [line for line in text.splitlines() if line.startswith("**Claim")]
    assert len(claims) == 4
    assert all("random weights" in line for line in claims)  # nothing is said of a trained pair


def test_notebook_with_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_GIT_SHA", "0" * 40)
    monkeypatch.setenv("MHC_RECORDS", str(tmp_path))
    monkeypatch.setenv("MHC_GSM8K_DIR", str(tmp_path))  # no questions there: the notebook says so
    folder = tmp_path / "mini"
    folder.mkdir()
    pair = live.random_pair(dtype=torch.float32)
    assert pair.draft is not None
    pair.tokenizer.save(str(folder / TOKENIZER))
    for name, module in (("target", pair.target), ("draft", pair.draft)):
        save_weights(folder, name, module)
        update_card(folder, name, pair.target.config, 0, steps=0, minutes=0.0, final={"loss": 0.0})
    scope = Scope(k=4, thresholds=(0.5,), speed_requests=(1,), speed_rounds=1, max_tokens=8)
    record(folder, tmp_path, problems(6), scope, "cpu")

    executed = execute(NOTEBOOK, small=True)
    # an untrained pair bears out no claim on a trained one, but no cell breaks
    assert all("AssertionError: claim does not hold" in failure for failure in executed.failures), executed.failures
    text = shown(executed)
    assert "No recorded run" not in text
    assert "Not run here" in text
    assert text.count("**Claim") >= 11
    assert any("accepted for 3.5 tokens" in failure for failure in executed.failures)
