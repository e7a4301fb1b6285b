"""Collecting what nothing needs: trash whose time is over, dead saves, stray temporaries.

The order of reading is part of the protocol: directories, then leases, then records, then trash. A
save takes its lease before it makes its directory and lets go of it after its record exists, and a
delete writes its trash record before it removes the record; so whatever a reader in this order
finds without any of the three has none. And nothing in a directory is deleted before its void.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptstore.backends.base import Entry
from ckptstore.catalog import Catalog, Found, HeldLease
from ckptstore.deleting import DEFAULT_GRACE, purge
from ckptstore.document import SIZE_LIMIT
from ckptstore.durations import spell_duration
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    PartialError,
)
from ckptstore.layout import REPAIR_PREFIX, Name, RunKeys, is_temporary
from ckptstore.leases import STALE_SECONDS, is_copy, is_live
from ckptstore.marks import standing
from ckptstore.records import Trash, Void, decode_any_record
from ckptstore.store import Store
from ckptstore.voiding import discard, ensure_void


@dataclass(frozen=True)
class GcAction:
    """One thing that gc looked at.

    Attributes:
        key: What it is about.
        removed: Whether it was (in a dry run: would be) removed.
        reason: Why, or why not.
        size: Bytes in it.
    """

    key: str
    removed: bool
    reason: str
    size: int = 0


@dataclass(frozen=True)
class GcResult:
    """What a collection did."""

    actions: tuple[GcAction, ...]
    dry_run: bool

    @property
    def removed(self) -> tuple[GcAction, ...]:
        """What was removed."""
        return tuple(a for a in self.actions if a.removed)

    @property
    def freed(self) -> int:
        """Bytes removed; those that another checkpoint shares are counted too."""
        return sum(a.size for a in self.removed)


def gc(
    store: Store,
    run: str | None = None,
    *,
    grace: float = DEFAULT_GRACE,
    force: bool = False,
    dry_run: bool = False,
) -> GcResult:
    """Remove what no checkpoint, no living save and no grace period needs any more.

    Args:
        store: The store.
        run: Only this run.
        grace: Seconds, by the store's clock, that a dead save is left alone.
        force: Also where the storage cannot create exclusively, what a mirror has begun to copy,
            and what may be a checkpoint that has lost its record: a run with directories and no
            record at all, and a complete directory with neither record nor lease.
        dry_run: Only say what would be done.

    Raises:
        NotFoundError: there is no such store or run.
        ConflictError: the run looks as if it had lost its records; nothing of it was touched.
        PartialError: the same, or an error of the storage, in some of several runs.
    """
    catalog = store.catalog
    catalog.require_deletable()
    if not force and not catalog.backend.is_exclusive():
        raise ConflictError(
            f"the storage of {catalog.uri} cannot create a file exclusively, so a save that is "
            "still running could lose its files",
            hint="when no save is running: ckpt gc --force",
        )
    if run is not None:
        catalog.require_run(run)
    now = catalog.backend.clock()
    actions: list[GcAction] = []
    runs = [run] if run is not None else catalog.runs()
    failed: list[CkptError] = []
    for one in runs:
        try:
            actions += _Collection(catalog, one, now, grace, force, dry_run).run()
        except CkptError as error:  # the other runs have their own trash
            failed.append(error)
    if len(failed) == 1 == len(runs):
        raise failed[0]
    if failed:
        raise PartialError(
            f"{len(failed)} of {len(runs)} runs could not be collected; the first: {failed[0]}",
            hint=failed[0].hint,
        )
    if run is None:
        actions += _stray(catalog, "", now, grace, dry_run)
        actions += _stray_directories(catalog, now, grace, dry_run)
    return GcResult(tuple(actions), dry_run)


_OVER = "its time in the trash is over"


class _Collection:
    def __init__(
        self, catalog: Catalog, run: str, now: float, grace: float, force: bool, dry_run: bool
    ) -> None:
        self.catalog = catalog
        self.name = run
        self.keys = RunKeys(run)
        self.now = now
        self.grace = grace
        self.force = force
        self.dry_run = dry_run
        self.collected: set[Name] = set()

    def run(self) -> Iterator[GcAction]:
        directories = self.catalog.directories(self.name)
        leases = self.catalog.leases(self.name)
        records = {f.name: f for f in self._records()}
        trash = {name: self._trash(name) for name in self.catalog.trash_names(self.name)}
        orphans = [name for name in directories if name not in trash]
        copies = {held.name for held in leases if is_copy(held)}
        saved = [name for name in orphans if name not in copies]
        if saved and not records and not self.force:
            raise ConflictError(
                f"run {self.name!r} in {self.catalog.uri} has {len(saved)} directories of "
                "checkpoints and no record: its records may be lost",
                hint="look at them; if none was ever committed: ckpt gc --force",
            )
        lost = () if self.force else self.catalog.lost_records(self.name, orphans, leases, records)
        newest_lease = {held.name: held for held in sorted(leases, key=lambda h: h.modified)}
        for name in orphans:
            if name in lost:
                why = "it is complete and has lost its record; --force removes it"
                yield GcAction(self.keys.directory(name), False, why)
            else:
                yield from self._directory(name, records.get(name), newest_lease.get(name))
        for name, record in trash.items():
            yield from self._trashed(name, record, name in directories, records.get(name))
        live = {held.name for held in leases if is_live(held, self.now)}
        for held in leases:
            found = records.get(held.name)
            if is_copy(held) and found is not None and held.name not in live:
                yield from self._copied(held.name)
            yield from self._lease(held, held.name in directories, found, held.name in trash)
        yield from self._uploads(leases, records)
        keys = self.keys
        for key in (self.name, keys.commits, keys.trash, keys.leases, keys.lives):
            yield from _stray(self.catalog, key, self.now, self.grace, self.dry_run)
        for marked in self.catalog.backend.list(self.keys.marks):
            yield from self._repairs(marked.key)
            yield from _stray(self.catalog, marked.key, self.now, self.grace, self.dry_run)
            yield from self._marks(marked.key, directories, records)

    def _records(self) -> list[Found]:
        return self.catalog.find_all(self.name, self.catalog.record_names(self.name))

    def _trash(self, name: Name) -> tuple[Trash | None, bytes]:
        try:
            return self.catalog.find_trash(self.name, name)
        except IntegrityError:
            return None, b""

    def _repairs(self, key: str) -> Iterator[GcAction]:
        """Temporaries in a checkpoint's directory: a repair that was killed left its sign."""
        name = Name.parse(key.rpartition("/")[2])
        if name is None or not self._is_being_repaired(key):
            return
        least = max(self.grace, STALE_SECONDS)
        root = self.keys.directory(name)
        for entry in self.catalog.backend.list(root, recursive=True):
            if is_temporary(entry.key) and self.now - entry.modified >= least:
                if not self.dry_run:
                    self.catalog.backend.delete([entry.key])
                yield GcAction(entry.key, True, "left over from a repair", max(0, entry.size))

    def _is_being_repaired(self, marks: str) -> bool:
        """Whether a repair is at work, or was killed."""
        signs = (e.key.rpartition("/")[2] for e in self.catalog.backend.list(marks))
        return any(sign.startswith(REPAIR_PREFIX) for sign in signs)

    def _marks(
        self, key: str, directories: Sequence[Name], records: Mapping[Name, Found]
    ) -> Iterator[GcAction]:
        """Marks of what was removed for good, written by someone who did not know yet."""
        name = Name.parse(key.rpartition("/")[2])
        found = records.get(name) if name is not None else None
        if name not in directories and found is not None and found.is_void:
            if not self.dry_run:
                self.catalog.backend.remove_tree(key)
            yield GcAction(key, True, "marks of a checkpoint that was removed")

    def _directory(
        self, name: Name, found: Found | None, held: HeldLease | None
    ) -> Iterator[GcAction]:
        key = self.keys.directory(name)
        if found is not None and not found.is_void:
            return
        listed = self.catalog.backend.list(key, recursive=True)
        size = sum(max(0, e.size) for e in listed)
        if found is None:
            if held is not None and is_live(held, self.now):
                yield GcAction(key, False, "a save is writing it", size)
                return
            if held is not None and is_copy(held) and not self.force:
                # Its void would keep the checkpoint from ever being mirrored.
                yield GcAction(key, False, "a mirror's, whose next pass completes it", size)
                return
            touched = [held.modified] if held is not None else [e.modified for e in listed]
            own = self.catalog.backend.stat(key)
            age = self.now - max([*touched, own.modified if own and not touched else 0.0])
            if age < self.grace:
                yield GcAction(
                    key, False, f"its save ended {spell_duration(age)} ago, too recently", size
                )
                return
            reason = f"an unfinished save that ended {spell_duration(age)} ago"
        else:
            reason = "it was given up"
        if self.dry_run or discard(self.catalog, self.name, name, "collected: unfinished save"):
            self.collected.add(name)
            yield GcAction(key, True, reason, size)
        else:
            yield GcAction(key, False, "it was committed meanwhile", size)

    def _uploads(
        self, leases: Sequence[HeldLease], records: Mapping[Name, Found]
    ) -> Iterator[GcAction]:
        """Uploads that nobody finished: no listing shows them, and they are paid for."""
        live = {held.name for held in leases if is_live(held, self.now) or is_copy(held)}
        for upload in self.catalog.backend.unfinished(self.name):
            name = Name.parse(upload.key.split("/")[1])
            age = self.now - upload.started
            given_up = name is not None and _is_void(records.get(name))
            if age < max(self.grace, STALE_SECONDS) and not given_up:
                continue
            if name in live:
                yield GcAction(upload.key, False, "a save is writing it")
                continue
            if not self.dry_run:
                self.catalog.backend.discard_unfinished([upload])
            yield GcAction(upload.key, True, "an upload that was never finished")

    def _trashed(
        self, name: Name, held: tuple[Trash | None, bytes], has_files: bool, found: Found | None
    ) -> Iterator[GcAction]:
        trash, data = held
        has_files = has_files and (found is None or found.is_void)
        key = self.keys.directory(name) if has_files else self.keys.trash_record(name)
        if trash is None:
            yield GcAction(key, False, "its trash record cannot be read")
            return
        entry = self.catalog.backend.stat(self.keys.trash_record(name))
        if entry is None:
            return
        left = entry.modified + trash.grace - self.now
        size = 0
        if has_files:
            listed = self.catalog.backend.list(self.keys.directory(name), recursive=True)
            size = sum(max(0, e.size) for e in listed)
        if found is not None and not found.is_void:
            yield from self._leftover(key, entry, trash, data)
        elif left > 0:
            yield GcAction(key, False, f"in the trash for another {spell_duration(left)}", size)
        elif self._is_pinned(name):
            yield GcAction(key, False, "in the trash, and pinned", size)
        elif self.dry_run or purge(self.catalog, self.name, name, data, _OVER):
            yield GcAction(key, True, _OVER, size)
        else:
            yield GcAction(key, False, "it was undeleted")

    def _leftover(self, key: str, entry: Entry, trash: Trash, data: bytes) -> Iterator[GcAction]:
        """A trash record beside a commit: of a delete at work, or of one that died at it."""
        if self.now - entry.modified < max(trash.grace, STALE_SECONDS):
            return
        if not self.dry_run:
            self.catalog.backend.remove_if(key, data)
        yield GcAction(key, True, "its checkpoint is not deleted")

    def _copied(self, name: Name) -> Iterator[GcAction]:
        """Temporaries of a mirror that was killed while another one completed its copy."""
        if self._is_being_repaired(self.keys.marks_of(name)):
            return  # they may be the repair's
        for entry in self.catalog.backend.list(self.keys.directory(name), recursive=True):
            if is_temporary(entry.key):
                if not self.dry_run:
                    self.catalog.backend.delete([entry.key])
                yield GcAction(entry.key, True, "left over from a mirror", max(0, entry.size))

    def _is_pinned(self, name: Name) -> bool:
        now = standing(self.catalog, self.name, name)
        return now.pinned or bool(now.unreadable)

    def _has_anything(self, name: Name) -> bool:
        """Another look at one directory."""
        key = self.keys.directory(name)
        return bool(self.catalog.backend.stat(key) or self.catalog.backend.list(key))

    def _lease(
        self, held: HeldLease, has_directory: bool, found: Found | None, trashed: bool
    ) -> Iterator[GcAction]:
        """A lease whose save has ended; the one of a dead save goes with its directory."""
        if is_live(held, self.now):
            return
        # A mirror's directory may have been made since the directories were listed.
        has_files = has_directory or (is_copy(held) and self._has_anything(held.name))
        if found is None and has_files and held.name not in self.collected:
            return
        if not self.dry_run:
            settled = found is not None or trashed or held.name in self.collected
            if not settled and _has_life(held):
                # A newer life finds the saves of older ones by their leases: this one may go only
                # when its save, which may be asleep, can never commit.
                ensure_void(self.catalog, self.name, held.name, "collected: no sign of life")
            self.catalog.backend.delete([held.key])
        yield GcAction(held.key, True, "the lease of a save that has ended")


def _is_void(found: Found | None) -> bool:
    return found is not None and found.is_void


def _has_life(held: HeldLease) -> bool:
    """Whether its save belongs to a life of the run, or may do so."""
    return held.lease is None or held.lease.life is not None


def _stray(
    catalog: Catalog, directory: str, now: float, grace: float, dry_run: bool
) -> Iterator[GcAction]:
    """Temporaries that a killed process left; those of the last half hour may be in use."""
    least = max(grace, STALE_SECONDS)
    for entry in catalog.backend.list(directory):
        if entry.is_directory or not is_temporary(entry.key) or now - entry.modified < least:
            continue
        if not dry_run:
            _keep_void(catalog, directory, entry.key)
            catalog.backend.delete([entry.key])
        yield GcAction(entry.key, True, "left over from a process that was killed", entry.size)


def _stray_directories(
    catalog: Catalog, now: float, grace: float, dry_run: bool
) -> Iterator[GcAction]:
    """What a killed examination of the place (``ckpt doctor``) left."""
    for entry in catalog.backend.list(""):
        if not entry.is_directory or not is_temporary(entry.key):
            continue
        listed = catalog.backend.list(entry.key, recursive=True)
        own = catalog.backend.stat(entry.key)
        youngest = max([e.modified for e in listed] or [own.modified if own else 0.0])
        if now - youngest < max(grace, STALE_SECONDS):
            continue
        if not dry_run:
            catalog.backend.remove_tree(entry.key)
        size = sum(max(0, e.size) for e in listed)
        yield GcAction(entry.key, True, "left over from a process that was killed", size)


def _keep_void(catalog: Catalog, directory: str, key: str) -> None:
    """A void that was about to be created, or was taken aside to be looked at, must stand."""
    run, _, last = directory.rpartition("/")
    if last != "commits":
        return
    try:
        record = decode_any_record(catalog.backend.read(key, SIZE_LIMIT), key)
    except (IntegrityError, NotFoundError):
        return
    name = Name.parse(record.name)
    if isinstance(record, Void) and record.run == run and name is not None:
        ensure_void(catalog, run, name, record.reason)
