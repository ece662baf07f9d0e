"""What the report's head says: commit, versions and hardware of this run, and the records that it replays."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from mhc.bench import machine


def provenance(records: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """`facts` (name to text) of this run, and `records`: the given run lines, each file once.

    A record's `kernels` says whether the kernels are today what was recorded: see `kernels_since`.
    """
    try:
        commit, dirty = machine.git_state()
        built_from = commit[:10] + (" with uncommitted changes" if dirty else "")
    except RuntimeError:
        built_from = "unknown: neither a git checkout nor MHC_GIT_SHA"
    facts = {
        "commit": built_from,
        "built": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions().items()),
        "CPU": f"{machine.host_cpu()}, {os.cpu_count()} cores",
        "GPU": machine.gpu_state()["gpu"] or "none here: GPU figures are replayed from records",
    }
    unique = {record["file"]: record | {"kernels": kernels_since(record)} for record in records}
    return {"facts": facts, "records": list(unique.values())}


def kernels_since(run: Mapping[str, Any]) -> str:
    """Whether a run line's kernels are today's: `as recorded`, `changed since` or `unknown commit`.

    Decided by the digest of their sources, see `machine.kernels_sha256`. Older records have none: there the commit
    decides, which is unknown where it is of another repository or was rewritten.
    """
    if recorded := run.get("kernels_sha256"):
        return "as recorded" if recorded == machine.kernels_sha256() else "changed since"
    git, commit = ["git", "-C", str(machine.ROOT)], run["git"]
    diff = [*git, "diff", "--quiet", commit, "--", *machine.KERNEL_SOURCES]
    try:
        known = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False)
        same = subprocess.run(diff, capture_output=True, check=False)
    except OSError:
        return "unknown commit"
    if known.returncode:
        return "unknown commit"
    return "changed since" if same.returncode else "as recorded"
