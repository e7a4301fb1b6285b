"""The bodies of a store's small documents: marker, commits, voids, marks, trash, leases, lives."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from typing import Literal, TypeVar

import msgspec

from ckptstore.document import Decoder
from ckptstore.errors import IntegrityError, printable
from ckptstore.layout import Name
from ckptstore.manifest import FORMAT, FileEntry, is_digest
from ckptstore.version import __version__

KNOWN_FEATURES: frozenset[str] = frozenset()
"""Format features that this version understands; format 1 has none."""


class Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What every document's body is made of."""


class Features(Body, frozen=True):
    """Features a program must know to read from, write to or delete from the store."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()


class AnyFormat(Body, frozen=True):
    """The one field that a marker and a record have in every format."""

    format: int


class Marker(Body, frozen=True):
    """``CKPTSTORE.json``: this is a store, of this format, with this identity."""

    format: int
    store: str
    created: str
    requires: Features = Features()


class Writer(Body, frozen=True):
    """Who wrote a document: the save's (or the actor's) own random id, and its process."""

    id: str
    host: str
    pid: int
    version: str


class BestRule(Body, frozen=True):
    """Which metric says that a checkpoint is better, and in which direction."""

    metric: str
    mode: Literal["max", "min"]

    def better(self, a: float, b: float) -> bool:
        """Whether ``a`` is better than ``b``."""
        return a > b if self.mode == "max" else a < b

    def __str__(self) -> str:
        return f"{self.metric}:{self.mode}"


class ManifestPin(Body, frozen=True):
    """The exact manifest that was committed."""

    size: int
    digest: str


class Commit(Body, frozen=True, tag_field="kind", tag="commit"):
    """A record that makes a checkpoint exist.

    Attributes:
        name, run, step, seq: Which checkpoint; equal to what its key says.
        store: Id of the store it was first committed to (mirrors keep the record as it is).
        requires: Features needed to read the checkpoint.
        parent: Name of the run's newest commit when the save started.
        manifest: Size and BLAKE3 of ``MANIFEST.json``.
        content: Content digest.
        size: Bytes in all files, without the manifest.
        files: How many files.
        metrics: Finite numbers.
        best: The rule for the run's best checkpoint, in force since this save.
        tags: Tags given at the save.
        life: The run's life that saved it; ``None`` for a save that belongs to none.
        created: UTC, by the writer's clock: for people, never used for order.
    """

    format: int
    name: str
    run: str
    step: int
    seq: int
    store: str
    manifest: ManifestPin
    content: str
    size: int
    files: int
    created: str
    writer: Writer
    requires: tuple[str, ...] = ()
    parent: str | None = None
    metrics: dict[str, float] = {}
    best: BestRule | None = None
    tags: tuple[str, ...] = ()
    life: int | None = None


class Void(Body, frozen=True, tag_field="kind", tag="void"):
    """A record at a commit key that no commit can replace: the checkpoint is given up for good."""

    format: int
    name: str
    run: str
    step: int
    seq: int
    store: str
    created: str
    writer: Writer
    reason: str


Record = Commit | Void


class Mark(Body, frozen=True):
    """An event in a checkpoint's life after its commit; marks are added and never changed.

    ``removes`` names the marks whose effect this one ends (``birth:TAG`` for a tag given at the
    save), so that the outcome does not depend on anybody's clock.
    """

    name: str
    run: str
    kind: Literal["pin", "unpin", "tag", "untag", "metrics", "verified", "damaged", "repaired"]
    created: str
    writer: Writer
    removes: tuple[str, ...] = ()
    tag: str | None = None
    metrics: dict[str, float] = {}
    deep: bool = False
    checked_bytes: int = 0
    damage: tuple[DamageNote, ...] = ()


class DamageNote(Body, frozen=True):
    """A damaged place, as a mark keeps it."""

    path: str
    reason: str
    offset: int = 0
    length: int = 0


class Trash(Body, frozen=True):
    """A deleted checkpoint's record, kept until ``grace`` seconds after this document's time."""

    name: str
    run: str
    record: str
    grace: float
    created: str
    writer: Writer
    reason: str


class Process(Body, frozen=True):
    """A process on a host, so that another process of the same host can tell whether it lives."""

    host: str
    boot: str
    namespace: int
    pid: int
    started: int


class Lease(Body, frozen=True):
    """An unfinished save: who writes it, and the files that are complete.

    Attributes:
        abandoned: The writer ended without committing and left its files to the next save.
        life: The run's life that saves; ``None`` for a save that belongs to none.
        copy_of: Id of the store that a mirror copies from; ``None`` for what is no mirror's copy.
            A copy that was interrupted is completed by the next pass and must not be voided for
            its age: a void would keep the checkpoint from ever being mirrored.
    """

    name: str
    run: str
    created: str
    writer: Writer
    process: Process
    files: tuple[FileEntry, ...] = ()
    abandoned: bool = False
    life: int | None = None
    copy_of: str | None = None


class Life(Body, frozen=True):
    """A life of a run: a job that was started and decides what it resumes from.

    Attributes:
        life: Its number; a newer life has a higher one.
        created: UTC, by the writer's clock: for people, never used for order.
    """

    run: str
    life: int
    created: str
    writer: Writer
    process: Process


class MirrorNote(Body, frozen=True):
    """A mirror that the store is expected to reach, and how the last attempt went.

    Attributes:
        uri: Where it is, without secrets.
        since: When it was noted.
        runs: Patterns of the runs it shall hold; none is all.
        store: Id of the store there; ``None`` while it was never reached.
        tried: When a pass last ended.
        reached: When a pass last ended with all there that was owed.
        problem: Why the last pass did not.
    """

    uri: str
    since: str
    writer: Writer
    runs: tuple[str, ...] = ()
    store: str | None = None
    tried: str | None = None
    reached: str | None = None
    problem: str | None = None


class Acknowledged(Body, frozen=True):
    """The run's checkpoints that a mirror need not be given any more."""

    run: str
    names: tuple[str, ...]
    updated: str
    writer: Writer


_any_format = Decoder[AnyFormat](AnyFormat)
_marker = Decoder[Marker](Marker)
_record = Decoder[Record](Record)
_mark = Decoder[Mark](Mark)
_trash = Decoder[Trash](Trash)
_lease = Decoder[Lease](Lease)
_life = Decoder[Life](Life)
_mirror_note = Decoder[MirrorNote](MirrorNote)
_acknowledged = Decoder[Acknowledged](Acknowledged)


def decode_marker(data: bytes, what: str) -> Marker:
    """The store's marker.

    Raises:
        IntegrityError: it is damaged, or of a format that this version does not know.
    """
    _check_format(data, what)
    return _marker.decode(data, what)


def _check_format(data: bytes, what: str) -> None:
    found = _any_format.decode(data, what).format
    if not 1 <= found <= FORMAT:
        raise IntegrityError(
            f"{what} has format {found}; this version knows formats up to {FORMAT}",
            hint="update ckptstore",
        )


def decode_any_record(data: bytes, what: str) -> Record:
    """A record wherever it lies. Raises :class:`IntegrityError`."""
    return _record.decode(data, what)


def decode_record(data: bytes, run: str, name: Name, what: str) -> Record:
    """The record at ``name``'s commit key.

    Raises:
        IntegrityError: it is damaged, names another checkpoint (a file that was moved or copied by
            hand), or is of a format or needs a feature that this version does not know.
    """
    try:
        record = _record.decode(data, what)
    except IntegrityError:
        _check_format(data, what)  # a newer format is the better reason
        raise
    if record.format != FORMAT:
        _check_format(data, what)
    if (
        record.seq != name.seq
        or record.step != name.step
        or record.run != run
        or Name.parse(record.name) != name
    ):
        raise IntegrityError(
            f"{what} is about another checkpoint: {printable(f'{record.run}@{record.name}')}"
        )
    if isinstance(record, Commit):
        unknown = sorted(set(record.requires) - KNOWN_FEATURES) if record.requires else ()
        if unknown:
            raise IntegrityError(
                f"{what} needs {', '.join(unknown)}, which this version does not know",
                hint="update ckptstore",
            )
        good = is_digest(record.manifest.digest) and is_digest(record.content)
        if not good or record.size < 0 or record.files < 0:
            raise IntegrityError(f"{what} holds a size or digest that cannot be")
    return record


def decode_mark(data: bytes, run: str, name: Name, what: str) -> Mark:
    """A mark of ``name``. Raises :class:`IntegrityError`."""
    return _about(_mark.decode(data, what), run, name, what)


def decode_trash(data: bytes, run: str, name: Name, what: str) -> Trash:
    """The trash record of ``name``. Raises :class:`IntegrityError`."""
    return _about(_trash.decode(data, what), run, name, what)


def decode_lease(data: bytes, run: str, name: Name, what: str) -> Lease:
    """The lease of an unfinished save. Raises :class:`IntegrityError`."""
    return _about(_lease.decode(data, what), run, name, what)


def decode_life(data: bytes, run: str, number: int, what: str) -> Life:
    """A life of the run. Raises :class:`IntegrityError`."""
    life = _life.decode(data, what)
    if (life.run, life.life) != (run, number):
        raise IntegrityError(f"{what} is about another life")
    return life


def decode_mirror_note(data: bytes, what: str) -> MirrorNote:
    """What is known of a mirror. Raises :class:`IntegrityError`."""
    return _mirror_note.decode(data, what)


def decode_acknowledged(data: bytes, run: str, what: str) -> Acknowledged:
    """What a mirror holds of ``run``. Raises :class:`IntegrityError`."""
    body = _acknowledged.decode(data, what)
    if body.run != run:
        raise IntegrityError(f"{what} is about another run")
    return body


About = TypeVar("About", Mark, Trash, Lease)


def _about(body: About, run: str, name: Name, what: str) -> About:
    """``body``, if it is about the checkpoint that its key says."""
    if (body.run, body.name) != (run, str(name)):
        raise IntegrityError(f"{what} is about another checkpoint")
    return body


def timestamp() -> str:
    """Now by this host's clock, in UTC with milliseconds, as documents spell it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(text: str) -> float | None:
    """Seconds since 1970 of a time in a document; ``None`` when it is no time."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def finite(metrics: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The metrics that are finite numbers; NaN and infinities have no place in a record."""
    kept = {}
    for key, value in metrics:
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond all floats
            continue
        if math.isfinite(number):
            kept[key] = number
    return kept


def writer_here(writer_id: str) -> Writer:
    """This process as a :class:`Writer`."""
    return Writer(id=writer_id, host=socket.gethostname(), pid=os.getpid(), version=__version__)


def process_here() -> Process:
    """This process as a :class:`Process`."""
    return Process(
        host=socket.gethostname(),
        boot=_boot_id(),
        namespace=_pid_namespace(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
    )


def is_gone(process: Process) -> bool:
    """Whether ``process`` certainly does not run any more; ``False`` when that cannot be told.

    It can be told for a process of this boot of this host and the same pid namespace.
    """
    here = process_here()
    same = (process.host, process.boot, process.namespace) == (here.host, here.boot, here.namespace)
    if not same or not here.boot or process.pid <= 0:
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it runs as another user
        return False
    started = _started(process.pid)
    return started is not None and started != process.started


@cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except OSError:  # not Linux: then no process is ever taken for gone
        return ""


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot; ``None`` when that cannot be read.

    A zombie has ended: its start time is given as 0.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
