"""What a store holds, as its listings say: runs, records, unfinished saves, trash, leases.

Nothing here is remembered between calls. Every question is answered by listing and reading, so any
process on any host gets the same answer after any crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ckptstore import document
from ckptstore.backends.base import Backend, Entry
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    PlaceNotFoundError,
    UsageError,
    printable,
)
from ckptstore.ids import IdFactory, random_letters
from ckptstore.layout import MARKER, SEQ_LIMIT, Name, RunKeys, is_run, lease_name, record_name
from ckptstore.manifest import FORMAT, Manifest, decode_manifest, owner_of
from ckptstore.records import (
    KNOWN_FEATURES,
    Commit,
    Features,
    Lease,
    Marker,
    Record,
    Trash,
    Void,
    decode_lease,
    decode_marker,
    decode_record,
    decode_trash,
    timestamp,
)

MANIFEST_LIMIT = 256 * 1024**2
"""A longer manifest (a checkpoint of some 60 TB) is not read."""

T = TypeVar("T")
Each = TypeVar("Each")

_LOOK_AGAIN = (0.1, 0.5, 2.0)
"""Seconds to wait before looking again for what must be there."""


class Found(msgspec.Struct, frozen=True, gc=False):
    """What stands at a commit key.

    Attributes:
        name: The checkpoint.
        record: The record; ``None`` when it cannot be read.
        data: Its bytes.
        problem: Why it cannot be read.
    """

    name: Name
    record: Record | None
    data: bytes = b""
    problem: IntegrityError | None = None

    @property
    def is_void(self) -> bool:
        """Whether the checkpoint was given up for good."""
        return isinstance(self.record, Void)

    @property
    def commit(self) -> Commit | None:
        """The record, when it is a commit."""
        return self.record if isinstance(self.record, Commit) else None


@dataclass(frozen=True)
class HeldLease:
    """A lease as it was found.

    Attributes:
        key: Its key.
        name: The save it is about.
        modified: The last heartbeat, by the store's clock.
        lease: Its content; ``None`` when it cannot be read.
    """

    key: str
    name: Name
    modified: float
    lease: Lease | None


class Catalog:
    """The documents of one store.

    Args:
        backend: Where the store is.
        ids: Makes the ids in new names.
    """

    def __init__(self, backend: Backend, ids: IdFactory) -> None:
        self.backend = backend
        self.ids = ids
        self._marker: Marker | None = None

    @property
    def uri(self) -> str:
        """The store's root, for messages."""
        return self.backend.uri

    # The store itself

    def find_marker(self) -> Marker | None:
        """The store's marker, or ``None`` when nothing is there.

        Raises:
            IntegrityError: it is damaged, or of a newer format or with a feature for reading that
                this version does not know.
        """
        if self._marker is None:
            what = f"the store {self.uri} ({MARKER})"
            try:
                data = self.backend.read(MARKER, document.SIZE_LIMIT)
            except PlaceNotFoundError:
                raise
            except NotFoundError:
                return None
            try:
                marker = decode_marker(data, what)
            except IntegrityError as error:
                raise IntegrityError(
                    str(error), hint=error.hint or f"ckpt repair {self.uri}"
                ) from error
            self._require(marker.requires.read, "read")
            self._marker = marker
        return self._marker

    def marker(self) -> Marker:
        """The store's marker.

        Raises:
            NotFoundError: there is no store.
        """
        marker = self.find_marker()
        if marker is None:
            raise NotFoundError(
                f"there is no store at {self.uri}",
                hint="check the path; a push creates a store, and so does ckpt init",
            )
        return marker

    def require_writable(self) -> Marker:
        """The marker of a store that this version may write to."""
        marker = self.marker()
        self._require(marker.requires.write, "written to")
        return marker

    def require_deletable(self) -> Marker:
        """The marker of a store that this version may delete from."""
        marker = self.require_writable()
        self._require(marker.requires.delete, "deleted from")
        return marker

    def _require(self, features: Sequence[str], verb: str) -> None:
        unknown = sorted(set(features) - KNOWN_FEATURES)
        if unknown:
            raise IntegrityError(
                f"the store {self.uri} can only be {verb} by a version that knows: "
                f"{printable(', '.join(unknown))}",
                hint="update ckptstore",
            )

    def create(self, store_id: str | None = None, *, into_nonempty: bool = False) -> Marker:
        """The store's marker; the store is made when there is none.

        Args:
            store_id: The id of a new store; chance decides when it is ``None``.
            into_nonempty: Also where other things lie already.

        Raises:
            ConflictError: there is no store, and the place is not empty: a wrong path, or a store
                that has lost its marker.
        """
        found = self.find_marker()
        if found is not None:
            return found
        others = sorted(e.key for e in self.backend.list("") if e.key not in (MARKER, "lost+found"))
        others = [key for key in others if not key.startswith(".")]
        found = self.find_marker()  # someone may have made it, and saved, since the first look
        if found is not None:
            return found
        if others and not into_nonempty:
            shown = ", ".join(map(printable, others[:3])) + (", …" if len(others) > 3 else "")
            raise ConflictError(
                f"{self.uri} is no store (it has no {MARKER}) and is not empty: it holds {shown}",
                hint="name another place; a store that has lost its marker: "
                f"ckpt repair {self.uri}; to make it a store: ckpt init {self.uri} --force",
            )
        marker = Marker(
            format=FORMAT,
            store=store_id or random_letters() + random_letters(),
            created=timestamp(),
            requires=Features(),
        )
        self.create_document(MARKER, document.encode(marker))
        return self.marker()

    def check_alive(self) -> None:
        """Look again for the marker, before "nothing there" is believed or a record is created.

        Raises:
            NotFoundError: the store's root has gone (a disk that was unmounted), or is another's.
        """
        known, self._marker = self._marker, None
        found = self.find_marker()
        if found is None or (known is not None and known.store != found.store):
            self._marker = known
            raise NotFoundError(
                f"the store {self.uri} has gone: its {MARKER} is not there any more",
                hint="is the disk mounted?",
            )

    def create_document(self, key: str, data: bytes) -> bool:
        """Create a document exclusively, and make sure of the outcome.

        After any error, and where the storage has no true exclusivity, what stands at the key
        decides: a request whose reply was lost may have been carried out.

        Returns:
            Whether ``data`` stands at ``key`` now.
        """
        try:
            created = self.backend.create_exclusive(key, data)
        except CkptError:
            if self._is_at(key, data):
                self.backend.sync([key.rpartition("/")[0]])
                return True
            raise
        if created and self.backend.is_exclusive():
            return True
        if not self._is_at(key, data, stands=not created):
            return False
        self.backend.sync([key.rpartition("/")[0]])
        return True

    def _is_at(self, key: str, data: bytes, *, stands: bool = False) -> bool:
        """Whether ``data`` stands at ``key``.

        Args:
            key, data: What is looked for.
            stands: The storage has just said that something does. One that then does not find it
                is asked again: not all that is written can be read in the same moment everywhere.
        """
        for pause in (*(_LOOK_AGAIN if stands else ()), None):
            try:
                return self.backend.read(key, document.SIZE_LIMIT) == data
            except IntegrityError:
                return False
            except NotFoundError:
                if pause is not None:
                    time.sleep(pause)
        return False

    # Runs and records

    def runs(self) -> list[str]:
        """The runs, by name."""
        self.marker()
        found = [e.key for e in self.backend.list("") if e.is_directory and is_run(e.key)]
        if not found:
            self.check_alive()
        return sorted(found)

    def record_names(self, run: str) -> list[Name]:
        """The names at whose commit key something stands, in order of saving."""
        self.marker()
        names = [
            name
            for e in self.backend.list(RunKeys(run).commits)
            if (name := record_name(e.key.rpartition("/")[2])) is not None
        ]
        if not names:
            self.check_alive()
        return sorted(names)

    def require_run(self, run: str) -> None:
        """Raise :class:`NotFoundError` when the store has no such run."""
        self.marker()
        if not self.backend.list(run) and run not in (known := self.runs()):
            hint = f"runs here: {', '.join(known[:8])}" if known else "the store is empty"
            raise NotFoundError(f"there is no run {run!r} in {self.uri}", hint=hint)

    def find(self, run: str, name: Name) -> Found | None:
        """What stands at the commit key of ``name``; ``None`` when nothing does."""
        data = b""
        try:
            data = self.backend.read(RunKeys(run).record(name), document.SIZE_LIMIT)
            return Found(name, decode_record(data, run, name, f"the record of {run}@{name}"), data)
        except NotFoundError:
            return None
        except IntegrityError as problem:
            return Found(name, None, data, problem)

    def find_all(self, run: str, names: Sequence[Name]) -> list[Found]:
        """What stands at the commit keys of ``names``, without those where nothing does."""
        found = self.each(lambda name: self.find(run, name), names)
        return [f for f in found if f is not None]

    def each(self, call: Callable[[Each], T], things: Sequence[Each]) -> list[T]:
        """``call`` for each thing, as many at once as the storage likes."""
        parallel = self.backend.capabilities.parallel_reads
        if parallel <= 1 or len(things) <= 1:
            return [call(thing) for thing in things]
        with ThreadPoolExecutor(min(parallel, len(things))) as pool:
            return list(pool.map(call, things))

    def manifest(self, run: str, commit: Commit) -> Manifest:
        """The manifest that the commit pins.

        Raises:
            IntegrityError: it is missing or damaged.
        """
        name = Name.parse(commit.name)
        assert name is not None
        what = f"the manifest of {run}@{name}"
        key = RunKeys(run).manifest(name)
        try:
            size = commit.manifest.size
            found = self.backend.stat(key)
            if found is None:
                raise NotFoundError(f"{what} is missing")
            if found.size != size or size > MANIFEST_LIMIT:
                raise IntegrityError(f"{what} is {found.size} bytes long, must be {size}")
            data = self.backend.read(key, size)
        except NotFoundError as error:
            raise IntegrityError(f"{what} is missing") from error
        manifest = decode_manifest(data, commit.manifest.digest, what)
        if (
            (manifest.run, manifest.name, manifest.step) != (run, commit.name, commit.step)
            or manifest.content != commit.content
            or (manifest.size, len(manifest.files)) != (commit.size, commit.files)
        ):
            raise IntegrityError(f"{what} does not fit its record")
        return manifest

    def size_now(self, key: str, listed: int | None) -> int | None:
        """How long a file is, by another look where a listing may be some seconds old.

        Elsewhere the listing stands: a name that only a look finds is not the name of the file.

        Args:
            key: The file.
            listed: What a listing said; ``None``: it was not there.
        """
        if not self.backend.capabilities.old_listings:
            return listed
        try:
            found = self.backend.stat(key)
        except IntegrityError:  # a directory on the way is a symbolic link
            return None
        return None if found is None else found.size

    # What is not committed

    def newest(self, run: str, step: int | None = None) -> Found | None:
        """The run's newest record (with this step) that is no void; ``None`` if there is none."""
        for name in reversed(self.record_names(run)):
            if step is None or name.step == step:
                found = self.find(run, name)
                if found is not None and not found.is_void:
                    return found
        return None

    def directories(self, run: str) -> list[Name]:
        """The names that have a directory, in order of saving."""
        found = (
            Name.parse(e.key.rpartition("/")[2]) for e in self.backend.list(run) if e.is_directory
        )
        return sorted(name for name in found if name is not None)

    def lost_records(
        self,
        run: str,
        directories: Iterable[Name],
        leases: Iterable[HeldLease],
        records: Iterable[Name],
    ) -> list[Name]:
        """Complete checkpoints whose record has been lost, in order of saving.

        A save keeps its lease until its record exists, and a delete writes a trash record before it
        removes the record. So a directory with a manifest and without any of the three was
        committed once: it is not garbage.

        Args:
            run: The run.
            directories, leases, records: What the run has, listed in this order.
        """
        known = {held.name for held in leases} | set(records) | set(self.trash_names(run))
        return [name for name in directories if name not in known and self._is_lost(run, name)]

    def _is_lost(self, run: str, name: Name) -> bool:
        """A closer look: its own manifest, and nothing that moved between the listings."""
        keys = RunKeys(run)
        try:
            manifest = self.backend.read(keys.manifest(name), MANIFEST_LIMIT)
        except (NotFoundError, IntegrityError):
            return False
        return (
            owner_of(manifest) == (run, str(name))
            and self.find(run, name) is None
            and self.backend.stat(keys.trash_record(name)) is None
        )

    def leases(self, run: str) -> list[HeldLease]:
        """The leases of the run's unfinished saves."""
        held = []
        for entry in self.backend.list(RunKeys(run).leases):
            name = lease_name(entry.key.rpartition("/")[2])
            if name is not None:
                held.append(
                    HeldLease(entry.key, name, entry.modified, self._lease(run, name, entry))
                )
        return held

    def _lease(self, run: str, name: Name, entry: Entry) -> Lease | None:
        try:
            data = self.backend.read(entry.key, document.SIZE_LIMIT)
            return decode_lease(data, run, name, f"the lease {entry.key}")
        except (NotFoundError, IntegrityError):
            return None

    def trash_names(self, run: str) -> list[Name]:
        """The names that have a trash record, in order of saving."""
        names = (
            record_name(e.key.rpartition("/")[2]) for e in self.backend.list(RunKeys(run).trash)
        )
        return sorted(name for name in names if name is not None)

    def find_trash(self, run: str, name: Name) -> tuple[Trash | None, bytes]:
        """The trash record of ``name`` and its bytes; ``None`` and none when there is none.

        Raises:
            IntegrityError: it is damaged.
        """
        key = RunKeys(run).trash_record(name)
        try:
            data = self.backend.read(key, document.SIZE_LIMIT)
        except NotFoundError:
            return None, b""
        return decode_trash(data, run, name, f"the trash record of {run}@{name}"), data

    def new_name(self, run: str, step: int) -> Name:
        """A name for a new checkpoint: after all that the run has seen, and not taken."""
        keys = RunKeys(run)
        seen = set(self.record_names(run)) | set(self.directories(run)) | set(self.trash_names(run))
        for entry in self.backend.list(keys.leases):
            name = lease_name(entry.key.rpartition("/")[2])
            if name is not None:
                seen.add(name)
        seq = max((name.seq for name in seen), default=0) + 1
        if seq >= SEQ_LIMIT:
            raise ConflictError(f"run {run!r} in {self.uri} has used up its sequence numbers")
        taken = {(name.step, name.id) for name in seen}
        attempt = 0
        while (step, letters := self.ids(run, step, attempt)) in taken:
            attempt += 1
            if attempt > 10_000:
                raise UsageError("the id factory makes no new ids")
        return Name(seq, letters, step)
