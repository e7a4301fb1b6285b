"""Reading: a committed checkpoint, its files, and verified access to their bytes."""

from __future__ import annotations

import io
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ckptstore.advice import what_to_do
from ckptstore.backends.base import Reader, Writer
from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError, Damage, IntegrityError, NotFoundError, printable
from ckptstore.hashing import BLOCK_SIZE, block_digest, block_range
from ckptstore.layout import Name, RunKeys
from ckptstore.manifest import FileEntry, Manifest
from ckptstore.marks import Standing, note_damage, standing
from ckptstore.pulling import PullResult, pull
from ckptstore.records import Commit
from ckptstore.transfer import Mover, Transfer

log = logging.getLogger(__name__)

CACHED_BLOCKS = 2
"""Verified blocks that an open file keeps: 32 MiB at most."""


class Checkpoint:
    """A committed checkpoint.

    Attributes:
        run, name: Which one.
        commit: Its record.
        ref: How a person names it: ``RUN@STEP``, or ``RUN@NAME`` where the step has a newer one.
    """

    def __init__(
        self,
        catalog: Catalog,
        run: str,
        commit: Commit,
        *,
        ref: str | None = None,
        standing: Standing | None = None,
    ) -> None:
        name = Name.parse(commit.name)
        assert name is not None  # the record was checked against its key
        self.catalog = catalog
        self.run = run
        self.name = name
        self.commit = commit
        self.ref = ref or f"{run}@{commit.step}"
        self._standing = standing
        self._manifest: Manifest | None = None

    def __repr__(self) -> str:
        return f"<Checkpoint {self.ref} ({self.name}) in {self.catalog.uri}>"

    @property
    def step(self) -> int:
        """The training step."""
        return self.commit.step

    @property
    def seq(self) -> int:
        """Its place in the order of the run's saves."""
        return self.commit.seq

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return self.commit.size

    @property
    def standing(self) -> Standing:
        """Where its marks leave it; read once."""
        if self._standing is None:
            self._standing = standing(self.catalog, self.run, self.name)
        return self._standing

    @property
    def state(self) -> str:
        """``ok``, or ``damaged`` when a verification, a load or a size check said so."""
        return "damaged" if self.standing.damaged else "ok"

    @property
    def tags(self) -> list[str]:
        """Its tags, sorted."""
        return self.standing.tags(self.commit)

    @property
    def metrics(self) -> dict[str, float]:
        """Its metrics."""
        return self.standing.metrics(self.commit)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer kept with it. Raises :class:`IntegrityError`."""
        return self.manifest.metadata

    @property
    def manifest(self) -> Manifest:
        """What it must be, checked against the record; read once. Raises :class:`IntegrityError`.

        (Not a ``cached_property``: until Python 3.12 that holds one lock for all instances.)
        """
        if self._manifest is None:
            try:
                self._manifest = self.catalog.manifest(self.run, self.commit)
            except IntegrityError:
                self.check_present()
                raise
        return self._manifest

    def check_present(self) -> None:
        """Raise :class:`NotFoundError` when what looks damaged was only deleted meanwhile."""
        found = self.catalog.find(self.run, self.name)
        if found is None or found.is_void:
            raise NotFoundError(f"{self.ref} was deleted meanwhile")

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Its files, sorted by path. Raises :class:`IntegrityError`."""
        return self.manifest.files

    @property
    def path(self) -> str | None:
        """Its directory, when the store is on this machine's file system."""
        return self.catalog.backend.local_path(RunKeys(self.run).directory(self.name))

    def key(self, path: str) -> str:
        """The key of one of its files."""
        return RunKeys(self.run).file(self.name, path)

    def entry(self, path: str) -> FileEntry:
        """One file.

        Raises:
            NotFoundError: it has no such file.
        """
        for entry in self.files:
            if entry.path == path:
                return entry
        raise NotFoundError(f"{self.ref} has no file {printable(path)!r}")

    def open(self, path: str) -> io.BufferedReader:
        """A file, for reading; every byte is verified before it is given out.

        Seeking is free; each read costs the whole blocks (16 MiB) that it touches.

        Raises:
            NotFoundError: it has no such file.
            IntegrityError: on reading, when the stored bytes differ. The checkpoint is marked.
        """
        return io.BufferedReader(VerifiedFile(self, self.entry(path)))

    def read_bytes(self, path: str) -> bytes:
        """The whole of a file, verified."""
        with self.open(path) as f:
            return f.read()

    def pull(self, dest: str | os.PathLike[str], **how: Any) -> PullResult:
        """Fetch its files into a directory; the options are those of :func:`pull`."""
        return pull(self, dest, **how)

    def transfer(self, entry: FileEntry, **how: Any) -> Transfer:
        """The transfer that reads ``entry`` and knows what it must be."""
        key = self.key(entry.path)
        backend = self.catalog.backend
        return Transfer(
            entry.path,
            entry.size,
            open_reader=lambda: backend.open_reader(key),
            expected=entry,
            executable=entry.exec,
            **how,
        )

    def read_blocks(
        self,
        entry: FileEntry,
        blocks: Sequence[int],
        target: Writer,
        *,
        threads: int | None = None,
    ) -> None:
        """Read some blocks of a file, verified, in parallel and in any order.

        Args:
            entry: The file.
            blocks: Numbers of the blocks.
            target: Is given each block.
            threads: Blocks in flight.

        Raises:
            IntegrityError: the stored bytes differ. The checkpoint is marked.
        """
        transfer = self.transfer(entry, open_writer=lambda: target, only=blocks)
        try:
            threads = threads or self.catalog.backend.capabilities.threads
            Mover(threads=threads).run([transfer])
        except IntegrityError as error:
            if not error.damage:
                raise
            self.report_damage(error.damage, deep=True)
            raise self.damaged_error(error.damage) from None

    def quick_check(self) -> tuple[Damage, ...]:
        """Look for missing files and wrong sizes, without reading content."""
        try:
            files = self.files
        except IntegrityError as error:
            return (Damage("MANIFEST.json", 0, 0, str(error)),)
        root = RunKeys(self.run).directory(self.name)
        listed = self.catalog.backend.list(root, recursive=True)
        sizes = {e.key[len(root) + 1 :]: e.size for e in listed}
        damage = []
        for entry in files:
            size = sizes.get(entry.path)
            if size != entry.size:
                size = self.catalog.size_now(self.key(entry.path), size)
            if size is None:
                damage.append(Damage(entry.path, 0, 0, "missing"))
            elif size != entry.size:
                damage.append(Damage(entry.path, 0, 0, f"size is {size}, must be {entry.size}"))
        return tuple(damage)

    def checksum_check(self) -> tuple[Damage, ...]:
        """Compare the checksums that the storage keeps with the manifest's, reading no content.

        One request a file, where the storage keeps checksums and the manifest knows the file's;
        elsewhere nothing is found. A file that is missing or of another size is not this look's.
        """
        backend = self.catalog.backend
        if not backend.capabilities.keeps_checksums:
            return ()

        def differs(entry: FileEntry) -> bool:
            try:
                kept = backend.checksum(self.key(entry.path))
            except NotFoundError:
                return False
            return kept is not None and kept != entry.crc64nvme

        known = [e for e in self.files if e.crc64nvme is not None]
        found = self.catalog.each(differs, known)
        bad = [entry for entry, differs in zip(known, found, strict=True) if differs]
        return tuple(Damage(e.path, 0, 0, "the stored checksum differs") for e in bad)

    def damaged_error(self, damage: tuple[Damage, ...]) -> IntegrityError:
        """The error that says what is damaged, and what to do."""
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        return IntegrityError(
            f"{self.ref} is damaged: {damage[0]}{more}",
            hint=what_to_do(self.catalog, self.run, self.ref),
            damage=damage,
        )

    def report_damage(self, damage: tuple[Damage, ...], *, deep: bool, whole: bool = False) -> None:
        """Leave a mark of what was found damaged, where the store can be written.

        Args:
            damage: What was found.
            deep, whole: See :func:`ckptstore.marks.note_damage`.

        Raises:
            NotFoundError: the checkpoint is not damaged but was deleted meanwhile.
        """
        self.check_present()
        try:
            note_damage(self.catalog, self.run, self.name, damage, deep=deep, whole=whole)
        except CkptError as error:  # the damage itself is the news
            log.warning("that %s is damaged was not noted in the store: %s", self.ref, error)
        self._standing = None


class VerifiedFile(io.RawIOBase):
    """A stored file whose blocks are checked against the manifest as they are read."""

    def __init__(self, checkpoint: Checkpoint, entry: FileEntry) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._entry = entry
        self._position = 0
        self._reader: Reader | None = None
        self._cache: OrderedDict[int, bytearray] = OrderedDict()

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position; returns it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._entry.size}[whence]
        if base + offset < 0:
            raise ValueError("negative seek position")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill as much of ``buffer`` as lies in the current block; returns the count of bytes."""
        view = memoryview(buffer).cast("B")
        if self._position >= self._entry.size or not view:
            return 0
        index, start = divmod(self._position, BLOCK_SIZE)
        block = memoryview(self._block(index))
        part = block[start : start + len(view)]
        view[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _block(self, index: int) -> bytearray:
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        offset, length = block_range(index, self._entry.size)
        block = self._cache.popitem(last=False)[1] if len(self._cache) >= CACHED_BLOCKS else None
        if block is None or len(block) != length:
            block = bytearray(length)
        if self._read(offset, block) != length:
            self._damaged(offset, length, "ends early")
        if block_digest(block) != self._entry.blocks[index]:
            self._damaged(offset, length, "content differs")
        self._cache[index] = block
        return block

    def _read(self, offset: int, block: bytearray) -> int:
        if self._reader is None:
            backend = self._checkpoint.catalog.backend
            try:
                self._reader = backend.open_reader(self._checkpoint.key(self._entry.path))
            except NotFoundError:
                self._damaged(0, 0, "missing")
            except IntegrityError as error:
                self._damaged(0, 0, str(error))
        assert self._reader is not None
        with memoryview(block) as view:
            return self._reader.read_into(offset, view)

    def _damaged(self, offset: int, length: int, reason: str) -> None:
        damage = (Damage(self._entry.path, offset, length, reason),)
        self._checkpoint.report_damage(damage, deep=True)
        raise self._checkpoint.damaged_error(damage)

    def close(self) -> None:
        """Let go of the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._cache.clear()
        super().close()
