"""Repairing the files of a checkpoint: a good copy is made of each, and swapped in.

A stored file is never written to: it may be shared with other checkpoints, or be read at this
moment. A copy is made of its good blocks and of blocks from elsewhere, hashed as it is written, and
takes the damaged file's name in one step. Then each checkpoint that shared the damaged file is
given the good one, again shared.
"""

from __future__ import annotations

import os
import stat as stat_module
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckptstore.backends.base import Reader
from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError, ConflictError, Damage, IntegrityError, NotFoundError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.ids import random_letters
from ckptstore.layout import REPAIR_PREFIX, Name, RunKeys
from ckptstore.listing import ref_of
from ckptstore.maintenance.blocks import Blocks, MendingReader, shelves
from ckptstore.manifest import FileEntry
from ckptstore.marks import note_repaired
from ckptstore.reading import Checkpoint
from ckptstore.runview import RunView
from ckptstore.store import Store
from ckptstore.transfer import Mover, OnMismatch, ProgressCallback, Transfer


@dataclass(frozen=True)
class Options:
    """How a repair was asked for; see :func:`ckptstore.maintenance.repair.repair`."""

    dry_run: bool = False
    drop_marks: bool = False
    threads: int | None = None
    progress: ProgressCallback | None = None
    cancel: threading.Event | None = None


class Files:
    """The files of one checkpoint, under repair.

    Args:
        checkpoint: The checkpoint; its manifest is good.
        sources: Where intact blocks may be.
        options: How.

    Attributes:
        fixed: How each file was repaired.
        left: What is damaged still.
        fetched: Bytes that were read from other stores.
        shared: Refs of the checkpoints that were given a repaired file too.
    """

    def __init__(self, checkpoint: Checkpoint, sources: Sequence[Store], options: Options) -> None:
        self._checkpoint = checkpoint
        self._catalog = checkpoint.catalog
        self._backend = checkpoint.catalog.backend
        self._sources = sources
        self._options = options
        self._sharing: dict[Name, set[str]] = {}
        self.fixed: dict[str, str] = {}
        self.left: list[Damage] = []
        self.fetched = 0
        self.shared: list[str] = []

    def repair(self, damage: Sequence[Damage]) -> None:
        """Repair what was found damaged, and the exec bits of all files."""
        by_path: dict[str, list[Damage]] = {}
        for one in damage:
            by_path.setdefault(one.path, []).append(one)
        damaged = [e for e in self._checkpoint.files if e.path in by_path]
        misfit = [
            e for e in self._checkpoint.files if e.path not in by_path and self._wrong_mode(e)
        ]
        if not damaged and not misfit:
            return
        checkpoint = self._checkpoint
        wanted = {d for entry in damaged for d in _wanted(entry, by_path[entry.path])}
        found = shelves(
            self._catalog, checkpoint.run, checkpoint.name, checkpoint.files, self._sources
        )
        blocks = Blocks(found, wanted)
        try:
            if self._options.dry_run:
                for entry in (*damaged, *misfit):
                    self._foretell(entry, by_path.get(entry.path, ()), blocks)
                return
            with at_work(self._catalog, checkpoint.run, checkpoint.name):
                for entry in (*damaged, *misfit):
                    self._file(entry, by_path.get(entry.path, ()), blocks)
            self._end(damaged)
        finally:
            self.fetched = blocks.fetched
            blocks.close()

    def _file(self, entry: FileEntry, damage: Sequence[Damage], blocks: Blocks) -> None:
        bad = _bad_blocks(damage)
        sharing = self._sharing_with(entry)
        reader = MendingReader(entry, self._own(entry), bad, blocks)
        try:
            self._write(self._checkpoint, entry, reader)
        except IntegrityError as error:
            self.left += error.damage or damage
            return
        except ConflictError as error:  # a directory is in the way
            self.left.append(Damage(entry.path, 0, 0, str(error)))
            return
        self.fixed[entry.path] = _told(len(reader.replaced), blocks, self._catalog)
        for name, path in sharing:
            self._share(entry, name, path)

    def _foretell(self, entry: FileEntry, damage: Sequence[Damage], blocks: Blocks) -> None:
        """What a repair would do; nothing but the file itself is read for it."""
        bad = _bad_blocks(damage)
        lacking = [i for i in bad if not blocks.knows(entry.blocks[i])]
        if lacking:
            self.left += damage
        else:
            self.fixed[entry.path] = "can be repaired" if damage else "its exec bit"

    def _own(self, entry: FileEntry) -> Reader | None:
        """The file as it is; ``None`` when there is none that can be read."""
        try:
            return self._backend.open_reader(self._checkpoint.key(entry.path))
        except (NotFoundError, IntegrityError):
            return None

    def _write(self, checkpoint: Checkpoint, entry: FileEntry, reader: Reader) -> None:
        """Replace a stored file by what ``reader`` gives, which must be what ``entry`` says."""
        key = checkpoint.key(entry.path)
        transfer = Transfer(
            entry.path,
            entry.size,
            open_reader=lambda: reader,
            open_writer=lambda: self._backend.open_writer(
                key, size=entry.size, executable=entry.exec, replace=True
            ),
            expected=entry,
            executable=entry.exec,
            sequential=not self._backend.capabilities.in_parallel(entry.size),
        )
        self._mover().run([transfer])
        self._backend.sync([key.rpartition("/")[0]])

    def _mover(self) -> Mover:
        threads = self._options.threads or self._backend.capabilities.threads
        return Mover(threads=threads, cancel=self._options.cancel)

    def _end(self, damaged: Sequence[FileEntry]) -> None:
        """Read what was written once more, and end what was noted of the others."""
        again = [self._checkpoint.transfer(e) for e in damaged if e.path in self.fixed]
        for moved in self._mover().run(again, OnMismatch.COLLECT):
            if moved.damage:
                self.left += moved.damage
                del self.fixed[moved.path]
        view = RunView.of(self._catalog, self._checkpoint.run) if self._sharing else None
        for name, paths in self._sharing.items():
            assert view is not None
            newest = {f.name.step: f.name for f in view.found}
            self.shared.append(ref_of(self._checkpoint.run, name, newest))
            notes = view.standing(name).damage
            if notes and all(note.path in paths for note in notes):
                known = [Damage(n.path, n.offset, n.length, n.reason) for n in notes]
                note_repaired(self._catalog, self._checkpoint.run, name, known)

    # Files that several checkpoints share

    def _sharing_with(self, entry: FileEntry) -> list[tuple[Name, FileEntry]]:
        """The run's other committed files that are the same file on the disk."""
        own = self._status(self._checkpoint.key(entry.path))
        if own is None or own.st_nlink < 2:
            return []
        catalog, run = self._catalog, self._checkpoint.run
        found = []
        for name in catalog.record_names(run):
            if name == self._checkpoint.name:
                continue
            with suppress(IntegrityError):
                record = catalog.find(run, name)
                if record is None or record.commit is None:
                    continue
                for other in catalog.manifest(run, record.commit).files:
                    if other.digest != entry.digest or other.exec != entry.exec:
                        continue
                    status = self._status(RunKeys(run).file(name, other.path))
                    if status is not None and os.path.samestat(own, status):
                        found.append((name, other))
        return found

    def _status(self, key: str) -> os.stat_result | None:
        """What the file system says of a stored file; ``None`` where there is no such file."""
        path = self._backend.local_path(key)
        try:
            status = os.lstat(path) if path is not None else None
        except OSError:
            return None
        return status if status is not None and stat_module.S_ISREG(status.st_mode) else None

    def _share(self, entry: FileEntry, name: Name, other: FileEntry) -> None:
        """Give another checkpoint the repaired file in the place of the damaged one."""
        keys = RunKeys(self._checkpoint.run)
        good, target = self._checkpoint.key(entry.path), keys.file(name, other.path)
        found = self._catalog.find(self._checkpoint.run, name)
        if found is None or found.commit is None:  # deleted meanwhile
            return
        with at_work(self._catalog, self._checkpoint.run, name):
            if self._backend.copy_over(good, target, executable=entry.exec) is None:
                checkpoint = Checkpoint(self._catalog, self._checkpoint.run, found.commit)
                self._write(checkpoint, other, self._backend.open_reader(good))
        self._sharing.setdefault(name, set()).add(other.path)

    def _wrong_mode(self, entry: FileEntry) -> bool:
        """Whether the exec bit of a stored file is not the manifest's."""
        status = self._status(self._checkpoint.key(entry.path))
        return status is not None and bool(status.st_mode & 0o100) != entry.exec


@contextmanager
def at_work(catalog: Catalog, run: str, name: Name) -> Iterator[None]:
    """Leave a sign among a checkpoint's marks while its directory is worked on.

    Temporary files lie there. When the repair is killed, gc finds the sign, and removes them.
    """
    sign = f"{RunKeys(run).marks_of(name)}/{REPAIR_PREFIX}{random_letters()}"
    catalog.backend.put(sign, b"")
    try:
        yield
    finally:
        with suppress(CkptError):
            catalog.backend.delete([sign])


def _bad_blocks(damage: Sequence[Damage]) -> frozenset[int]:
    return frozenset(d.offset // BLOCK_SIZE for d in damage if d.length)


def _wanted(entry: FileEntry, damage: Sequence[Damage]) -> list[str]:
    """The digests of the blocks that may have to come from elsewhere."""
    if all(d.length for d in damage):
        return [entry.blocks[i] for i in _bad_blocks(damage)]
    return list(entry.blocks)


def _told(count: int, blocks: Blocks, catalog: Catalog) -> str:
    """How a file was repaired, for people."""
    if not count:
        return "from its own blocks"
    places = sorted("another copy here" if u == catalog.uri else u for u in blocks.used)
    return f"{count} block{'' if count == 1 else 's'} from {' and '.join(places)}"
