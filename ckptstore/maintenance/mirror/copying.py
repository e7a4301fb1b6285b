"""Copying one checkpoint to another store, byte for byte and under the same name.

The order is that of a save: lease → directory → files, verified as they are read → manifest →
directories made durable → marks → record, created exclusively. So the target shows the checkpoint
whole or not at all.

What differs from a save: the name is given, so two mirrors (or a mirror that was killed and the
next one) write into one directory. They write the same bytes, each verified before it is written
and each file complete before it has its name, so whoever comes second finds the file there. A copy
that ends early keeps what it has, down to the blocks of a file, and its lease, which says that it
is a mirror's: gc leaves it to the next pass, because a void would keep the checkpoint from ever
being copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ckptstore.backends.base import Reader, Writer
from ckptstore.catalog import Catalog, HeldLease
from ckptstore.completing import (
    directories_of,
    make_empty_directories,
    not_arrived,
    write_whole,
)
from ckptstore.deleting import refresh_hint
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    TemporaryError,
    printable,
)
from ckptstore.hashing import block_digest
from ckptstore.ids import random_letters
from ckptstore.layout import RunKeys, is_temporary
from ckptstore.leases import LeaseKeeper, is_live
from ckptstore.maintenance.mirror.how import How
from ckptstore.manifest import FileEntry, entry_problem
from ckptstore.reading import Checkpoint
from ckptstore.records import writer_here
from ckptstore.transfer import Moved, Mover, OnMismatch, Transfer
from ckptstore.transfer.throttle import ThrottledWriter

log = logging.getLogger(__name__)


_ended: set[str] = set()
"""Writers of copies of this process that ended early; their leases may stand on the target, live,
when it could not be reached then."""


class BusyError(ConflictError):
    """Another mirror is copying this checkpoint."""


def copy_checkpoint(
    source: Checkpoint, target: Catalog, how: How, carry_marks: Callable[[], None]
) -> int:
    """Copy a checkpoint that the target has no record of.

    Args:
        source: The checkpoint.
        target: The store that lacks it.
        how: Limits and ways to end.
        carry_marks: Copies its marks; called before the record exists.

    Returns:
        Bytes that were sent.

    Raises:
        BusyError: another mirror is at it.
        NotFoundError: the source deleted it meanwhile.
        IntegrityError: the source is damaged. It is marked so there.
        ConflictError: the target has given the name up.
        CkptError: storage failed. What was copied stays for the next pass.
    """
    return _Copy(source, target, how).run(carry_marks)


class _Copy:
    def __init__(self, source: Checkpoint, target: Catalog, how: How) -> None:
        self.source = source
        self.target = target
        self.backend = target.backend
        self.how = how
        self.keys = RunKeys(source.run)
        self.sent = 0
        self.mover = Mover(
            threads=how.threads or max(self.backend.capabilities.threads, 0),
            progress=how.progress,
            cancel=how.cancel,
            stop=how.stop,
        )

    def run(self, carry_marks: Callable[[], None]) -> int:
        source, name = self.source, self.source.name
        record, manifest = self._record(), self._manifest_bytes()
        self._check_names()
        older = [h for h in self.target.leases(source.run) if h.name == name]
        self._check_alone(older)
        self.writer = writer_here(random_letters() + random_letters())
        self.lease = LeaseKeeper(
            self.target,
            source.run,
            name,
            self.writer,
            copy_of=source.catalog.marker().store,
        )
        try:
            self.backend.delete([h.key for h in older])
            self.backend.make_directory(self.keys.directory(name))
            self._files(older)
            make_empty_directories(self.backend, source.run, name, source.manifest)
            self._put_manifest(manifest)
            problem = not_arrived(self.target, source.run, name, source.manifest)
            self.target.check_alive()
            if problem is not None:
                raise IntegrityError(f"{problem} in {self.target.uri} although it was copied")
            self.backend.sync(directories_of(source.run, name, source.manifest))
            carry_marks()
            self._create_record(record)
        except TemporaryError as error:
            self._leave()
            if self._is_shared():  # a file that both write is for a moment under neither name
                raise BusyError(f"another mirror copied {source.ref} too") from error
            raise
        except BaseException:
            self._leave()
            raise
        refresh_hint(self.target, source.run)
        self._release(leftovers=bool(older))
        return self.sent

    # What is copied

    def _record(self) -> bytes:
        found = self.source.catalog.find(self.source.run, self.source.name)
        if found is None or found.is_void:
            raise NotFoundError(f"{self.source.ref} was deleted meanwhile")
        if found.commit != self.source.commit:
            raise IntegrityError(f"the record of {self.source.ref} has changed")
        return found.data

    def _manifest_bytes(self) -> bytes:
        pin = self.source.commit.manifest
        manifest = self.source.manifest  # checked: it is there, and fits the record
        del manifest
        key = self.keys.manifest(self.source.name)
        data = self.source.catalog.backend.read(key, pin.size)
        if block_digest(data) != pin.digest:
            raise IntegrityError(f"the manifest of {self.source.ref} has changed")
        return data

    def _check_names(self) -> None:
        """Refuse, before a byte is sent, names that the target would change."""
        forbidden = set(self.backend.capabilities.forbidden)
        for entry in self.source.files if forbidden else ():
            if forbidden & set(entry.path):
                raise ConflictError(
                    f"{printable(entry.path)!r} cannot be stored in {self.target.uri}: a name "
                    f"cannot hold {' '.join(sorted(forbidden))} there",
                    hint="mirror this run to another kind of storage (--run leaves runs out)",
                )

    def _check_alone(self, leases: Sequence[HeldLease]) -> None:
        now = self.backend.clock() if leases else 0.0
        for held in leases:
            ours = held.lease is not None and held.lease.writer.id in _ended
            if is_live(held, now) and not ours:
                host = held.lease.writer.host if held.lease is not None else "another host"
                raise BusyError(f"{self.source.ref} is being copied by another mirror on {host}")

    def _is_shared(self) -> bool:
        """Whether another mirror has begun the same copy, not seeing this one's lease in time."""
        return any(
            held.name == self.source.name
            and (held.lease is None or held.lease.writer.id != self.writer.id)
            for held in self.target.leases(self.source.run)
        )

    # Files

    def _files(self, older: Sequence[HeldLease]) -> None:
        root = self.keys.directory(self.source.name)
        sizes = {
            e.key[len(root) + 1 :]: e.size
            for e in self.backend.list(root, recursive=True)
            if not is_temporary(e.key)
        }
        there = [e for e in self.source.files if sizes.get(e.path) == e.size]
        intact = self._intact(there, older)
        for entry in self.source.files:
            if entry.path in intact and self.how.progress is not None:
                self.how.progress(entry.size)
        missing = [e for e in self.source.files if e.path not in intact]
        transfers = [self._transfer(e, replace=e.path in sizes) for e in missing]
        try:
            self.mover.run(transfers, done=self._moved)
        except IntegrityError as error:
            self._source_failed(error)

    def _source_failed(self, error: IntegrityError) -> None:
        """Raise what a block that could not be read means: damaged, or deleted meanwhile."""
        if error.damage:
            self.source.report_damage(error.damage, deep=True)
            raise self.source.damaged_error(error.damage) from None
        raise error

    def _moved(self, moved: Moved) -> None:
        assert moved.entry is not None
        self.sent += moved.written
        self.lease.completed([moved.entry])

    def _transfer(self, entry: FileEntry, *, replace: bool) -> Transfer:
        key = self.keys.file(self.source.name, entry.path)
        sequential = not self.backend.capabilities.in_parallel(entry.size)

        def open_writer() -> Writer:
            writer: Writer = self.backend.open_writer(
                key,
                size=entry.size,
                executable=entry.exec,
                replace=replace,
                resume=not replace,
            )
            if self.how.throttle is not None:
                writer = ThrottledWriter(writer, self.how.throttle)
            return _SharedWriter(writer, partial(self._is_there, key))

        return self.source.transfer(entry, open_writer=open_writer, sequential=sequential)

    def _is_there(self, key: str, size: int) -> bool:
        found = self.backend.stat(key)
        return found is not None and found.size == size

    def _intact(self, entries: Sequence[FileEntry], older: Sequence[HeldLease]) -> set[str]:
        """Those of the files in the target that are what they must be."""
        journal = {
            e.path: e
            for held in older
            if held.lease is not None
            for e in held.lease.files
            if entry_problem(e) is None
        }
        unread = []
        intact = set()
        for entry in entries:
            noted = journal.get(entry.path)
            crc = noted.crc64nvme if noted is not None and noted.digest == entry.digest else None
            if crc is not None and self.backend.capabilities.keeps_checksums:
                if self.backend.checksum(self.keys.file(self.source.name, entry.path)) == crc:
                    intact.add(entry.path)
            else:
                unread.append(entry)
        moved = Mover(threads=self.mover.threads, cancel=self.how.cancel).run(
            [
                Transfer(e.path, e.size, open_reader=partial(self._reader, e.path), expected=e)
                for e in unread
            ],
            OnMismatch.STOP,
        )
        good = [m.path for m in moved if m.entry is not None and not m.damage]
        self.lease.completed([e for e in unread if e.path in set(good)])
        return intact | set(good)

    def _reader(self, path: str) -> Reader:
        return self.backend.open_reader(self.keys.file(self.source.name, path))

    # The end

    def _put_manifest(self, data: bytes) -> None:
        key = self.keys.manifest(self.source.name)
        try:
            wrong = self.backend.read(key, len(data)) != data
        except IntegrityError:
            wrong = True
        except NotFoundError:  # under a name of its own, so that no other temporary stays there
            with suppress(ConflictError):  # another mirror's
                write_whole(self.backend, key, data, resume=True)
            return
        if wrong:
            write_whole(self.backend, key, data, replace=True)

    def _create_record(self, record: bytes) -> None:
        source = self.source
        if not self.target.create_document(self.keys.record(source.name), record):
            found = self.target.find(source.run, source.name)
            what = "has been given up there" if found is None or found.is_void else "differs there"
            raise ConflictError(
                f"{source.ref} {what}: {source.name} in {self.target.uri}",
                hint=f"look at it: ckpt list {self.target.uri} {source.run} --all",
            )

    def _leave(self) -> None:
        """Keep what was copied for the next pass."""
        self.lease.stop()
        _ended.add(self.writer.id)
        try:
            self.target.check_alive()  # nothing is written where the store is not any more
            self.lease.abandon()
        except CkptError as error:
            log.warning("the lease of a copy in %s was not renewed: %s", self.target.uri, error)

    def _release(self, *, leftovers: bool) -> None:
        """It is committed; what is left to do may fail without harm."""
        try:
            if leftovers:  # of a mirror that was killed: gc does not look into what is committed
                root = self.keys.directory(self.source.name)
                listed = self.backend.list(root, recursive=True)
                self.backend.delete([e.key for e in listed if is_temporary(e.key)])
            self.lease.release()
        except CkptError as error:
            log.warning("after copying %s: %s", self.source.ref, error)


class _SharedWriter(Writer):
    """A writer beside which another may write the same file: who comes second finds it there."""

    def __init__(self, inner: Writer, is_there: Callable[[int], bool]) -> None:
        self._inner = inner
        self._is_there = is_there
        self._overtaken = False

    def kept(self, offset: int, data: memoryview) -> bool:
        """See :class:`Writer`."""
        return self._overtaken or self._inner.kept(offset, data)

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`Writer`."""
        try:
            self._inner.write(offset, data)
        except ConflictError:
            self._overtaken = True

    def skip_zeros(self, offset: int, length: int) -> bool:
        """See :class:`Writer`."""
        return self._inner.skip_zeros(offset, length)

    def finish(self, size: int) -> None:
        """See :class:`Writer`. A file that is there already is the other's."""
        try:
            self._inner.finish(size)
        except ConflictError:
            self._inner.abort()
            if not self._is_there(size):
                raise
        self.crc64nvme = self._inner.crc64nvme

    def abort(self) -> None:
        """See :class:`Writer`."""
        self._inner.abort()
