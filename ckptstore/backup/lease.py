"""The lease of a job in a store: two hosts that run the same job exclude each other.

    .jobs/<JOB>-<12 digits>.json        in a destination store: who runs the job now

The digits stand for what the job copies (a run, or the source store's id), so two jobs that only
have a name in common do not meet. A lease ends by itself: one that was not renewed for half an
hour by the store's clock, or whose process is gone from this host, is taken over. Nothing depends
on it for safety, as copies of one checkpoint never harm each other: it keeps two runs from doing
the same work, and a job that lost its lease is only told so.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from blake3 import blake3

from ckptstore import document
from ckptstore.document import SIZE_LIMIT
from ckptstore.errors import CkptError, ConflictError, IntegrityError, NotFoundError, printable
from ckptstore.ids import random_letters
from ckptstore.leases import HEARTBEAT_SECONDS, STALE_SECONDS
from ckptstore.records import Body, Process, is_gone, process_here, timestamp
from ckptstore.store import Store

DIRECTORY = ".jobs"
"""No run can have this name, so no listing takes it for one."""

_TRIES = 5


class JobLease(Body, frozen=True):
    """Who runs a job."""

    job: str
    id: str
    began: str
    process: Process


_DECODER: document.Decoder[JobLease] = document.Decoder(JobLease)


class HeldJob:
    """A lease that this process holds, renewed by a thread until it is let go.

    Args:
        store: The destination, which exists.
        job: The job's name.
        subject: What it copies: a run, or the id of the source store.
        heartbeat: Seconds between renewals.

    Raises:
        ConflictError: another process runs the job.
        CkptError: the store cannot be written.
    """

    def __init__(
        self, store: Store, job: str, subject: str, *, heartbeat: float = HEARTBEAT_SECONDS
    ) -> None:
        self._backend = store.backend
        digits = blake3(f"{job}\n{subject}".encode()).hexdigest()[:12]
        self._key = f"{DIRECTORY}/{job}-{digits}.json"
        self._data = document.encode(
            JobLease(job=job, id=random_letters(), began=timestamp(), process=process_here())
        )
        self._take(job, store.uri)
        self._heartbeat = heartbeat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ckptstore-job", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """The run has ended: remove the lease, if it still is this one's."""
        self._ended.set()
        self._thread.join()
        with suppress(CkptError):
            self._backend.remove_if(self._key, self._data)

    def _take(self, job: str, uri: str) -> None:
        for _ in range(_TRIES):
            if self._backend.create_exclusive(self._key, self._data):
                if self._backend.is_exclusive() or self._is_ours():
                    return
                continue  # without exclusive creation the last one to write has it
            entry = self._backend.stat(self._key)
            try:
                data = self._backend.read(self._key, SIZE_LIMIT)
            except NotFoundError:
                continue
            if data == self._data:
                return  # it was created, and the answer was lost
            held = self._decoded(data)
            stale = entry is not None and self._backend.clock() - entry.modified >= STALE_SECONDS
            if not stale and not (held is not None and is_gone(held.process)):
                raise _running(job, held, uri)
            self._backend.remove_if(self._key, data)
        raise ConflictError(f"others are running the job {job!r} for {uri}")

    def _is_ours(self) -> bool:
        try:
            return self._backend.read(self._key, SIZE_LIMIT) == self._data
        except NotFoundError:
            return False

    def _decoded(self, data: bytes) -> JobLease | None:
        try:
            return _DECODER.decode(data, self._key)
        except IntegrityError:
            return None

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat):
            try:
                if not self._is_ours():
                    return  # we slept, and another run has taken over: it is theirs
                self._backend.put(self._key, self._data)
            except CkptError:
                continue  # storage that is away for a while is no reason to end a job


def _running(job: str, held: JobLease | None, uri: str) -> ConflictError:
    who = (
        f"on {printable(held.process.host)} (process {held.process.pid}) since "
        f"{printable(held.began)}"
        if held is not None
        else "somewhere (its lease cannot be read)"
    )
    return ConflictError(
        f"the job {job!r} for {uri} is running already {who}",
        hint="it ends by itself, and a lease of a dead process within half an hour",
    )
