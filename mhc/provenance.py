"""Where a figure comes from: commit, versions, hardware, and the records that were replayed."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "tilelang", "vllm", "numpy")
ROOT = Path(__file__).resolve().parent.parent


def provenance(records: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """What the report's head shows: `facts` (name to text) and `records`, the replayed runs.

    Each record says in `kernels` whether `mhc/kernels` is today what it was when the record was made.
    """
    commit = _git("rev-parse", "--short=10", "HEAD")
    dirty = " with uncommitted changes" if commit and _git("status", "--porcelain") else ""
    facts = {
        "commit": f"{commit}{dirty}" if commit else "unknown: not a git checkout",
        "built": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "versions": ", ".join([f"python {platform.python_version()}", *_versions()]),
        "CPU": f"{cpu_name()}, {os.cpu_count()} cores",
        "GPU": gpu_name() or "none here: GPU figures are replayed from the records below",
    }
    unique = {record["file"]: record | {"kernels": _kernels_since(record.get("git"))} for record in records}
    return {"facts": facts, "records": list(unique.values())}


def cpu_name() -> str:
    """The processor's marketing name, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpu_name() -> str:
    """The first GPU's name, or an empty text."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return found


def _kernels_since(commit: str | None) -> str:
    if not commit or not _git("cat-file", "-t", commit):
        return "unknown commit"
    return "changed since" if _git("diff", "--name-only", commit, "--", "mhc/kernels") else "as recorded"


def _git(*arguments: str) -> str:
    """A git command's output; empty where there is no git, no repository or no such object."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
