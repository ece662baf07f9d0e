"""GSM8K's questions: from a folder, or downloaded once and kept, always checked against the published files' hashes.

Source: OpenAI, grade-school-math (MIT): 7,473 train and 1,319 test questions, JSONL with `question` and `answer`.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "test"]

URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{split}.jsonl"
SHA256 = {
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
ENV_DIR = "MHC_GSM8K_DIR"


@dataclass(frozen=True)
class Problem:
    """One question. `id` is its row in the file, counted from 0; `answer` ends in `#### N`."""

    id: int
    question: str
    answer: str


def load(split: Split, folder: str | Path | None = None, *, verify: bool = True) -> list[Problem]:
    """Read one split.

    Looks in `folder`, else in the folder named by the environment variable MHC_GSM8K_DIR, else in the user's cache,
    which is filled by one download.

    Args:
        split: `train` or `test`.
        folder: holds `train.jsonl` and `test.jsonl`.
        verify: compare the file's sha256 with the published one; False accepts any file of the same form.

    Returns:
        The problems in file order.

    Raises:
        ValueError: the split is unknown, the file's hash is not the published one, or a row lacks a field.
        FileNotFoundError: the file is not in the folder, or cannot be downloaded; the message says what to do.
    """
    if split not in SHA256:
        raise ValueError(f"split must be one of {', '.join(SHA256)}, got {split!r}")
    folder = folder or os.environ.get(ENV_DIR)
    path = Path(folder) / f"{split}.jsonl" if folder else _cached(split)
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: name the folder that holds train.jsonl and test.jsonl (or set {ENV_DIR})")
    content = path.read_bytes()
    if verify and sha256(content) != SHA256[split]:
        raise ValueError(f"{path} has sha256 {sha256(content)}, the published {split} split has {SHA256[split]}")
    return _parse(content, path)


def sha256(content: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(content).hexdigest()


def _parse(content: bytes, path: Path) -> list[Problem]:
    problems = []
    # split at newlines alone: str.splitlines would also break a question at U+2028
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
        row = json.loads(line)
        for field in ("question", "answer"):
            if not isinstance(row.get(field), str):
                raise ValueError(f"{path}, line {number}: {field} must be a string, got {row.get(field)!r}")
        problems.append(Problem(number - 1, row["question"], row["answer"]))
    return problems


def _cached(split: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mhc" / "gsm8k"
    path = cache / f"{split}.jsonl"
    if path.is_file():
        return path
    url = URL.format(split=split)
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
    except (urllib.error.URLError, OSError) as error:
        raise FileNotFoundError(
            f"GSM8K is not on this machine and {url} cannot be reached ({error}): put train.jsonl and test.jsonl "
            f"in a folder and name it with --data or {ENV_DIR}"
        ) from error
    if sha256(content) != SHA256[split]:
        raise ValueError(f"{url} has sha256 {sha256(content)}, expected {SHA256[split]}: nothing was kept")
    cache.mkdir(parents=True, exist_ok=True)
    # written aside and renamed, so that a killed download never looks like a finished one
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(path)
    return path
