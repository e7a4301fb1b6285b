"""The metrics file: one JSON object a line, whole after a kill and without steps that never were.

A line is ``{"step": 12, "life": 2, "reward/mean": 0.41, …}``; ``life`` counts the run's starts. A
value that is not finite is ``null`` there, and ``"nonfinite": {"actor/loss": "nan"}`` says what it
was, because NaN is not JSON. A kill leaves at most a torn last line, which readers pass over.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptstore.backends.localfile import sync_directory
from ckptstore.errors import translate_os_errors

_PART = ".part"


class MetricsFile:
    """``metrics.jsonl`` of a run, written by one process at a time.

    Lines are appended by a single write each, so that a kill cannot mix two of them.

    Args:
        directory: Where the file is; it must exist.
        life: The number of this start of the run; it names the file of discarded lines.
    """

    def __init__(self, directory: Path, life: int) -> None:
        self.path = directory / "metrics.jsonl"
        self.discarded = directory / f"metrics.discarded-{life}.jsonl"
        self._life = life
        self._fd: int | None = None
        self._torn = False

    def open(self, resumed_from: int | None) -> None:
        """Set aside the lines beyond ``resumed_from`` (all of them for ``None``), then append.

        Each line stays in ``metrics.jsonl`` or goes to ``metrics.discarded-<life>.jsonl``, and none
        is lost or doubled when the process is killed on the way: the next start finishes or takes
        back what it finds begun. An older process that still has the file open no longer writes
        into it afterwards.

        Raises:
            CkptError: the directory cannot be written (full, denied, …); no line is lost.
        """
        self.close()
        with translate_os_errors(str(self.path)):
            self._recover()
            if self.path.exists():
                self._split(-1 if resumed_from is None else resumed_from)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o666)
            self._torn = False
            sync_directory(str(self.path.parent))

    # The rename of the kept lines' .part over metrics.jsonl is the moment that counts. That file is
    # made first and gone last, so: where it is, nothing has happened yet; where only the discarded
    # lines' .part is, they have left metrics.jsonl and lack their final name.

    def _split(self, last: int) -> None:
        kept: list[bytes] = []
        moved: list[bytes] = []
        for line in _lines(self.path):
            (kept if -1 < _step(line) <= last else moved).append(line)
        kept_part = _with_part(self.path)
        moved_part = _with_part(self.discarded)
        _write(kept_part, kept)
        if moved:
            before = _lines(self.discarded) if self.discarded.exists() else ()
            _write(moved_part, [*before, *moved])
        os.replace(kept_part, self.path)
        sync_directory(str(self.path.parent))
        if moved:
            os.replace(moved_part, self.discarded)

    def _recover(self) -> None:
        directory = self.path.parent
        kept_part = _with_part(self.path)
        begun = kept_part.exists()
        for moved_part in directory.glob(f"metrics.discarded-*.jsonl{_PART}"):
            if begun:
                moved_part.unlink()
            else:
                os.replace(moved_part, moved_part.with_suffix(""))
        sync_directory(str(directory))
        kept_part.unlink(missing_ok=True)

    def append(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Write the line of a step.

        Raises:
            OSError: it could not be written whole; the next line is apart from what was.
        """
        assert self._fd is not None, "open() comes first"
        line = _encode(step, self._life, metrics)
        if self._torn:
            line = b"\n" + line
        if os.write(self._fd, line) < len(line):
            self._torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._torn = False

    def sync(self) -> None:
        """Make all lines survive a power failure.

        Raises:
            OSError: the storage refused.
        """
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects in a metrics file, in its order; torn and foreign lines are passed over.

    Raises:
        NotFoundError: there is no such file.
        CkptError: it cannot be read.
    """
    with translate_os_errors(os.fspath(path)):
        return [record for line in _lines(Path(path)) if (record := _decode(line)) is not None]


def _encode(step: int, life: int, metrics: Mapping[str, float | str]) -> bytes:
    record: dict[str, Any] = {"step": step, "life": life}
    nonfinite = {}
    for name, value in metrics.items():
        if isinstance(value, (int, str)):
            record[name] = value
        elif math.isfinite(number := float(value)):
            record[name] = number  # as its shortest exact spelling: it reads back bit for bit
        else:
            record[name] = None
            nonfinite[name] = str(number)
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _step(line: bytes) -> int:
    step = (_decode(line) or {}).get("step")
    return step if isinstance(step, int) else -1


def _lines(path: Path) -> Iterator[bytes]:
    for line in path.read_bytes().split(b"\n"):
        if line:
            yield line


def _write(path: Path, lines: list[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(str(path.parent))


def _with_part(path: Path) -> Path:
    return path.with_name(path.name + _PART)
