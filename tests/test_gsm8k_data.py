"""Loader, prompts and the two answer rules."""

from __future__ import annotations

import io
import json
import sys
import urllib.error
import urllib.request
from decimal import Decimal
from pathlib import Path

import pytest
from gsm8k_tools import data_folder, problems

from mhc.__main__ import main
from mhc.gsm8k import data
from mhc.gsm8k.prompts import STOP, cut_at_stop, extract, gold, prompt, prompts


@pytest.mark.data
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_published_files(split: data.Split, count: int) -> None:
    rows = data.load(split, data_folder())
    assert len(rows) == count
    assert [row.id for row in rows] == list(range(count))
    for row in rows:
        assert gold(row, "strict") == Decimal(row.answer.split("####")[1].strip().replace(",", ""))
        assert gold(row, "vllm") == abs(gold(row, "strict"))  # the rule that loses signs


@pytest.mark.data
def test_five_shots_are_the_first_five_train_rows() -> None:
    train, test = data.load("train", data_folder()), data.load("test", data_folder())
    text = prompts(test[:1], train, 5)[0]
    assert text.count("Question: ") == 6
    assert text.startswith(f"Question: {train[0].question}\nAnswer: {train[0].answer}\n\nQuestion: {train[1].question}")
    assert text.endswith(f"\n\nQuestion: {test[0].question}\nAnswer:")


def test_prompt_without_shots() -> None:
    assert prompt("Why?") == "Question: Why?\nAnswer:"


def test_too_many_shots() -> None:
    with pytest.raises(ValueError, match="shots must be 0 to 3, got 4"):
        prompts(problems(1), problems(3), 4)


def test_stop_strings_cut_the_text() -> None:
    assert cut_at_stop(" 5\n\nAssistant: x\nQuestion: y") == " 5\n\n"
    assert cut_at_stop(" 5") == " 5"
    assert STOP == ("Question", "Assistant:", "<|separator|>")


@pytest.mark.parametrize(
    ("text", "vllm", "strict"),
    [
        ("so 3 + 4 = 7\n#### 7", 7, 7),
        ("#### 1,450", 1450, 1450),
        ("#### -12", 12, -12),
        ("#### −12", 12, -12),
        ("#### $3.50", 50, Decimal("3.50")),
        ("#### -$3", 3, -3),
        ("#### 7 apples", 7, 7),
        ("#### 5.", 5, 5),
        ("#### 5\n#### 6", 6, 5),
        ("the answer is 8", 8, None),
        ("#### 007", None, 7),
        ("#### 1,23", 123, None),
        ("#### --3", 3, None),
        ("no number", None, None),
        ("", None, None),
    ],
)
def test_answer_rules(text: str, vllm: int | None, strict: int | Decimal | None) -> None:
    assert extract(text, "vllm") == vllm
    assert extract(text, "strict") == strict


def test_unknown_rule() -> None:
    with pytest.raises(ValueError, match="rule must be one of vllm, strict, got 'loose'"):
        extract("1", "loose")  # type: ignore[arg-type]


def test_gold_without_answer() -> None:
    with pytest.raises(ValueError, match="problem 3 has no answer"):
        gold(data.Problem(3, "q", "unknown"))


# ---- where the files come from ----


def write(folder: Path, rows: list[dict[str, str]]) -> bytes:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.jsonl").write_bytes(content)
    return content


def test_another_file_is_refused_unless_asked_for(tmp_path: Path) -> None:
    write(tmp_path, [{"question": "a\u2028b", "answer": "#### 1"}])
    with pytest.raises(ValueError, match="the published test split has"):
        data.load("test", tmp_path)
    assert data.load("test", tmp_path, verify=False) == [data.Problem(0, "a\u2028b", "#### 1")]


def test_row_without_answer_names_the_line(tmp_path: Path) -> None:
    write(tmp_path, [{"question": "a", "answer": "#### 1"}, {"question": "b"}])
    with pytest.raises(ValueError, match="line 2: answer must be a string, got None"):
        data.load("test", tmp_path, verify=False)


def test_missing_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name the folder that holds"):
        data.load("test", tmp_path)


def test_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [{"question": "a", "answer": "#### 1"}])
    monkeypatch.setenv(data.ENV_DIR, str(tmp_path))
    assert len(data.load("test", verify=False)) == 1


def test_download_is_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write(tmp_path / "server", [{"question": "a", "answer": "#### 1"}])
    calls = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        calls.append(url)
        return io.BytesIO(content)

    monkeypatch.delenv(data.ENV_DIR, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(ValueError, match="nothing was kept"):
        data.load("test")
    assert not list((tmp_path / "cache").rglob("*.jsonl"))
    monkeypatch.setitem(data.SHA256, "test", data.sha256(content))
    assert data.load("test") == data.load("test")
    assert len(calls) == 2  # refused once, then fetched once and kept


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        raise urllib.error.URLError("no route")

    monkeypatch.delenv(data.ENV_DIR, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(FileNotFoundError, match=r"no route.*name it with --data or MHC_GSM8K_DIR"):
        data.load("test")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    for name in [name for name in sys.modules if name.startswith(("mhc.gsm8k", "statsmodels."))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["gsm8k", "--model", "m", "--out", "o"]) == 1
    assert "mhc gsm8k: needs statsmodels" in capsys.readouterr().err
