"""Records: one append-only JSONL file a run, validated on the way in and on the way out.

Line 1 is the run (where and how it was measured), then one line a point, and last an `end` line, whose absence tells
an interrupted run from a finished one. A file is never overwritten. Files are named
`<date>-<gpu>-<what>-<sha7>.jsonl`, with `-2`, `-3` appended when that name is taken.

Writing needs neither a GPU nor pandas; reading needs pandas. A machine without the repository's `.git` passes the
commit as `MHC_GIT_SHA=<sha>` (`<sha>-dirty` for a modified tree).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mhc.bench import machine

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
STATUSES = ("ok", "failed", "skipped", "absent")
TIMERS = ("cuda_graph", "eager", "cpu_call")
L2_STATES = ("warm", "cold")

Fields = Mapping[str, tuple[type, ...]]
_NONE = type(None)
_NUMBER = (int, float)

RUN_FIELDS: Fields = {
    "schema": (int,),
    "what": (str,),
    "started": (str,),  # ISO 8601, UTC
    "git": (str,),
    "dirty": (bool,),
    "gpu": (str, _NONE),  # None: measured without a GPU
    "sm_count": (int, _NONE),
    "driver": (str, _NONE),
    "cuda": (str, _NONE),
    "clocks_mhz": (dict, _NONE),  # sm, mem, sm_max and `locked`
    "power_limit_w": (*_NUMBER, _NONE),
    "temp_c": (*_NUMBER, _NONE),
    "throttle": (str, _NONE),
    "l2_mib": (*_NUMBER, _NONE),
    "copy_bandwidth_gbs": (*_NUMBER, _NONE),  # bytes read plus bytes written
    "empty_launch_us": (*_NUMBER, _NONE),  # an empty kernel inside a graph
    "versions": (dict,),
    "host_cpu": (str,),
    "command": (str,),
    "seed": (int,),
}
# in every new record; those before have none: see `machine.kernels_sha256`
LATER_RUN_FIELDS: Fields = {"kernels_sha256": (str,)}

LATENCY_FIELDS: Fields = {
    "op": (str,),
    "impl": (str,),
    "T": (int,),
    "H": (int,),
    "hc": (int,),
    "dtype": (str,),
    "timer": (str,),
    "l2": (str,),
    "round": (int,),
    "order": (int,),  # position of this measurement in its shuffled round
    "calls_per_sample": (int,),
    "bytes": (int,),
    "flops": (int,),
    "status": (str,),
    "reason": (str,),  # empty when status is ok
    "error": (*_NUMBER, _NONE),  # worst error against fp64, in units of the fp32 formula's own
    "samples_us": (list,),
}
# a serving point has more, by its op: see `mhc.bench.serving_phases`
SERVING_FIELDS: Fields = {
    "op": (str,),
    "impl": (str,),
    "mode": (str,),  # graph or eager
    "batch": (int,),
    "tp": (int,),
    "status": (str,),
    "reason": (str,),
}
POINT_FIELDS: dict[str, Fields] = {"latency": LATENCY_FIELDS, "serving": SERVING_FIELDS}


@dataclass(frozen=True)
class Record:
    """A loaded record: the run line, the points as a DataFrame, and whether the run reached its end."""

    path: Path
    run: dict[str, Any]
    points: pd.DataFrame
    end: dict[str, Any] | None

    @property
    def complete(self) -> bool:
        return self.end is not None

    @property
    def caption(self) -> str:
        """`recorded on <gpu>, <date>, <sha>`, and what a reader must know to distrust it."""
        return caption(self.run) + ("" if self.complete else " (interrupted)")


def caption(run: Mapping[str, Any]) -> str:
    """`recorded on <gpu>, <date>, <sha7>`; a run without a GPU names the CPU, a modified tree is said to be one."""
    where = run["gpu"] or f"CPU ({run['host_cpu']})"
    return f"recorded on {where}, {run['started'][:10]}, {run['git'][:7]}{' + changes' if run['dirty'] else ''}"


def run_line(what: str, *, seed: int, limits: Mapping[str, float | None] | None = None, **extra: Any) -> dict[str, Any]:
    """The first line of a record, read off this machine.

    Args:
        what: what is recorded, lower-case words joined by `-`: part of the file name.
        seed: of every random input.
        limits: `copy_bandwidth_gbs` and `empty_launch_us` where measured (`mhc.bench.hardware.limits`).
        extra: further fields, kept as they are.

    Raises:
        ValueError: `what` is not such a word, or `extra` redefines a field.
        RuntimeError: the commit is unknown: no git repository and no `MHC_GIT_SHA`.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", what):
        raise ValueError(f"what must be lower-case words joined by '-', got {what!r}")
    git, dirty = machine.git_state()
    run = {
        "record": "run",
        "schema": SCHEMA,
        "what": what,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git,
        "dirty": dirty,
        "kernels_sha256": machine.kernels_sha256(),
        **machine.gpu_state(),
        "copy_bandwidth_gbs": None,
        "empty_launch_us": None,
        "versions": machine.versions(),
        "host_cpu": machine.host_cpu(),
        "command": machine.command_line(),
        "seed": seed,
        **(limits or {}),
    }
    if clash := sorted(set(extra) & set(run)):
        raise ValueError(f"extra fields must not redefine {', '.join(clash)}")
    return {**run, **extra}


def free_path(folder: str | Path, run: Mapping[str, Any]) -> Path:
    """The first unused `<date>-<gpu>-<what>-<sha7>[-n].jsonl` in `folder`."""
    gpu = re.sub(r"[^a-z0-9]+", "-", (run["gpu"] or "cpu").lower().replace("nvidia", "")).strip("-")
    stem = f"{run['started'][:10].replace('-', '')}-{gpu}-{run['what']}-{run['git'][:7]}"
    path, n = Path(folder) / f"{stem}.jsonl", 2
    while path.exists():
        path, n = Path(folder) / f"{stem}-{n}.jsonl", n + 1
    return path


class Recorder:
    """Appends validated lines to a new file; every line is on disk before `point` returns.

    Args:
        path: a file that does not exist yet (`free_path` gives one).
        run: from `run_line`.
        fields: name to accepted types of every point's required fields; default: those known for `run["what"]`.

    Raises:
        FileExistsError: `path` exists.
        ValueError: the run line, or later a point, does not fit.
    """

    def __init__(self, path: str | Path, run: Mapping[str, Any], fields: Fields | None = None) -> None:
        self.path = Path(path)
        self._fields = POINT_FIELDS.get(run["what"], {}) if fields is None else fields
        _check(run, {**RUN_FIELDS, **LATER_RUN_FIELDS}, f"{self.path}, run line")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("x")
        self._write(dict(run) | {"record": "run"})

    def point(self, **values: Any) -> None:
        """Append one point."""
        _check_point(values, self._fields, f"{self.path}, point")
        self._write({"record": "point", **values})

    def close(self, **extra: Any) -> None:
        """Write the end line (time, temperature and clocks after the run) and close. Further calls do nothing."""
        if self._file.closed:
            return
        state = machine.gpu_state()
        after = {key: state[key] for key in ("temp_c", "clocks_mhz", "throttle")}
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        self._write({"record": "end", "finished": finished, **after, **extra})
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()  # no end line: the loader reports the run as interrupted

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def load(path: str | Path, fields: Fields | None = None) -> Record:
    """Read and validate a record.

    Args:
        path: a JSONL record.
        fields: as for `Recorder`.

    Returns:
        Record; `points` has one row a point, in file order.

    Raises:
        ValueError: a line is not JSON, is out of place or lacks a field; the message names file and line.
    """
    import pandas as pd

    path = Path(path)
    lines = [_parse(text, f"{path}, line {n}") for n, text in enumerate(path.read_text().splitlines(), 1)]
    if not lines or lines[0].get("record") != "run":
        raise ValueError(f"{path}, line 1: must be the run line")
    run, rest = lines[0], lines[1:]
    later = {name: types for name, types in LATER_RUN_FIELDS.items() if name in run}
    _check(run, {**RUN_FIELDS, **later}, f"{path}, line 1")
    if run["schema"] != SCHEMA:
        raise ValueError(f"{path}, line 1: schema must be {SCHEMA}, got {run['schema']}")
    end = rest.pop() if rest and rest[-1].get("record") == "end" else None
    fields = POINT_FIELDS.get(run["what"], {}) if fields is None else fields
    for n, line in enumerate(rest, 2):
        if line.get("record") != "point":
            raise ValueError(f"{path}, line {n}: record must be 'point', got {line.get('record')!r}")
        _check_point(line, fields, f"{path}, line {n}")
    return Record(path, run, pd.DataFrame(rest).drop(columns="record", errors="ignore"), end)


def find(folder: str | Path, what: str) -> list[Path]:
    """Every record of `what` in `folder`, oldest first: a file dropped in is picked up."""
    runs = ((path, _first_line(path)) for path in sorted(Path(folder).glob("*.jsonl")))
    return [path for path, run in sorted(runs, key=lambda item: item[1].get("started", "")) if run.get("what") == what]


def _first_line(path: Path) -> dict[str, Any]:
    with path.open() as file:
        return _parse(file.readline() or "{}", f"{path}, line 1")


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(line, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(line).__name__}")
    return line


def _check(line: Mapping[str, Any], fields: Fields, where: str) -> None:
    for name, types in fields.items():
        if name not in line:
            raise ValueError(f"{where}: field {name} is missing")
        value = line[name]
        # bool is an int to isinstance: accept it only where asked for
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            accepted = " or ".join("null" if kind is _NONE else kind.__name__ for kind in types)
            raise ValueError(f"{where}: field {name} must be {accepted}, got {value!r}")


def _check_point(point: Mapping[str, Any], fields: Fields, where: str) -> None:
    _check(point, fields, where)
    _check_choice(point, "status", STATUSES, where)
    _check_choice(point, "timer", TIMERS, where)
    _check_choice(point, "l2", L2_STATES, where)
    samples = point.get("samples_us")
    if samples is not None:
        if point.get("status") == "ok" and not samples:
            raise ValueError(f"{where}: samples_us is empty though status is ok")
        if not all(isinstance(s, (int, float)) and s > 0 for s in samples):
            raise ValueError(f"{where}: samples_us must be positive numbers")
    if point.get("status", "ok") != "ok" and not point.get("reason"):
        raise ValueError(f"{where}: status {point['status']} needs a reason")


def _check_choice(point: Mapping[str, Any], name: str, accepted: Iterable[str], where: str) -> None:
    if name in point and point[name] not in accepted:
        raise ValueError(f"{where}: field {name} must be one of {', '.join(accepted)}, got {point[name]!r}")
