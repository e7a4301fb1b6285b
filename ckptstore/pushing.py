"""Pushing a directory: a save that moves only the bytes the store does not have yet.

A file whose content lies in the store already (in the run's newest commit, in an earlier commit of
the same step, or in what a save that died had completed) is taken from there by a link or a copy on
the server's side, after its stored bytes were hashed again, so that damage is never passed on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ckptstore.catalog import Catalog, Found, HeldLease
from ckptstore.errors import CkptError, IntegrityError, NotFoundError, UsageError, printable
from ckptstore.layout import MANIFEST, Name, RunKeys, is_temporary
from ckptstore.leases import is_copy, is_dead, is_live
from ckptstore.manifest import FileEntry, entry_problem
from ckptstore.marks import add_metrics, add_tag
from ckptstore.reading import Checkpoint
from ckptstore.records import finite
from ckptstore.room import make_room, missing, no_room
from ckptstore.saveoptions import SaveOptions
from ckptstore.saving import Save
from ckptstore.scanning import Scan, ScannedFile
from ckptstore.transfer import Mover, OnMismatch, SourceFile, Transfer
from ckptstore.voiding import discard, ensure_void


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    Attributes:
        checkpoint: The commit; an earlier one when the step held the same content already.
        created: Whether a new checkpoint was made.
        sent: Bytes that went to the store.
        seconds: How long it took.
    """

    checkpoint: Checkpoint
    created: bool
    sent: int
    seconds: float


@dataclass(frozen=True)
class _Stored:
    """A complete file in the store that a source file may be equal to."""

    key: str
    entry: FileEntry
    given_up: bool = False


@dataclass
class _Dead:
    """A save that will never commit, whose complete files can be taken over."""

    name: Name
    lease: HeldLease | None
    stored: list[_Stored] = field(default_factory=list)


def push(catalog: Catalog, source: Scan, run: str, step: int, options: SaveOptions) -> PushResult:
    """Store a scanned directory as a checkpoint.

    Raises:
        SourceChangedError: a file changed or vanished meanwhile; nothing was committed.
        CkptError: see :class:`Save`.
    """
    begun = time.monotonic()
    return _Push(catalog, source, run, step, options).run(begun)


class _Push:
    def __init__(
        self, catalog: Catalog, source: Scan, run: str, step: int, options: SaveOptions
    ) -> None:
        self.catalog = catalog
        self.source = source
        self.run_name = run
        self.step = step
        self.options = options
        self.known: dict[str, FileEntry] = {}
        self.different: set[tuple[str, str]] = set()  # (path, digest) that the source is not

    def run(self, begun: float) -> PushResult:
        self.options.check()
        self._check_apart()
        self.catalog.create()
        same_step = self._checkpoint(self.catalog.newest(self.run_name, self.step))
        if same_step is not None and self._is_same(same_step):
            self._amend(same_step)
            return PushResult(same_step, False, 0, time.monotonic() - begun)
        newest = self.catalog.newest(self.run_name)
        bases = [b for b in (same_step, self._checkpoint(newest)) if b is not None]
        if len(bases) > 1 and bases[0].name == bases[1].name:
            del bases[1]
        dead = self._dead_saves()
        with Save(self.catalog, self.run_name, self.step, self.options) as save:
            for one in dead:
                ensure_void(self.catalog, self.run_name, one.name, f"taken over by {save.name}")
            self._fill(save, bases, dead)
        assert save.committed is not None
        self._remove(dead)
        checkpoint = Checkpoint(self.catalog, self.run_name, save.committed)
        return PushResult(checkpoint, True, save.sent_bytes, time.monotonic() - begun)

    def _check_apart(self) -> None:
        """A directory that holds the store would be pushed into itself."""
        root = self.catalog.backend.local_path("")
        if root is not None and f"{os.path.realpath(root)}/".startswith(f"{self.source.root}/"):
            raise UsageError(
                f"the store {self.catalog.uri} lies inside {printable(self.source.root)}",
                hint="push a directory without the store, or put the store elsewhere",
            )

    # The same content again

    def _checkpoint(self, found: Found | None) -> Checkpoint | None:
        commit = found.commit if found is not None else None
        return Checkpoint(self.catalog, self.run_name, commit) if commit is not None else None

    def _is_same(self, checkpoint: Checkpoint) -> bool:
        """Whether the step's newest commit holds exactly the source, and is intact."""
        try:
            files = checkpoint.files
        except IntegrityError:
            return False
        shape = [(f.path, f.size, f.executable) for f in self.source.files]
        if shape != [(e.path, e.size, e.exec) for e in files]:
            return False
        if tuple(self.source.empty_directories) != checkpoint.manifest.empty_directories:
            return False
        metadata, best = self.options.json_metadata(), self.options.best
        if metadata and metadata != checkpoint.metadata:
            return False
        if best is not None and best != checkpoint.commit.best:
            return False
        if checkpoint.state != "ok" or checkpoint.quick_check():
            return False
        same = self._match(zip(self.source.files, files, strict=True))
        return len(same) == len(files)

    def _amend(self, checkpoint: Checkpoint) -> None:
        """Tags and metrics that came with the push of what is there already."""
        name, commit = checkpoint.name, checkpoint.commit
        for tag in self.options.tags:
            add_tag(self.catalog, self.run_name, commit, name, tag)
        new = finite(self.options.metrics.items())
        if new and any(checkpoint.metrics.get(k) != v for k, v in new.items()):
            add_metrics(self.catalog, self.run_name, name, new)

    def _match(self, pairs: Iterable[tuple[ScannedFile, FileEntry]]) -> dict[str, FileEntry]:
        """Read source files; those that equal the entry beside them, by path.

        A file that differs is read up to its first block that does.
        """
        compared = list(pairs)
        transfers = [
            Transfer(
                f.path,
                f.size,
                open_reader=lambda f=f: SourceFile(f.real, f.identity),  # type: ignore[misc]
                expected=entry,
                executable=f.executable,
            )
            for f, entry in compared
        ]
        moved = Mover(threads=self.options.threads, cancel=self.options.cancel).run(
            transfers, OnMismatch.STOP
        )
        same = {m.path: m.entry for m in moved if m.entry is not None and not m.damage}
        self.known.update(same)
        self.different.update((f.path, e.digest) for f, e in compared if f.path not in same)
        return same

    # What a dead save left

    def _dead_saves(self) -> list[_Dead]:
        """Saves of this step that have ended without a commit, newest first."""
        names = [n for n in self.catalog.directories(self.run_name) if n.step == self.step]
        leases = {held.name: held for held in self.catalog.leases(self.run_name)}
        dead = []
        for name in reversed(names):
            held = leases.get(name)
            found = self.catalog.find(self.run_name, name)
            voided = found is not None and found.is_void
            if (found is not None and not voided) or (held is not None and is_copy(held)):
                continue
            if voided or (held is not None and (is_dead(held) or self._is_stale(held))):
                dead.append(_Dead(name, held, self._complete_files(name, held)))
        return dead

    def _is_stale(self, held: HeldLease) -> bool:
        return not is_live(held, self.catalog.backend.clock())

    def _complete_files(self, name: Name, held: HeldLease | None) -> list[_Stored]:
        """The complete files of a dead save.

        A file has its name only when it is complete. Those that the journal has no digests of are
        hashed here.
        """
        can = self.catalog.backend.capabilities
        if not (can.moves_no_bytes or can.takes):
            return []
        root = RunKeys(self.run_name).directory(name)
        journal = held.lease.files if held is not None and held.lease is not None else ()
        digests = {entry.path: entry for entry in journal}
        wanted = {f.path: f.size for f in self.source.files}
        stored, unknown = [], []
        for listed in self.catalog.backend.list(root, recursive=True):
            path = listed.key[len(root) + 1 :]
            if is_temporary(listed.key) or path == MANIFEST or wanted.get(path) != listed.size:
                continue
            entry = digests.get(path)
            if entry is None or entry.size != listed.size or entry_problem(entry):
                unknown.append((path, listed.key, listed.size))
            else:
                stored.append(_Stored(listed.key, entry, given_up=True))
        for (_, key, _), entry in zip(unknown, self._hash_stored(unknown), strict=True):
            if entry is not None:
                stored.append(_Stored(key, entry, given_up=True))
        return stored

    def _hash_stored(self, files: Sequence[tuple[str, str, int]]) -> list[FileEntry | None]:
        backend = self.catalog.backend
        if backend.capabilities.keeps_checksums:  # to read it from there costs what sending it does
            return [None for _ in files]
        transfers = [
            Transfer(path, size, open_reader=lambda key=key: backend.open_reader(key))  # type: ignore[misc]
            for path, key, size in files
        ]
        try:
            moved = Mover(threads=self.options.threads, cancel=self.options.cancel).run(transfers)
        except (NotFoundError, IntegrityError):  # gc came first: then there is nothing to take
            return [None for _ in files]
        return [m.entry for m in moved]

    def _remove(self, dead: Sequence[_Dead]) -> None:
        """What was taken over is not needed any more."""
        for one in dead:
            try:
                if discard(self.catalog, self.run_name, one.name, "taken over") and one.lease:
                    self.catalog.backend.delete([one.lease.key])
            except CkptError:
                continue  # gc will do it

    # Filling the save

    def _fill(self, save: Save, bases: Sequence[Checkpoint], dead: Sequence[_Dead]) -> None:
        for path in self.source.empty_directories:
            save.add_empty_directory(path)
        candidates = self._candidates(bases, dead)
        remaining = {f.path: f for f in self.source.files}
        while remaining:
            pairs = [(f, candidates[p].pop(0)) for p, f in remaining.items() if candidates.get(p)]
            if not pairs:
                break
            equal = self._equal(pairs)
            intact = self._still_intact([stored for _, stored in equal])
            for (f, stored), whole in zip(equal, intact, strict=True):
                crc = stored.entry.crc64nvme
                entry = msgspec.structs.replace(self.known[f.path], crc64nvme=crc)
                if whole and self._adopt(save, entry, stored):
                    del remaining[f.path]
                    self._progress(f.size)
        self._check_room(remaining.values())
        save.add_transfers(
            [
                save.transfer(
                    f.path, f.size, partial(SourceFile, f.real, f.identity), executable=f.executable
                )
                for f in remaining.values()
            ]
        )
        for f in self.source.files:
            f.check_unchanged()
        self._check_complete(save)

    def _check_room(self, files: Collection[ScannedFile]) -> None:
        """Refuse to begin what cannot be stored whole; holes in the source take no room."""
        if not missing(self.catalog, sum(f.size for f in files)):
            return
        need = 0
        for f in files:
            with suppress(OSError):  # it will be missed when it is read
                need += min(f.size, os.stat(f.real).st_blocks * 512)
        short = make_room(self.catalog, self.run_name, need)
        if short:
            raise no_room(self.catalog, need, short)

    def _progress(self, count: int) -> None:
        if self.options.progress is not None:
            self.options.progress(count)

    def _candidates(
        self, bases: Sequence[Checkpoint], dead: Sequence[_Dead]
    ) -> dict[str, list[_Stored]]:
        sizes = {f.path: f.size for f in self.source.files}
        found: dict[str, list[_Stored]] = {}
        known = [s for one in dead for s in one.stored]
        if self.catalog.backend.capabilities.moves_no_bytes:
            known += self._stored_in(bases)
        for stored in known:
            path = stored.entry.path
            if sizes.get(path) == stored.entry.size:
                found.setdefault(path, []).append(stored)
        return found

    def _stored_in(self, bases: Sequence[Checkpoint]) -> list[_Stored]:
        stored = []
        for base in bases:
            try:
                stored += [_Stored(base.key(e.path), e) for e in base.files]
            except IntegrityError:
                continue  # nothing is taken from a checkpoint without a good manifest
        return stored

    def _equal(
        self, pairs: Sequence[tuple[ScannedFile, _Stored]]
    ) -> list[tuple[ScannedFile, _Stored]]:
        """The pairs whose contents are equal, by digests."""
        known = {}  # what an earlier comparison has read is not read again
        for f, stored in pairs:
            if f.path in self.known:
                known[f.path] = self.known[f.path].digest == stored.entry.digest
            elif (f.path, stored.entry.digest) in self.different:
                known[f.path] = False
        unread = [(f, stored.entry) for f, stored in pairs if f.path not in known]
        same = self._match(unread)
        return [(f, s) for f, s in pairs if known.get(f.path, f.path in same)]

    def _still_intact(self, stored: Sequence[_Stored]) -> list[bool]:
        """Whether each stored file still has the bytes that its entry names."""
        backend = self.catalog.backend
        if backend.capabilities.keeps_checksums:
            return [self._has_its_checksum(s) for s in stored]
        transfers = [
            Transfer(
                s.entry.path,
                s.entry.size,
                open_reader=lambda s=s: backend.open_reader(s.key),  # type: ignore[misc]
                expected=s.entry,
            )
            for s in stored
        ]
        moved = Mover(threads=self.options.threads, cancel=self.options.cancel).run(
            transfers, OnMismatch.STOP
        )
        return [m.entry is not None and not m.damage for m in moved]

    def _has_its_checksum(self, stored: _Stored) -> bool:
        """Whether the storage keeps the checksum that the file had when it was stored."""
        wanted = stored.entry.crc64nvme
        try:
            return wanted is not None and self.catalog.backend.checksum(stored.key) == wanted
        except NotFoundError:
            return False

    @staticmethod
    def _adopt(save: Save, entry: FileEntry, stored: _Stored) -> bool:
        try:
            return save.adopt(entry, stored.key, given_up=stored.given_up)
        except NotFoundError:  # deleted since it was listed
            return False

    def _check_complete(self, save: Save) -> None:
        missing = {f.path for f in self.source.files} - save.paths
        if missing:
            raise CkptError(f"{printable(min(missing))} was not stored; this is a bug")
