"""Leases: a sign that a save is under way, and a journal of what it has finished.

A lease keeps gc away from a directory that has no record yet. It ends by itself: a writer that has
not renewed it for half an hour is taken for dead, so nothing ever needs to be unlocked by hand.
What protects the store from a writer that was only asleep is not the lease but the void.
"""

from __future__ import annotations

import threading
import time

import msgspec

from ckptstore import document
from ckptstore.catalog import Catalog, HeldLease
from ckptstore.errors import CkptError
from ckptstore.layout import Name, RunKeys
from ckptstore.manifest import FileEntry
from ckptstore.records import Lease, Writer, is_gone, process_here, timestamp

HEARTBEAT_SECONDS = 5 * 60.0
STALE_SECONDS = 30 * 60.0
"""A lease that was not renewed for this long, by the store's clock, is dead."""

JOURNAL_SECONDS = 1.0
"""The journal is written at most this often, so that many small files cost few writes."""


class LeaseKeeper:
    """The lease of a save of this process, renewed by a thread until it is let go.

    Args:
        catalog: The store.
        run, name: The save.
        writer: Who saves.
        life: The run's life that the save belongs to, if any.
        copy_of: Id of the store that a mirror copies from.
        heartbeat: Seconds between renewals.
    """

    def __init__(
        self,
        catalog: Catalog,
        run: str,
        name: Name,
        writer: Writer,
        *,
        life: int | None = None,
        copy_of: str | None = None,
        heartbeat: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._backend = catalog.backend
        self._key = RunKeys(run).lease(name, writer.id)
        self._lease = Lease(
            name=str(name),
            run=run,
            created=timestamp(),
            writer=writer,
            process=process_here(),
            life=life,
            copy_of=copy_of,
        )
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._journal: list[FileEntry] = []
        self._written = 0.0
        self._write()
        self._thread = threading.Thread(target=self._beat, name="ckptstore-lease", daemon=True)
        self._thread.start()

    def completed(self, entries: list[FileEntry]) -> None:
        """Note complete files, so that a later save can take them over with their digests."""
        with self._lock:
            self._journal.extend(entries)
        if time.monotonic() - self._written >= JOURNAL_SECONDS:
            self._write()

    def release(self) -> None:
        """The save has ended: remove the lease."""
        self.stop()
        self._backend.delete([self._key])

    def abandon(self) -> None:
        """The save has failed but leaves its files: say so, for the next one to take them."""
        self.stop()
        with self._lock:
            self._lease = msgspec.structs.replace(self._lease, abandoned=True)
        self._write()

    def stop(self) -> None:
        """Renew it no more."""
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat):
            try:
                self._write()
            except CkptError:
                continue  # storage that is away for a while is no reason to end a save

    def _write(self) -> None:
        with self._lock:
            lease = msgspec.structs.replace(self._lease, files=tuple(self._journal))
            data = document.encode(lease)
            if len(data) > document.SIZE_LIMIT:
                data = document.encode(self._lease)  # the files themselves say what is complete
            self._backend.put(self._key, data)
            self._written = time.monotonic()


def is_live(held: HeldLease, now: float) -> bool:
    """Whether the save may still be running.

    Args:
        held: The lease.
        now: The store's clock.
    """
    return now - held.modified < STALE_SECONDS and not is_dead(held)


def is_dead(held: HeldLease) -> bool:
    """Whether the save has certainly ended: it said so, or its process is gone from this host."""
    lease = held.lease
    return lease is not None and (lease.abandoned or is_gone(lease.process))


def is_copy(held: HeldLease) -> bool:
    """Whether a mirror is, or was, copying a checkpoint under it."""
    return held.lease is not None and held.lease.copy_of is not None


def store_time(catalog: Catalog) -> float:
    """The store's clock, or this host's where nothing can be written: to look, not to delete."""
    try:
        return catalog.backend.clock()
    except CkptError:
        return time.time()
