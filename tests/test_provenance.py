"""Whether a record's kernels are today's: by their digest where it has one, else by its commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest import mock

import pytest

from mhc.bench import machine
from mhc.provenance import kernels_since

LOST = "0" * 40


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own, one commit old, in the package's place."""
    (tmp_path / "mhc" / "kernels").mkdir(parents=True)
    for name in ("kernels/one.py", "launch.py", "ops.py"):
        (tmp_path / "mhc" / name).write_text("before")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    return tmp_path


def head(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_digest_decides_where_the_commit_is_lost() -> None:
    assert kernels_since({"git": LOST, "kernels_sha256": machine.kernels_sha256()}) == "as recorded"
    assert kernels_since({"git": LOST}) == "unknown commit"


def test_another_digest_is_a_change_whatever_the_commit(checkout: Path) -> None:
    run = {"git": head(checkout), "kernels_sha256": machine.kernels_sha256()}
    assert kernels_since(run) == "as recorded"
    (checkout / "mhc" / "kernels" / "one.py").write_text("after")
    assert kernels_since(run) == "changed since"
    modified = run | {"kernels_sha256": machine.kernels_sha256()}
    assert kernels_since(modified) == "as recorded"  # recorded in a modified tree, of which git knows nothing


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ("kernels/one.py", "changed since"),
        ("launch.py", "changed since"),
        ("ops.py", "as recorded"),
    ],
)
def test_without_a_digest_git_decides(checkout: Path, changed: str, verdict: str) -> None:
    old = {"git": head(checkout)}
    assert kernels_since(old) == "as recorded"
    (checkout / "mhc" / changed).write_text("after")
    assert kernels_since(old) == verdict
    assert kernels_since({"git": LOST}) == "unknown commit"
    with mock.patch.object(subprocess, "run", side_effect=FileNotFoundError("git")):
        assert kernels_since(old) == "unknown commit"
