"""An append-only JSONL file that survives being killed: whole lines or nothing, one writer, resumable."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from mhc.gsm8k.rows import Record, dumps, read


class Journal:
    """Opens or creates `path`, locks it for this process and repairs a line that a kill tore.

    Args:
        path: the JSONL file.
        header: fields that identify the work; on a new file they are written as its first line (with `extra`), on an
            old one they must agree with its first line.
        extra: further fields of the first line, which need not agree (time, host).

    Raises:
        ValueError: the file was made by different work; the message names the field.
        BlockingIOError: another process is writing the file.
    """

    def __init__(self, path: str | Path, header: Record, extra: Record | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise BlockingIOError(f"{path} is being written by another process") from error
        self.torn_bytes = self._repair()
        self.records = read(self.path)
        if not self.records:
            self.append({**header, **(extra or {}), "record": "run"})
        for key, value in header.items():
            if self.records[0].get(key) != value:
                self.close()
                raise ValueError(
                    f"{path} holds a run with {key}={self.records[0].get(key)!r}, not {value!r}: name another file"
                )

    def append(self, record: Record, *, sync: bool = True) -> None:
        """Write one line. With `sync` it is on the disk once this returns: not even a power cut can lose it."""
        self._file.write(dumps(record).encode() + b"\n")
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        self.records.append(record)

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _repair(self) -> int:
        """Drop what follows the last newline; returns its size."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        return len(content) - whole
