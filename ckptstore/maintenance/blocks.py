"""Good blocks for damaged files: from the file itself, from other copies of it, from mirrors.

Wherever a block comes from, its digest decides whether it is the right one, so nothing needs to be
known of a place but that it may have it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckptstore.backends.base import Reader
from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError, IntegrityError
from ckptstore.hashing import BLOCK_SIZE, block_digest, block_range
from ckptstore.layout import Name, RunKeys
from ckptstore.manifest import FileEntry
from ckptstore.store import Store


@dataclass(frozen=True)
class Shelf:
    """The files of one checkpoint of a store.

    Attributes:
        catalog: The store.
        run, name: The checkpoint.
        entries: What its files are supposed to be.
        remote: Whether what is read from it comes from another store.
    """

    catalog: Catalog
    run: str
    name: Name
    entries: Sequence[FileEntry]
    remote: bool


@dataclass(frozen=True)
class _Place:
    shelf: Shelf
    entry: FileEntry
    index: int


class Blocks:
    """Finds blocks by their digests.

    Args:
        shelves: Where to look, in this order; each is looked at only when all before it failed.
        wanted: The digests that will be asked for.

    Attributes:
        fetched: Bytes read from other stores so far.
        used: The stores that blocks came from.
    """

    def __init__(self, shelves: Iterable[Shelf], wanted: Iterable[str]) -> None:
        self._shelves = iter(shelves)
        self._wanted = frozenset(wanted)
        self._places: dict[str, list[_Place]] = {}
        self._readers: dict[tuple[str, str], Reader | None] = {}
        self._lock = threading.RLock()
        self._exhausted = False
        self.fetched = 0
        self.used: set[str] = set()

    def fill(self, digest: str, buffer: memoryview) -> bool:
        """Fill ``buffer`` with the block; whether an intact one was found."""
        for place in self._find(digest):
            if self._read(place, buffer) and block_digest(buffer) == digest:
                with self._lock:
                    self.used.add(place.shelf.catalog.uri)
                return True
        return False

    def knows(self, digest: str) -> bool:
        """Whether any place is supposed to have it; nothing is read."""
        return next(self._find(digest), None) is not None

    def _find(self, digest: str) -> Iterator[_Place]:
        done = 0
        while True:
            with self._lock:
                places = self._places.get(digest, ())
                while done >= len(places) and not self._exhausted:
                    self._take_shelf()
                    places = self._places.get(digest, ())
                if done >= len(places):
                    return
                place = places[done]
            done += 1
            yield place

    def _take_shelf(self) -> None:
        shelf = next(self._shelves, None)
        if shelf is None:
            self._exhausted = True
            return
        for entry in shelf.entries:
            for index, digest in enumerate(entry.blocks):
                if digest in self._wanted:
                    self._places.setdefault(digest, []).append(_Place(shelf, entry, index))

    def _read(self, place: _Place, buffer: memoryview) -> bool:
        shelf, entry = place.shelf, place.entry
        offset, length = block_range(place.index, entry.size)
        reader = self._reader(shelf, entry)
        if reader is None or length != len(buffer):
            return False
        try:
            count = reader.read_into(offset, buffer)
        except CkptError:  # there may be another place
            return False
        if shelf.remote:
            with self._lock:
                self.fetched += count
        return count == length

    def _reader(self, shelf: Shelf, entry: FileEntry) -> Reader | None:
        key = RunKeys(shelf.run).file(shelf.name, entry.path)
        known = shelf.catalog.uri, key
        with self._lock:
            if known not in self._readers:
                self._readers[known] = None
                with suppress(CkptError):
                    self._readers[known] = shelf.catalog.backend.open_reader(key)
            return self._readers[known]

    def close(self) -> None:
        """Let go of what was read from."""
        for reader in self._readers.values():
            if reader is not None:
                reader.close()
        self._readers.clear()


@dataclass
class MendingReader(Reader):
    """A damaged file as it must be: its own good blocks, and others for the bad ones.

    Attributes:
        entry: What the file must be.
        own: The file as it is; ``None`` when there is none that can be read.
        bad: Blocks of it that are known to be bad.
        blocks: Where the others come from.
        replaced: Blocks that were taken from elsewhere.
    """

    entry: FileEntry
    own: Reader | None
    bad: frozenset[int]
    blocks: Blocks
    replaced: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.size = self.entry.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Reader`; whole blocks only.

        Raises:
            IntegrityError: no intact copy of the block was found.
        """
        index = offset // BLOCK_SIZE
        digest = self.entry.blocks[index]
        if self._own(index, offset, buffer) and block_digest(buffer) == digest:
            return len(buffer)
        if not self.blocks.fill(digest, buffer):
            raise IntegrityError("no intact copy of it was found")
        self.replaced.add(index)
        return len(buffer)

    def _own(self, index: int, offset: int, buffer: memoryview) -> bool:
        if self.own is None or index in self.bad or offset + len(buffer) > self.own.size:
            return False
        try:
            return self.own.read_into(offset, buffer) == len(buffer)
        except IntegrityError:
            return False

    def close(self) -> None:
        """See :class:`Reader`."""
        if self.own is not None:
            self.own.close()


def shelves(
    catalog: Catalog, run: str, name: Name, entries: Sequence[FileEntry], sources: Sequence[Store]
) -> Iterator[Shelf]:
    """Where the blocks of a checkpoint may be, the most likely and the cheapest first.

    First what costs no transfer, where reading the run's manifests is cheap; then the checkpoint
    itself in each source, then all else that the sources and the store hold.
    """
    here = catalog.backend.local_path("") is not None
    if here:
        yield from _checkpoints(catalog, run, name, remote=False)
    for source in sources:
        yield Shelf(source.catalog, run, name, entries, remote=True)
    if not here:
        yield from _checkpoints(catalog, run, name, remote=False)
    for source in sources:
        yield from _checkpoints(source.catalog, run, name, remote=True)
    for one in (catalog, *(s.catalog for s in sources)):
        with suppress(CkptError):
            for other in one.runs():
                if other != run:
                    yield from _checkpoints(one, other, None, remote=one is not catalog)


def _checkpoints(catalog: Catalog, run: str, but: Name | None, *, remote: bool) -> Iterator[Shelf]:
    """The committed checkpoints of a run, the newest first, without ``but``."""
    try:
        names = catalog.record_names(run)
    except CkptError:  # a source that cannot be read has nothing
        return
    for name in reversed(names):
        if name == but:
            continue
        with suppress(CkptError):
            found = catalog.find(run, name)
            if found is not None and found.commit is not None:
                files = catalog.manifest(run, found.commit).files
                yield Shelf(catalog, run, name, files, remote)
