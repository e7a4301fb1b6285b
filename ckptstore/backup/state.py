"""What a host remembers of its jobs: the last status, a history, what was pushed already.

    ~/.local/state/ckptstore/jobs/<NAME>-<8 digits for the file it stands in>/
        status.json      how the last run went
        history.jsonl    a line a run, the last thousand
        pushed.json      which state of a source directory went where, so that it is not read again
        lock             held by the run that is under way

None of it decides what is in a store. Whatever is lost or damaged here costs some reading.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from ckptstore.backup.jobs import Job
from ckptstore.errors import ConflictError, translate_os_errors

HISTORY_LINES = 1000


class JobState:
    """The folder of one job.

    Args:
        job: The job.
        folder: Where; by default in the user's state directory.
    """

    def __init__(self, job: Job, folder: Path | None = None) -> None:
        digest = hashlib.blake2b(os.fsencode(job.file), digest_size=4).hexdigest()
        base = folder or platformdirs.user_state_path("ckptstore") / "jobs"
        self.folder = base / f"{job.name}-{digest}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the job on this host. The kernel lets go of it when the process ends, however.

        Raises:
            ConflictError: another process of this host runs the job.
        """
        with translate_os_errors(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with translate_os_errors(str(self.folder / "lock")):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holder = os.pread(fd, 100, 0).decode("ascii", "replace").strip()
                    raise ConflictError(
                        f"it is running already on this host (process {holder or 'unknown'})",
                        hint="it ends by itself; nothing has to be unlocked",
                    ) from None
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    # What was

    def status(self) -> dict[str, Any]:
        """The status of the last run; empty when there was none, or it cannot be read."""
        return _read(self.folder / "status.json")

    def history(self) -> list[dict[str, Any]]:
        """The runs that are remembered, oldest first."""
        try:
            lines = (self.folder / "history.jsonl").read_text("utf-8", "replace").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    found.append(entry)
        return found

    def record(self, status: Mapping[str, Any], copy: Path | None = None) -> None:
        """Write the status, and add it to the history.

        Raises:
            CkptError: one of the files cannot be written.
        """
        text = json.dumps(status, indent=2) + "\n"
        _write(self.folder / "status.json", text)
        lines = [json.dumps(entry) for entry in [*self.history(), status]][-HISTORY_LINES:]
        _write(self.folder / "history.jsonl", "".join(f"{line}\n" for line in lines))
        if copy is not None:
            _write(copy, text, 0o644)

    # What was pushed

    def pushed(self, destination: str) -> dict[str, str]:
        """For each step in a destination: the state of the source that was pushed there."""
        table = _read(self.folder / "pushed.json").get(destination, {})
        if not isinstance(table, dict):
            return {}
        return {step: state for step, state in table.items() if isinstance(state, str)}

    def note_pushed(self, destination: str, steps: Mapping[str, str]) -> None:
        """Remember these, instead of all that was remembered of the destination."""
        table = _read(self.folder / "pushed.json")
        _write(self.folder / "pushed.json", json.dumps(table | {destination: dict(steps)}) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with translate_os_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with open(fd, "w", encoding="utf-8") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
