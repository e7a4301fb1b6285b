"""One pass of a mirror: what does it lack, and copying that."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ckptstore import mirrors
from ckptstore.deleting import delete
from ckptstore.errors import (
    AccessDeniedError,
    CancelledError,
    CkptError,
    ConflictError,
    NotFoundError,
)
from ckptstore.layout import Name
from ckptstore.maintenance.mirror.how import How
from ckptstore.maintenance.mirror.onerun import Memory, RunPass
from ckptstore.maintenance.mirror.pairing import check_pair, where
from ckptstore.maintenance.mirror.results import Lag, MirrorResult, Skipped
from ckptstore.mirrors import Mirror
from ckptstore.reading import Checkpoint
from ckptstore.store import Store

log = logging.getLogger(__name__)


class NothingYetError(NotFoundError):
    """The source holds no checkpoint: whoever follows it waits."""


def mirror(
    source: Store, target: Store, how: How | None = None, memory: Memory | None = None
) -> MirrorResult:
    """Copy to ``target`` what it lacks of ``source``, and has neither voided nor trashed.

    The target is made when there is no store. What cannot be copied is skipped and reported; an
    error of the target ends the pass and is the result's ``failure``. A pass that ends early, by an
    error or a SIGKILL, is completed by the next one, which sends nothing again but the blocks that
    were in flight.

    Args:
        source: The store to copy from.
        target: The store to copy to.
        how: Limits, order, ways to end it.
        memory: What an earlier pass of this process has learnt.

    Raises:
        NotFoundError: the source is no store or holds no checkpoint, or the mirror was a store and
            is none any more.
        UsageError: the target is the source, or lies inside it, or the other way round.
        ConflictError: the target is another store than the one that was mirrored to before.
        CkptError: the source could not be read, or the target not be opened.
    """
    return _Pass(source, target, how or How(), memory or Memory()).run()


class _Pass:
    def __init__(self, source: Store, target: Store, how: How, memory: Memory) -> None:
        self.source = source
        self.target = target
        self.how = how
        self.memory = memory
        self.begun = time.monotonic()
        self.copied: list[str] = []
        self.deleted: list[str] = []
        self.skipped: list[Skipped] = []
        self.sent = 0
        self.behind = Lag()
        self.failure: CkptError | None = None
        self.target_id: str | None = None

    def run(self) -> MirrorResult:
        runs = runs_to_mirror(self.source, self.how)
        note = check_pair(self.source, self.target)
        if self.how.dry_run:
            self.noted: Mirror | None = None
        else:
            self.noted = self._expect(note)
            self.target.catalog.create()
            self.target_id = self.target.catalog.require_writable().store
        for run in runs:
            if self.how.ending:
                break
            one = RunPass(
                self.source,
                self.target,
                run,
                self.how,
                self.memory,
                self._acknowledged(run),
                self.acknowledge,
            )
            try:
                one.copy()
            except CancelledError:
                pass
            except CkptError as error:
                self.failure = error  # the storage failed: it would for the other runs too
                break
            finally:
                self.copied += one.copied
                self.skipped += one.skipped
                self.sent += one.sent
                self.behind += Lag.of(one.lacking.values())
        if self.failure is None and self.how.delete and not self.how.ending:
            self._delete(runs)
        self._note_outcome()
        return MirrorResult(
            self.target.uri,
            tuple(self.copied),
            self.sent,
            tuple(self.skipped),
            tuple(self.deleted),
            self.behind,
            time.monotonic() - self.begun,
            self.failure,
        )

    def _expect(self, note: Mirror | None) -> Mirror | None:
        """Note the mirror in the source, so that nobody deletes there what it is still owed."""
        try:
            return mirrors.expect_mirror(self.source.catalog, self.target.uri, self.how.runs)
        except AccessDeniedError as error:
            self._cannot_note(error)
            return note

    def _cannot_note(self, error: CkptError) -> None:
        self.memory.unwritable = isinstance(error, AccessDeniedError)
        if not self.memory.said_unnoted:
            self.memory.said_unnoted = True
            log.warning(
                "%s cannot be written (%s): retention there does not know what %s lacks",
                self.source.uri,
                error,
                self.target.uri,
            )

    def _acknowledged(self, run: str) -> frozenset[Name]:
        if self.noted is None:
            return frozenset()
        return mirrors.acknowledged(self.source.catalog, self.noted, run)

    def acknowledge(self, run: str, names: Iterable[Name]) -> None:
        """Note in the source what the mirror holds."""
        if self.noted is None or self.memory.unwritable:
            return
        try:
            mirrors.acknowledge(self.source.catalog, self.noted, run, names)
        except CkptError as error:
            self._cannot_note(error)

    def _note_outcome(self) -> None:
        if self.noted is None or self.memory.unwritable:
            return
        problem = str(self.failure) if self.failure is not None else None
        if problem is None and self.skipped:
            problem = f"{self.skipped[0].ref}: {self.skipped[0].reason}"
        if problem is None and self.how.ending:
            return
        try:
            mirrors.note_attempt(
                self.source.catalog, self.noted, store=self.target_id, problem=problem
            )
        except CkptError as error:
            self._cannot_note(error)

    # Deleting what the source has deleted

    def _delete(self, runs: Sequence[str]) -> None:
        gone: list[Checkpoint] = []
        for run in runs:
            try:
                there = self.target.list(run)
            except NotFoundError:
                continue
            catalog = self.source.catalog
            records, trash = catalog.record_names(run), set(catalog.trash_names(run))
            for checkpoint in there:
                found = catalog.find(run, checkpoint.name) if checkpoint.name in records else None
                deleted = found.is_void if found is not None else checkpoint.name in trash
                if deleted:
                    gone.append(checkpoint)
        if len(gone) > self.how.max_delete:
            self.skipped.append(
                Skipped(
                    gone[0].ref,
                    f"{len(gone)} checkpoints were deleted in {self.source.uri}, which is more "
                    f"than {self.how.max_delete}: none was deleted in {self.target.uri}",
                    "if that is right: --max-delete",
                )
            )
            return
        for checkpoint in gone:
            if self.how.dry_run:
                self.deleted.append(checkpoint.ref)
                continue
            try:
                delete(self.target.catalog, checkpoint, reason="deleted in the mirror's source")
                self.deleted.append(checkpoint.ref)
            except (ConflictError, NotFoundError) as error:
                if isinstance(error, ConflictError):
                    log.info("%s is kept in %s: %s", checkpoint.ref, self.target.uri, error)


def runs_to_mirror(source: Store, how: How) -> list[str]:
    """The runs of the source that shall be mirrored.

    Raises:
        NothingYetError: it holds no checkpoint of them.
        NotFoundError: it is no store.
        CkptError: it could not be read.
    """
    runs = [r for r in source.runs() if how.wants(r)]
    if not any(source.catalog.record_names(r) for r in runs):
        raise NothingYetError(
            f"{source.uri} holds no checkpoint"
            + (" of these runs" if how.runs else "")
            + ": there is nothing to mirror",
            hint="is it the right place, and mounted?",
        )
    return runs


def note_failure(source: Store, uri: str, error: CkptError) -> None:
    """Note in the source that a mirror could not be reached, if it is one that is known there."""
    with suppress(CkptError):
        for known in mirrors.known_mirrors(source.catalog):
            if known.uri == where(uri) and known.note is not None:
                mirrors.note_attempt(source.catalog, known, problem=str(error))
