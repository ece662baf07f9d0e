"""Notebook 05 with records: every section draws, good records hold, a bad one fails. Without any, see `make test`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from serving_fake import Fake
from test_serving import arguments

from mhc.bench import serving
from mhc.report import CLAIM_MIME, RECORD_MIME, Notebook, execute

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "05_vllm_serving.ipynb"


def with_records(folder: Path, monkeypatch: pytest.MonkeyPatch, **fake: object) -> Notebook:
    """Execute it on records of one and of two GPUs."""
    monkeypatch.setenv("MHC_GIT_SHA", "0123456789abcdef")
    monkeypatch.setenv("MHC_RECORDS", str(folder))
    for gpus in ("1", "2"):
        settings, plan = serving.plan(arguments("--tp", gpus, "--tokens", "8", "--rounds", "4", "--replays", "12"))
        serving.record(Fake(**fake), settings, plan, folder, time.perf_counter(), budget_s=60.0)
    return execute(NOTEBOOK, small=True, timeout_s=300)


def claims(executed: Notebook) -> dict[str, bool]:
    return {content["claim"]: content["holds"] for content in executed.displayed(CLAIM_MIME)}


def test_with_good_records_every_section_draws_and_holds(tmp_path, monkeypatch):
    executed = with_records(tmp_path, monkeypatch)
    assert executed.failures == []
    assert len(executed.displayed(RECORD_MIME)) == 2
    found = claims(executed)
    assert all(found.values())
    assert any(text.endswith("greedy tokens are those of unpatched vLLM.") for text in found)
    text = json.dumps([cell.get("outputs", []) for cell in executed.node.cells])
    assert "No serving record" not in text
    assert "not met" in text  # 14 us of 3,400 at 448 tokens: a target missed is a row
    assert len(executed.displayed("image/png")) == 3  # saved, throughput, the engine step


def test_tokens_that_part_without_a_near_tie_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(Fake, "next_logprobs", lambda self, prompt: {prompt[-1] + 1: -1.0, prompt[-1] + 2: -2.0})
    executed = with_records(tmp_path, monkeypatch, diverges=("mhc",))
    assert executed.failures
    assert False in claims(executed).values()


def test_tokens_that_part_at_a_near_tie_hold(tmp_path, monkeypatch):
    executed = with_records(tmp_path, monkeypatch, diverges=("mhc",))
    assert executed.failures == []
    assert any("near-tie" in text for text in claims(executed))
