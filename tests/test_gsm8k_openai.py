"""The server client against a server that misbehaves: nothing lost, nothing counted twice, nothing made up."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gsm8k_tools import ROOT, Canned, Reply, completion, data_folder, problems, serve

from mhc.gsm8k import command
from mhc.gsm8k.journal import Journal
from mhc.gsm8k.openai_client import Sampling, Server, ask, parse_metrics
from mhc.gsm8k.prompts import prompts
from mhc.gsm8k.rows import questions, read

QUESTIONS = problems(30)
FIELDS = [
    *("record", "arm", "id", "k", "temperature", "drafts", "accepted_per_position", "tokens"),
    *("prediction", "gold", "correct", "invalid", "text_sha256"),
]


def right(body: dict[str, Any]) -> dict[str, Any]:
    """The right answer to a made-up question, with a run-on that the stop strings cut."""
    text = body.get("prompt") or body["messages"][0]["content"]
    number = int(text.rpartition("What is ")[2].split()[0])
    return completion(f" {number}+{number}={2 * number}\n#### {2 * number}\n\nQuestion: 99?")


def run(canned: Canned, path: Path, header: dict[str, Any] | None = None, **server: Any) -> list[dict[str, Any]]:
    """One run of the client; the file's records."""
    options = {"concurrency": 8, "attempts": 4, "backoff_s": 0.01} | server
    with Journal(path, header or {"what": "gsm8k"}) as journal:
        texts = prompts(QUESTIONS, [], 0)
        asyncio.run(
            ask(
                Server(canned.url, "m", **options),
                Sampling(),
                QUESTIONS,
                texts,
                journal,
                rule="strict",
                arm="server",
                k=7,
            )
        )
    return read(path)


def test_answers_are_judged_and_rows_have_the_fields(tmp_path: Path) -> None:
    with serve(lambda body, attempt: (200, {}, right(body)), delay_s=0.02) as canned:
        records = run(canned, tmp_path / "a.jsonl")
    rows = questions(records)
    assert [row["id"] for row in rows] == list(range(30))
    assert all(row["correct"] and not row["invalid"] for row in rows)
    assert all(list(row) == FIELDS for row in rows)
    assert {(row["drafts"], row["accepted_per_position"], row["tokens"]) for row in rows} == {(None, None, 5)}
    assert 1 < canned.most_in_flight <= 8
    body = canned.bodies[0]
    assert body["path"] == "/v1/completions"
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.0, 256, 42)
    assert body["stop"] == ["Question", "Assistant:", "<|separator|>"]


def test_chat_sends_the_same_text_as_one_user_message(tmp_path: Path) -> None:
    def script(body: dict[str, Any], attempt: int) -> Reply:
        return 200, {}, {"choices": [{"message": {"content": right(body)["choices"][0]["text"]}}]}

    with serve(script) as canned:
        rows = questions(run(canned, tmp_path / "a.jsonl", api="chat"))
    assert all(row["correct"] and row["tokens"] is None for row in rows)
    assert canned.bodies[0]["path"] == "/v1/chat/completions"
    assert canned.bodies[0]["messages"][0]["content"].startswith("Question: ")


FAULTS: list[Reply] = [
    (500, {}, {"error": "x"}),
    (503, {}, b"busy"),
    (429, {"Retry-After": "0"}, {}),
    (200, {}, None),  # closed before the reply
    (200, {}, b'{"choices": [{"te'),  # cut short
    (200, {}, {"choices": []}),
    (200, {}, {"choices": [{"text": None}]}),
]


def test_faults_are_retried(tmp_path: Path) -> None:
    def script(body: dict[str, Any], attempt: int) -> Reply:
        number = int(body["prompt"].rpartition("What is ")[2].split()[0])
        return FAULTS[number % len(FAULTS)] if attempt < 3 else (200, {}, right(body))

    with serve(script) as canned:
        rows = questions(run(canned, tmp_path / "a.jsonl"))
    assert len(rows) == 30
    assert all(row["correct"] for row in rows)
    assert set(canned.seen.values()) == {3}


def test_retry_after_is_obeyed(tmp_path: Path) -> None:
    def script(body: dict[str, Any], attempt: int) -> Reply:
        return (429, {"Retry-After": "1"}, {}) if attempt == 1 else (200, {}, right(body))

    start = time.perf_counter()
    with serve(script) as canned:
        run(canned, tmp_path / "a.jsonl", concurrency=30)
    assert time.perf_counter() - start >= 1


@pytest.mark.parametrize(("status", "tries"), [(500, 4), (400, 1)])
def test_a_request_that_fails_for_good_is_an_error(tmp_path: Path, status: int, tries: int) -> None:
    broken = True

    def script(body: dict[str, Any], attempt: int) -> Reply:
        return (status, {}, b"too long") if broken and "What is 7 " in body["prompt"] else (200, {}, right(body))

    path = tmp_path / "a.jsonl"
    with serve(script) as canned:
        with pytest.raises(RuntimeError, match=r"1 of 30 .* failed \(first: 7, .*too long.*run the same command again"):
            run(canned, path)
        assert sum(count for text, count in canned.seen.items() if "What is 7 " in text) == tries
        assert [row["id"] for row in questions(read(path))] == [i for i in range(30) if i != 7]
        broken = False
        rows = questions(run(canned, path))
    assert [row["id"] for row in rows] == list(range(30))
    assert sum(canned.seen.values()) == 29 + tries + 1  # what was answered is not asked again


def test_no_server(tmp_path: Path) -> None:
    canned = Canned(lambda body, attempt: (200, {}, None))
    canned.url = "http://127.0.0.1:9"
    with pytest.raises(RuntimeError, match=r"30 of 30 questions failed.*ConnectError"):
        run(canned, tmp_path / "a.jsonl", attempts=2)


# ---- the journal ----


def test_torn_line_is_dropped_and_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with serve(lambda body, attempt: (200, {}, right(body))) as canned:
        run(canned, path)
        whole = [line for line in path.read_bytes().splitlines(keepends=True) if b'"session"' not in line]
        path.write_bytes(b"".join(whole)[:-20])  # the last answer was half written
        with Journal(path, {"what": "gsm8k"}) as journal:
            assert journal.torn_bytes == len(whole[-1]) - 20
        assert len(questions(run(canned, path))) == 30


def test_another_run_is_refused(tmp_path: Path) -> None:
    with serve(lambda body, attempt: (200, {}, right(body))) as canned:
        run(canned, tmp_path / "a.jsonl", {"what": "gsm8k", "shots": 5})
        with pytest.raises(ValueError, match="holds a run with shots=5, not 0"):
            run(canned, tmp_path / "a.jsonl", {"what": "gsm8k", "shots": 0})


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.jsonl", {}), pytest.raises(BlockingIOError, match="being written by another process"):
        Journal(tmp_path / "a.jsonl", {})


def test_questions_answered_twice_are_found(tmp_path: Path) -> None:
    row = {"record": "question", "id": 3}
    with pytest.raises(ValueError, match="got 2 rows of 1 questions"):
        questions([row, row])


@pytest.mark.data
def test_killed_run_resumes(tmp_path: Path) -> None:
    folder, path = data_folder(), tmp_path / "a.jsonl"

    def script(body: dict[str, Any], attempt: int) -> Reply:
        return 200, {}, completion(" #### 1")

    with serve(script, delay_s=0.05) as canned:
        arguments = ["gsm8k", "--engine", "openai", "--base-url", canned.url, "--model", "m", "--data", str(folder)]
        arguments += ["--questions", "120", "--shots", "0", "--concurrency", "2", "--out", str(path)]
        environment = os.environ | {"MHC_GIT_SHA": "0" * 40}
        process = subprocess.Popen([sys.executable, "-m", "mhc", *arguments], cwd=ROOT, env=environment)
        deadline = time.monotonic() + 60
        while sum(canned.seen.values()) < 25 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = questions(read_whole(path))
        assert 10 < len(before) < 120
        canned.seen.clear()
        done = subprocess.run(
            [sys.executable, "-m", "mhc", *arguments, "--concurrency", "16"], cwd=ROOT, env=environment, timeout=60
        )
        assert done.returncode == 0
        again = sum(canned.seen.values())
    rows = questions(read(path))
    assert [row["id"] for row in rows] == list(range(120))
    assert again == 120 - len(before)
    assert Counter(line["record"] for line in read(path)) == {"run": 1, "question": 120, "session": 1}


def read_whole(path: Path) -> list[dict[str, Any]]:
    """Records of a file whose last line may be torn."""
    return [json.loads(line) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]


# ---- vLLM's counters ----

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 5.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {draft_tokens}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}.0
vllm:request_success_total{{engine="0"}} 1.0
"""


def counters(drafts: int, draft_tokens: int, accepted: int, first: int, second: int) -> str:
    return METRICS.format(drafts=drafts, draft_tokens=draft_tokens, accepted=accepted, first=first, second=second)


def test_counters_are_parsed_and_engines_summed() -> None:
    parsed = parse_metrics(counters(10, 20, 9, 6, 3))
    assert parsed == {
        "drafts": 15,
        "draft_tokens": 20,
        "accepted_tokens": 9,
        "accepted_tokens_per_pos/0": 6,
        "accepted_tokens_per_pos/1": 3,
    }
    assert parse_metrics("http_requests_total 3") is None


def test_acceptance_is_what_the_counters_gained(tmp_path: Path) -> None:
    def script(body: dict[str, Any], attempt: int) -> Reply:
        canned.metrics = counters(110, 220, 159, 96, 63)  # 100 drafts, 150 accepted more than before
        return 200, {}, right(body)

    with serve(script) as canned:
        canned.metrics = counters(10, 20, 9, 6, 3)
        session = run(canned, tmp_path / "a.jsonl")[-1]
    assert session["acceptance"] == {
        "drafts": 100,
        "drafted": 200,
        "accepted": 150,
        "accepted_per_position": [90, 60],
        "mean_length": 2.5,
    }
    assert session["tokens"] == 150


def test_a_length_that_misses_a_killed_session_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(body: dict[str, Any], attempt: int) -> Reply:
        canned.metrics = counters(100, 200, 150, 90, 60)
        return 200, {}, right(body)

    path = tmp_path / "a.jsonl"
    with serve(script) as canned:
        run(canned, path)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:21]))  # killed after 20 answers
        canned.metrics = counters(0, 0, 0, 0, 0)
        run(canned, path)
    with Journal(path, {}) as journal:
        assert command._counted(journal) == (2.5, 10)
        assert command._summary(argparse.Namespace(), journal, *command._counted(journal)) == 0
    assert "mean acceptance length 2.500 (over 10 of them)" in capsys.readouterr().out


def test_restarted_server_is_noticed(tmp_path: Path) -> None:
    def script(body: dict[str, Any], attempt: int) -> Reply:
        canned.metrics = counters(0, 0, 0, 0, 0)
        return 200, {}, right(body)

    path = tmp_path / "a.jsonl"
    with serve(script) as canned:
        canned.metrics = counters(10, 20, 9, 6, 3)
        with pytest.raises(RuntimeError, match="the server restarted"):
            run(canned, path)
    assert len(questions(read(path))) == 30  # the answers are kept all the same


@pytest.mark.parametrize(("accuracy", "accepted", "status"), [(True, 150, 0), (True, 10, 1), (False, 150, 1)])
def test_gate(tmp_path: Path, accuracy: bool, accepted: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def script(body: dict[str, Any], attempt: int) -> Reply:
        canned.metrics = counters(100, 200, accepted, accepted - accepted // 3, accepted // 3)
        return 200, {}, right(body) if accuracy else completion("no idea")

    with serve(script) as canned:
        canned.metrics = counters(0, 0, 0, 0, 0)
        with Journal(tmp_path / "a.jsonl", {}) as journal:
            texts = prompts(QUESTIONS, [], 0)
            server = Server(canned.url, "m")
            asyncio.run(ask(server, Sampling(), QUESTIONS, texts, journal, rule="vllm", arm="server", k=2))
            length = journal.records[-1]["acceptance"]["mean_length"]
            assert command._summary(argparse.Namespace(gate=True), journal, length) == status
    assert ("passed" if status == 0 else "FAILED") in capsys.readouterr().out
