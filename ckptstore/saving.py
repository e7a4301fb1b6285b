"""Saving: from a claimed directory to a record.

The order of the steps is what makes a save atomic (docs/design explains each):

    lease → no newer life → directory, claimed exclusively → files, each complete and durable before
    it has its name → manifest → directories made durable → no newer life → record, created
    exclusively → hint → lease removed

Before the record there is no checkpoint; with it, all of it is there.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Self

from ckptstore import document
from ckptstore.adding import Adding
from ckptstore.catalog import Catalog
from ckptstore.completing import (
    directories_of,
    make_empty_directories,
    not_arrived,
    write_whole,
)
from ckptstore.errors import (
    CancelledError,
    CkptError,
    IntegrityError,
    NoSpaceError,
    VoidedError,
)
from ckptstore.hashing import block_digest
from ckptstore.ids import random_letters
from ckptstore.layout import Name, RunKeys, check_run, check_step
from ckptstore.leases import LeaseKeeper
from ckptstore.lives import require_newest
from ckptstore.manifest import FORMAT, FileEntry, Manifest
from ckptstore.records import Commit, ManifestPin, finite, timestamp, writer_here
from ckptstore.saveoptions import SaveOptions
from ckptstore.voiding import discard, ensure_void

log = logging.getLogger(__name__)

_LIST_AGAIN = (0.1, 0.5)
"""Seconds to wait before listing again: not every storage lists at once what it has taken."""


class Save(Adding):
    """A save under way: a context manager that commits on success.

    After an exception in the block nothing is visible in the store. ``add_file``, ``add_bytes`` and
    ``open`` may be called from several threads.

    Attributes:
        committed: The record, once it is committed.
    """

    def __init__(
        self, catalog: Catalog, run: str, step: int, options: SaveOptions | None = None
    ) -> None:
        options = options or SaveOptions()
        options.check()
        check_run(run)
        check_step(step)
        self._metadata = options.json_metadata()
        self._catalog = catalog
        self._store_id = catalog.create().store
        catalog.require_writable()
        self.writer = writer_here(random_letters() + random_letters())
        parent = catalog.newest(run)
        self._parent = parent.commit if parent is not None else None
        self._options = options
        self._keys = RunKeys(run)
        self._backend = catalog.backend
        name, self._lease = self._claim(run, step)
        super().__init__(catalog.backend, run, name, options)
        self._forgotten = weakref.finalize(
            self, _warn_forgotten, f"{run}@{step}", self._lease, os.getpid()
        )
        self.committed: Commit | None = None

    def _claim(self, run: str, step: int) -> tuple[Name, LeaseKeeper]:
        while True:
            name = self._catalog.new_name(run, step)
            lease = LeaseKeeper(self._catalog, run, name, self.writer, life=self._options.life)
            try:
                self._check_life(run)
                if self._backend.make_directory(self._keys.directory(name)):
                    return name, lease
            except BaseException:
                lease.release()
                raise
            lease.release()

    def _check_life(self, run: str) -> None:
        """Fail if a newer life of the run has begun.

        A save looks for lives after its lease is written, and a life looks for leases after its
        document is: of a save and a newer life at least one sees the other. The second look, before
        the record, is for a lease that was lost since.
        """
        if self._options.life is not None:
            require_newest(self._catalog, run, self._options.life)

    def complete(self, entry: FileEntry, written: int) -> None:
        """See :class:`Adding`; the lease's journal notes it too."""
        super().complete(entry, written)
        self._lease.completed([entry])

    # Ending

    def commit(self) -> Commit:
        """Make the checkpoint exist.

        Returns:
            Its record.

        Raises:
            VoidedError: the save was given up by gc or a later save.
            SupersededError: a newer life of the run has begun.
            CkptError: the storage failed; nothing is visible.
        """
        self._check_running()
        entries = self.entries
        self._catalog.check_alive()
        manifest = Manifest.build(self.run, self.name, entries, self._empty, self._metadata)
        data = manifest.encode()
        make_empty_directories(self._backend, self.run, self.name, manifest)
        write_whole(self._backend, self._keys.manifest(self.name), data)
        self._check_arrived(manifest)
        if self._options.cancel is not None and self._options.cancel.is_set():
            raise CancelledError("cancelled")
        self._backend.sync(directories_of(self.run, self.name, manifest))
        commit = self._record(manifest, data)
        self._create_record(commit)
        self._ended = True
        self._forgotten.detach()
        self.committed = commit
        self._after_commit()
        return commit

    def _check_arrived(self, manifest: Manifest) -> None:
        """Compare what the storage lists with what shall be committed."""
        for pause in (*_LIST_AGAIN, None):
            problem = not_arrived(self._catalog, self.run, self.name, manifest)
            if problem is None:
                return
            self._catalog.check_alive()
            self._check_not_voided()
            if pause is None:
                raise IntegrityError(
                    f"{problem} although it was stored: nothing is committed",
                    hint="check the storage; did something delete from it?",
                )
            time.sleep(pause)

    def _record(self, manifest: Manifest, data: bytes) -> Commit:
        options = self._options
        dropped = sorted(set(options.metrics) - set(finite(options.metrics.items())))
        if dropped:
            log.warning("metrics that are not finite are left out: %s", ", ".join(dropped))
        parent = self._parent
        return Commit(
            format=FORMAT,
            name=str(self.name),
            run=self.run,
            step=self.name.step,
            seq=self.name.seq,
            store=self._store_id,
            manifest=ManifestPin(size=len(data), digest=block_digest(data)),
            content=manifest.content,
            size=manifest.size,
            files=len(manifest.files),
            created=timestamp(),
            writer=self.writer,
            parent=parent.name if parent is not None else None,
            metrics=finite(options.metrics.items()),
            best=options.best or (parent.best if parent is not None else None),
            tags=tuple(sorted(set(options.tags))),
            life=options.life,
        )

    def _create_record(self, commit: Commit) -> None:
        self._catalog.check_alive()
        self._check_life(self.run)
        data = document.encode(commit)
        key = self._keys.record(self.name)
        try:
            created = self._catalog.create_document(key, data)
        except CkptError:
            # Whether the record landed is not known. A void settles it, one way or the other.
            if ensure_void(self._catalog, self.run, self.name, "the record could not be created"):
                raise
            created = True
        if not created:
            raise self._voided()

    def _check_not_voided(self) -> None:
        found = self._catalog.find(self.run, self.name)
        if found is not None and found.is_void:
            raise self._voided()

    def _voided(self) -> VoidedError:
        self._check_life(self.run)  # a newer life that gave it up is the better reason
        return VoidedError(
            f"the save of {self.run}@{self.name.step} ({self.name}) was given up by someone else "
            "while it was under way",
            hint="it took longer than its lease, or a later save took it over: save again",
        )

    def _after_commit(self) -> None:
        """The checkpoint exists; what is left to do may fail without harm."""
        try:
            self._backend.set_hint(self._keys.latest, str(self.name))
        except CkptError as error:
            log.warning("%s does not name the newest checkpoint: %s", self._keys.latest, error)
        try:
            self._lease.release()
        except CkptError as error:
            log.warning("the lease of %s@%s stays for gc: %s", self.run, self.name.step, error)

    def abort(self, error: BaseException | None = None) -> None:
        """End the save without a checkpoint.

        Its files go at once, or stay for the next save if ``keep_partial`` says so (not when the
        disk is full: then they are what fills it).
        """
        if self._ended or os.getpid() != self._process:
            return
        self._ended = True
        self._forgotten.detach()
        keep = self._options.keep_partial and not isinstance(error, NoSpaceError | VoidedError)
        self._lease.stop()
        try:
            self._catalog.check_alive()  # nothing is written where the store is not any more
            if keep and self._entries:
                self._lease.abandon()
                return
            discard(self._catalog, self.run, self.name, "the save failed")
            self._lease.release()
        except CkptError as cleaning:  # what stays is not visible, and gc will find it
            log.warning("after the failed save of %s@%s: %s", self.run, self.name.step, cleaning)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(error)
            return
        try:
            if not self._ended and os.getpid() == self._process:
                self.commit()
        except BaseException as failure:
            self.abort(failure)
            raise


def _warn_forgotten(what: str, lease: LeaseKeeper, process: int) -> None:
    """A save that was neither committed nor aborted when it was collected, or at exit."""
    if os.getpid() != process:  # a forked child ends: the save is its parent's
        return
    log.error("the save of %s was never committed: there is no such checkpoint", what)
    with suppress(CkptError):
        lease.abandon()
