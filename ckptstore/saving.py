"""Saving: from a claimed directory to a record.

The order of the steps is what makes a save atomic (docs/design explains each):

    lease → directory, claimed exclusively → files, each complete and durable before it has its name
    → manifest → directories made durable → record, created exclusively → hint → lease removed

Before the record there is no checkpoint; with it, all of it is there.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from ckptstore import document
from ckptstore.catalog import Catalog
from ckptstore.errors import (
    CancelledError,
    CkptError,
    IntegrityError,
    NoSpaceError,
    UsageError,
    VoidedError,
    printable,
    translate_os_errors,
)
from ckptstore.hashing import BLOCK_SIZE, block_digest
from ckptstore.ids import random_letters
from ckptstore.layout import Name, RunKeys, check_new_path, check_run, check_step
from ckptstore.leases import LeaseKeeper
from ckptstore.manifest import FORMAT, FileEntry, Manifest
from ckptstore.records import Commit, ManifestPin, finite, timestamp, writer_here
from ckptstore.savefile import SaveFile
from ckptstore.saveoptions import SaveOptions
from ckptstore.transfer import Moved, Mover, SourceFile, SourceIdentity, Transfer
from ckptstore.voiding import discard, ensure_void

log = logging.getLogger(__name__)


class Save:
    """A save under way: a context manager that commits on success.

    After an exception in the block nothing is visible in the store. ``add_file``, ``add_bytes`` and
    ``open`` may be called from several threads.

    Attributes:
        run, name: What will be committed.
        sent_bytes: Bytes that went to the store so far, without the manifest.
        committed: The record, once it is committed.
    """

    def __init__(
        self, catalog: Catalog, run: str, step: int, options: SaveOptions | None = None
    ) -> None:
        self._options = options or SaveOptions()
        self._options.check()
        self._metadata = self._options.json_metadata()
        self.run = check_run(run)
        check_step(step)
        self._catalog = catalog
        self._backend = catalog.backend
        self._keys = RunKeys(run)
        self._store_id = catalog.create().store
        catalog.require_writable()
        self.writer = writer_here(random_letters() + random_letters())
        parent = catalog.newest(run)
        self._parent = parent.commit if parent is not None else None
        self.name, self._lease = self._claim(step)
        self._lock = threading.RLock()  # a file that is collected as garbage comes back here
        self._process = os.getpid()
        self._entries: dict[str, FileEntry] = {}
        self._empty: list[str] = []
        self._open: set[str] = set()
        self._ended = False
        self._forgotten = weakref.finalize(
            self, _warn_forgotten, f"{run}@{step}", self._lease, os.getpid()
        )
        self.sent_bytes = 0
        self.committed: Commit | None = None

    def _claim(self, step: int) -> tuple[Name, LeaseKeeper]:
        while True:
            name = self._catalog.new_name(self.run, step)
            lease = LeaseKeeper(self._catalog, self.run, name, self.writer)
            try:
                if self._backend.make_directory(self._keys.directory(name)):
                    return name, lease
            except BaseException:
                lease.release()
                raise
            lease.release()

    @property
    def mover(self) -> Mover:
        """A mover with this save's threads, progress and cancellation."""
        options = self._options
        return Mover(threads=options.threads, progress=options.progress, cancel=options.cancel)

    @property
    def paths(self) -> frozenset[str]:
        """The files that are complete."""
        with self._lock:
            return frozenset(self._entries)

    # Adding files

    def add_file(self, path: str, source: str | os.PathLike[str]) -> None:
        """Store a file of this machine as ``path``.

        Raises:
            SourceChangedError: the file changed while it was read.
        """
        source = os.path.realpath(source)
        with translate_os_errors(source):
            status = os.stat(source)
        identity = SourceIdentity.of(status)
        self.add_transfers(
            [
                self.transfer(
                    path, status.st_size, source, identity, executable=bool(status.st_mode & 0o100)
                )
            ]
        )

    def transfer(
        self, path: str, size: int, source: str, identity: SourceIdentity, *, executable: bool
    ) -> Transfer:
        """The transfer that stores the file ``source`` as ``path``."""
        key = self._keys.file(self.name, path)
        return Transfer(
            path,
            size,
            open_reader=lambda: SourceFile(source, identity),
            open_writer=lambda: self._backend.open_writer(key, executable=executable),
            executable=executable,
            sequential=not self._backend.capabilities.parallel_blocks,
        )

    def add_transfers(self, transfers: Sequence[Transfer]) -> None:
        """Store many files at once, in parallel over files and blocks."""
        self._check_running()
        for transfer in transfers:
            self._reserve(transfer.path)
        self.mover.run(transfers, done=self._moved)

    def _moved(self, moved: Moved) -> None:
        assert moved.entry is not None
        self.complete(moved.entry, moved.written)

    def add_bytes(self, path: str, data: bytes) -> None:
        """Store ``data`` as ``path``."""
        with self.open(path) as f:
            f.write(data)

    def open(self, path: str, *, executable: bool = False) -> SaveFile:
        """A binary file to write ``path`` through; it is complete when it is closed."""
        self._check_running()
        self._reserve(path)
        key = self._keys.file(self.name, path)
        writer = self._backend.open_writer(key, executable=executable)
        with self._lock:
            self._open.add(path)
        return SaveFile(
            writer, path, executable=executable, complete=self.complete, given_up=self._forget
        )

    def add_empty_directory(self, path: str) -> None:
        """Keep a directory that holds nothing."""
        self._check_running()
        check_new_path(path)
        self._empty.append(path)

    def adopt(self, entry: FileEntry, source_key: str) -> bool:
        """Take a stored file, known to have the content of ``entry``, without moving its bytes.

        Returns:
            Whether that could be done here.
        """
        self._check_running()
        target = self._keys.file(self.name, entry.path)
        if self._backend.copy(source_key, target, executable=entry.exec) is None:
            return False
        self._reserve(entry.path)
        self.complete(entry, 0)
        return True

    def _reserve(self, path: str) -> None:
        check_new_path(path)
        forbidden = sorted(set(path) & set(self._backend.capabilities.forbidden))
        if forbidden:
            raise UsageError(
                f"{printable(path)!r} cannot be stored in {self._backend.uri}: "
                f"a name cannot hold {' '.join(forbidden)} there"
            )
        with self._lock:
            if path in self._entries or path in self._open:
                raise UsageError(f"{printable(path)!r} was added to the save before")

    def complete(self, entry: FileEntry, written: int) -> None:
        """Count a file whose bytes are in place, ``written`` of them sent."""
        with self._lock:
            self._open.discard(entry.path)
            self._entries[entry.path] = entry
            self.sent_bytes += written
        self._lease.completed([entry])

    def _forget(self, path: str) -> None:
        with self._lock:
            self._open.discard(path)

    def _check_running(self) -> None:
        if self._ended:
            raise UsageError("the save has ended")
        if os.getpid() != self._process:
            raise UsageError("a save goes on only in the process that began it, not in a fork")

    # Ending

    def commit(self) -> Commit:
        """Make the checkpoint exist.

        Returns:
            Its record.

        Raises:
            VoidedError: the save was given up by gc or a later save.
            CkptError: the storage failed; nothing is visible.
        """
        self._check_running()
        if self._open:
            raise UsageError(f"{printable(min(self._open))!r} is still open in the save")
        self._catalog.check_alive()
        manifest = Manifest.build(
            self.run, self.name, self._entries.values(), self._empty, self._metadata
        )
        data = manifest.encode()
        for path in manifest.empty_directories:
            self._backend.make_directory(self._keys.file(self.name, path))
        self._write_whole(self._keys.manifest(self.name), data)
        self._check_arrived(manifest)
        if self._options.cancel is not None and self._options.cancel.is_set():
            raise CancelledError("cancelled")
        self._backend.sync(self._directories(manifest))
        commit = self._record(manifest, data)
        self._create_record(commit)
        self._ended = True
        self._forgotten.detach()
        self.committed = commit
        self._after_commit()
        return commit

    def _check_arrived(self, manifest: Manifest) -> None:
        """Compare what the storage lists with what shall be committed."""
        root = self._keys.directory(self.name)
        listed = {e.key: e.size for e in self._backend.list(root, recursive=True)}
        for entry in manifest.files:
            size = listed.get(f"{root}/{entry.path}")
            if size != entry.size:
                self._catalog.check_alive()
                self._check_not_voided()
                found = "is not there" if size is None else f"has {size} bytes of {entry.size}"
                raise IntegrityError(
                    f"{printable(entry.path)} {found} although it was stored: nothing is committed",
                    hint="check the storage; did something delete from it?",
                )

    def _write_whole(self, key: str, data: bytes) -> None:
        writer = self._backend.open_writer(key)
        try:
            view = memoryview(data)
            for offset in range(0, len(data), BLOCK_SIZE):
                writer.write(offset, view[offset : offset + BLOCK_SIZE])
            writer.finish(len(data))
        finally:
            writer.abort()

    def _directories(self, manifest: Manifest) -> list[str]:
        """Every directory whose names the checkpoint depends on, the deepest first."""
        below: set[str] = set()
        for path in [e.path for e in manifest.files] + list(manifest.empty_directories):
            while path := path.rpartition("/")[0]:
                below.add(path)
        root = self._keys.directory(self.name)
        deepest_first = sorted(below, key=lambda path: (-path.count("/"), path))
        return [*(f"{root}/{path}" for path in deepest_first), root, self.run, ""]

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
        )

    def _create_record(self, commit: Commit) -> None:
        self._catalog.check_alive()
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
