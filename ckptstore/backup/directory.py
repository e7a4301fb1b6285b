"""Pushing what is finished in a source directory to one store."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptstore.backup.jobs import Job
from ckptstore.backup.report import PlaceReport, Problem
from ckptstore.backup.sources import Finished, Found
from ckptstore.backup.state import JobState
from ckptstore.errors import (
    CkptError,
    ConflictError,
    NotFoundError,
    SourceChangedError,
    UsageError,
    printable,
)
from ckptstore.layout import STEP_LIMIT
from ckptstore.manifest import content_of
from ckptstore.saveoptions import SaveOptions
from ckptstore.scanning import Scan, said_step
from ckptstore.store import Store
from ckptstore.transfer import Mover, SourceFile, Transfer


@dataclass(frozen=True)
class Pushing:
    """How the checkpoints of a directory are pushed.

    Attributes:
        job: The job.
        found: What the directory holds.
        state: What this host remembers.
        scratch: A directory for what is made up.
        cancel: Ends it.
        dry_run: Only say what would be done.
    """

    job: Job
    found: Found
    state: JobState
    scratch: Path
    cancel: threading.Event
    dry_run: bool = False

    def push_to(self, store: Store, report: PlaceReport, number: int) -> None:
        """Push what the store has not got, the oldest step first.

        A checkpoint that changes or goes while it is read is left for the next run. One that
        cannot be stored is a problem of its own.

        Args:
            store: Where to.
            report: Takes what was done.
            number: The step of a plain directory that says none.

        Raises:
            CkptError: the store failed.
        """
        run = self.job.run
        assert run is not None
        there = f"{store.id if store.exists else store.uri}/{run}"
        before = self.state.pushed(there)
        now: dict[str, str] = {}
        for one in self.found.finished:
            key = str(one.step) if one.step is not None else "plain"
            try:
                source = one.open(self.scratch)
                state = self._state_of(source)
                if before.get(key) == state:
                    now[key] = state
                    continue
                step = self._step(one, source, store, number)
            except (NotFoundError, SourceChangedError):
                report.notes.append(f"{printable(one.name)} changed while it was read: left")
                continue
            except (UsageError, ConflictError) as error:
                report.problems.append(Problem.of(error, one.name))
                continue
            if self.dry_run:
                report.copied += [f"{run}@{step}"] if step is not None else []
                continue
            if step is None or self._push(store, run, step, source, one, report):
                now[key] = state
                if now.get(key) != before.get(key):
                    self.state.note_pushed(there, {**before, **now})
        if not self.dry_run and now != before:
            self.state.note_pushed(there, now)

    def _push(
        self, store: Store, run: str, step: int, source: Scan, one: Finished, report: PlaceReport
    ) -> bool:
        """Push one; whether the store holds it now."""
        options = SaveOptions(keep_partial=True, cancel=self.cancel)
        try:
            result = store.push(source, run, step, options)
        except SourceChangedError:
            report.notes.append(f"{printable(one.name)} changed while it was read: left")
            return False
        except UsageError as error:  # what this storage cannot hold
            report.problems.append(Problem.of(error, one.name))
            return False
        if result.created:
            report.copied.append(f"{run}@{step}")
        report.sent_bytes += result.sent
        return True

    def _state_of(self, source: Scan) -> str:
        """What tells one state of a checkpoint's files from another without reading them."""
        digest = hashlib.blake2b(digest_size=16)
        for f in source.files:
            if not f.real.startswith(f"{self.scratch}/"):
                i = f.identity
                digest.update(
                    f"{f.path}\0{f.executable}\0{i.device}\0{i.inode}\0{i.size}\0{i.mtime_ns}\0"
                    f"{i.ctime_ns}\n".encode()
                )
        digest.update("\n".join(source.empty_directories).encode())
        return digest.hexdigest()

    def _step(self, one: Finished, source: Scan, store: Store, number: int) -> int | None:
        """The step to push as; ``None`` when the newest checkpoint is just this."""
        if one.step is not None:
            return one.step
        said = said_step(source)
        if said is not None:
            return said
        assert self.job.run is not None
        newest = store.catalog.newest(self.job.run) if store.exists else None
        commit = newest.commit if newest is not None else None
        if commit is None or commit.size != source.size:
            return number
        return None if commit.content == _content(source, self.cancel) else number


def next_number(stores: Sequence[Store], run: str) -> int:
    """One more than the highest step of the run in any of the stores that answer."""
    steps = [0]
    for store in stores:
        try:
            if store.exists:
                steps += [name.step for name in store.catalog.record_names(run)]
        except CkptError:
            continue  # it is a problem when it is its turn
    return min(max(steps) + 1, STEP_LIMIT - 1)


def _content(source: Scan, cancel: threading.Event) -> str:
    """The content digest that a checkpoint of these files would have."""
    transfers = [
        Transfer(
            f.path,
            f.size,
            open_reader=lambda f=f: SourceFile(f.real, f.identity),  # type: ignore[misc]
            executable=f.executable,
        )
        for f in source.files
    ]
    entries = [moved.entry for moved in Mover(cancel=cancel).run(transfers)]
    files = tuple(entry for entry in entries if entry is not None)
    return content_of(files, tuple(source.empty_directories))
