"""Repair: what is damaged is replaced by what it must be, from a mirror or another copy.

Nothing is written before its digest was compared with the record's chain of digests, and everything
is replaced atomically, so whoever reads meanwhile sees the damaged thing or the good one, and a
repair that fails or is killed leaves each thing as it was or whole. Two repairs at once put the
same bytes in the same places.

The order for one checkpoint: its files and its manifest first, then its record, when that is lost:
a record that a repair creates stands for a checkpoint that is whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError, Damage, IntegrityError, NotFoundError
from ckptstore.hashing import block_digest
from ckptstore.layout import MANIFEST, Name, RunKeys
from ckptstore.listing import RECORD_LOST, ref_of
from ckptstore.maintenance.files import Files, Options, at_work
from ckptstore.maintenance.mending import (
    from_sources,
    mended,
    read_or_none,
    replace_damaged,
)
from ckptstore.maintenance.recording import LostRecord
from ckptstore.maintenance.verify import find_damage, look_at
from ckptstore.marks import note_repaired, note_verified, standing
from ckptstore.reading import Checkpoint
from ckptstore.records import Commit, decode_mark
from ckptstore.store import Store
from ckptstore.transfer import ProgressCallback

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fixed:
    """Something that was repaired.

    Attributes:
        path: Path inside the checkpoint, or the key of a record or mark in its run.
        how: Where it came from, for people.
    """

    path: str
    how: str


@dataclass(frozen=True)
class RepairResult:
    """What a repair did (in a dry run: would do).

    Attributes:
        ref, run, name: Which checkpoint.
        fixed: What is whole again.
        left: What is damaged still.
        fetched_bytes: Bytes of data that were read from other stores.
        shared: Refs of the checkpoints that shared a repaired file and share it still.
    """

    ref: str
    run: str
    name: str
    fixed: tuple[Fixed, ...] = ()
    left: tuple[Damage, ...] = ()
    fetched_bytes: int = 0
    shared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged (any more)."""
        return not self.left


def repair(
    checkpoint: Checkpoint,
    sources: Sequence[Store] = (),
    *,
    dry_run: bool = False,
    drop_marks: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> RepairResult:
    """Read every byte of a checkpoint, and replace what is not what it must be.

    Only damaged blocks are fetched: from another copy in the store, or from the first source that
    has them intact, in whatever checkpoint. Other checkpoints that share a damaged file get the
    good one too.

    Args:
        checkpoint: What to repair.
        sources: Mirrors, or any stores that may hold the same files.
        dry_run: Only say what would be done.
        drop_marks: Remove marks that cannot be read and that no source has. What they said is lost;
            it may have been a pin.
        threads: Blocks in flight.
        progress: Told of every block read.
        cancel: Set it to end the repair; what was repaired stays so.

    Raises:
        CkptError: the store could not be read or written. What cannot be repaired is no exception:
            it is in the result.
    """
    options = Options(dry_run, drop_marks, threads, progress, cancel)
    repairing = _Repair(checkpoint.catalog, checkpoint.run, checkpoint.name, sources, options)
    return repairing.run(checkpoint.ref)


def repair_name(
    store: Store,
    run: str,
    name: Name,
    sources: Sequence[Store] = (),
    *,
    dry_run: bool = False,
    drop_marks: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> RepairResult:
    """:func:`repair` for a checkpoint whose record may be damaged or lost."""
    newest = store.catalog.newest(run, name.step)
    ref = ref_of(run, name, {name.step: newest.name} if newest is not None else {})
    options = Options(dry_run, drop_marks, threads, progress, cancel)
    return _Repair(store.catalog, run, name, sources, options).run(ref)


def repair_run(
    store: Store,
    run: str,
    sources: Sequence[Store] = (),
    *,
    dry_run: bool = False,
    drop_marks: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Iterator[RepairResult]:
    """:func:`repair` for every checkpoint of a run, lost and unreadable records included.

    Raises:
        NotFoundError: there is no such store or run.
    """
    store.catalog.require_run(run)
    options = Options(dry_run, drop_marks, threads, progress, cancel)
    look = look_at(store, run)
    refs = {c.name: c.ref for c in look.checkpoints}
    problems = (Name.parse(p.name) for p in look.problems)
    names = {*refs, *(name for name in problems if name is not None)}
    names |= set(_forgotten(store.catalog, run, sources))
    for name in sorted(names):
        try:
            yield _Repair(store.catalog, run, name, sources, options).run(refs.get(name))
        except NotFoundError:
            found = store.catalog.find(run, name)
            if found is not None and not found.is_void:
                raise
            continue  # deleted meanwhile


def _forgotten(catalog: Catalog, run: str, sources: Sequence[Store]) -> list[Name]:
    """Directories that show no sign of a commit any more, and of which a source has one.

    (One with its own manifest is listed as damaged; this is one that has lost even that.)
    """
    directories = catalog.directories(run)
    leased = {held.name for held in catalog.leases(run)}
    known = leased | set(catalog.record_names(run)) | set(catalog.trash_names(run))
    found = []
    for name in directories:
        if name in known:
            continue
        for source in sources:
            try:
                there = source.catalog.find(run, name)
            except CkptError:
                continue
            if there is not None and there.commit is not None:
                found.append(name)
                break
    return found


class _Repair:
    def __init__(
        self, catalog: Catalog, run: str, name: Name, sources: Sequence[Store], options: Options
    ) -> None:
        self._catalog = catalog
        self._keys = RunKeys(run)
        self._run = run
        self._name = name
        self._sources = sources
        self._options = options
        self._fixed: list[Fixed] = []
        self._left: list[Damage] = []
        self._fetched = 0
        self._shared: tuple[str, ...] = ()

    def run(self, ref: str | None = None) -> RepairResult:
        if not self._options.dry_run:
            self._catalog.require_writable()
        found = self._catalog.find(self._run, self._name)
        if found is not None and found.commit is not None:
            self._content(found.commit, committed=True)
        elif found is None or not found.is_void:
            self._record()
        self._marks()
        return RepairResult(
            ref or f"{self._run}@{self._name}",
            self._run,
            str(self._name),
            tuple(self._fixed),
            tuple(self._left),
            self._fetched,
            self._shared,
        )

    def _record(self) -> None:
        """A record that is lost or cannot be read."""
        path = f"commits/{self._name}.json"
        lost = LostRecord(self._catalog, self._run, self._name, self._sources)
        record = lost.what_it_was()
        if record is None:
            self._left.append(Damage(path, 0, 0, lost.problem or RECORD_LOST))
            return
        if isinstance(record, Commit):
            self._content(record, committed=False)
            if self._left:
                why = "not put back while its checkpoint is damaged"
                self._left.append(Damage(path, 0, 0, f"{lost.problem or RECORD_LOST}; {why}"))
                return
        if not self._options.dry_run:
            problem = lost.put_back()
            if problem is not None:
                self._left.append(Damage(path, 0, 0, problem))
                return
        self._fixed.append(Fixed(path, lost.origin))
        if isinstance(record, Commit) and not self._options.dry_run:
            self._note(record, [])

    def _content(self, commit: Commit, *, committed: bool) -> None:
        """The manifest, and the files that it names."""
        checkpoint = Checkpoint(self._catalog, self._run, commit)
        if not self._manifest(checkpoint, committed=committed):
            return
        options = self._options
        damage, _ = find_damage(
            checkpoint, threads=options.threads, progress=options.progress, cancel=options.cancel
        )
        if damage and committed and not options.dry_run:
            checkpoint.report_damage(damage, deep=True, whole=True)
        files = Files(checkpoint, self._sources, options)
        files.repair(damage)
        self._fixed += [Fixed(path, how) for path, how in files.fixed.items()]
        self._left += files.left
        self._fetched += files.fetched
        self._shared = tuple(files.shared)
        if committed and not self._left and not options.dry_run:
            self._note(commit, damage)

    def _note(self, commit: Commit, damage: Sequence[Damage]) -> None:
        """It is whole: say so where the store is looked at."""
        catalog, run, name = self._catalog, self._run, self._name
        try:
            if damage or standing(catalog, run, name).damaged or self._fixed:
                note_repaired(catalog, run, name, damage)
            note_verified(catalog, run, name, commit.size, deep=True)
        except CkptError as error:
            log.warning("that %s@%s is whole was not noted: %s", run, name, error)

    def _manifest(self, checkpoint: Checkpoint, *, committed: bool) -> bool:
        """Repair the manifest. Returns whether it is good now."""
        problem = self._manifest_problem(checkpoint.commit)
        if problem is None:
            return True
        if committed:
            checkpoint.check_present()
        backend, key = self._catalog.backend, self._keys.manifest(self._name)
        found = self._pinned_manifest(checkpoint.commit)
        if found is None:
            self._left.append(Damage(MANIFEST, 0, 0, problem))
            return False
        data, source = found
        if not self._options.dry_run:
            with at_work(self._catalog, self._run, self._name):
                backend.put(key, data)
                backend.sync([self._keys.directory(self._name)])
            problem = self._manifest_problem(checkpoint.commit)
            if problem is not None:  # it is the pinned one, so the record is at fault
                self._left.append(Damage(MANIFEST, 0, 0, problem))
                return False
        self._fixed.append(Fixed(MANIFEST, f"from {source.uri}"))
        return not self._options.dry_run

    def _manifest_problem(self, commit: Commit) -> str | None:
        try:
            self._catalog.manifest(self._run, commit)
        except IntegrityError as error:
            return str(error)
        return None

    def _pinned_manifest(self, commit: Commit) -> tuple[bytes, Store] | None:
        """The manifest that the record pins, from a source, and the source."""
        pin = commit.manifest
        for source in self._sources:
            try:
                data = source.backend.read(self._keys.manifest(self._name), pin.size)
            except CkptError:
                continue
            if len(data) == pin.size and block_digest(data) == pin.digest:
                return data, source
        return None

    def _marks(self) -> None:
        """Marks that cannot be read: each protects its checkpoint until it is whole or dropped."""
        for key in standing(self._catalog, self._run, self._name).unreadable:
            path = key.partition("/")[2]
            backend = self._catalog.backend
            damaged = read_or_none(backend, key) or b""
            good, how = mended(damaged), "one byte of it had changed"
            if good is None or not self._is_mark(good):
                found = next(from_sources(self._sources, key, self._is_mark), None)
                good, how = (found[0], f"from {found[1].uri}") if found else (None, "removed")
            if good is None and not self._options.drop_marks:
                self._left.append(Damage(path, 0, 0, "the mark is damaged, and no source has it"))
                continue
            if not self._options.dry_run:
                if good is not None:
                    done = replace_damaged(backend, key, damaged, good)
                else:
                    done = backend.remove_if(key, damaged)
                if not done:
                    self._left.append(Damage(path, 0, 0, "the mark changed meanwhile"))
                    continue
            self._fixed.append(Fixed(path, how))

    def _is_mark(self, data: bytes) -> bool:
        try:
            decode_mark(data, self._run, self._name, "")
        except CkptError:
            return False
        return True
