"""Room for a save: what retention left in the trash goes before a save fails for want of space.

The grace period of a retention is a convenience, a save is the purpose. What a person has deleted
keeps its grace period whatever happens, and so does what is pinned. Only the run that is saved to
is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.catalog import Catalog
from ckptstore.deleting import purge
from ckptstore.errors import CkptError, IntegrityError, NoSpaceError
from ckptstore.layout import Name, RunKeys
from ckptstore.marks import standing
from ckptstore.records import Commit, decode_any_record

log = logging.getLogger(__name__)

RETENTION = "retention: "
"""How the reasons in the trash records of a retention begin."""


@dataclass(frozen=True)
class Trashed:
    """A checkpoint in the trash.

    Attributes:
        name: Which one.
        data: Its trash record, whole.
        size: Bytes of its files.
        may_go: Whether it may be purged for want of room.
        expired: Whether its grace period is over.
    """

    name: Name
    data: bytes
    size: int
    may_go: bool
    expired: bool


def trashed(catalog: Catalog, run: str, now: float | None) -> list[Trashed]:
    """What lies in a run's trash, the oldest first.

    Args:
        catalog, run: Where.
        now: The store's clock; ``None`` takes no grace period for over.
    """
    found = []
    for name in catalog.trash_names(run):
        try:
            trash, data = catalog.find_trash(run, name)
        except IntegrityError:  # nobody may touch it
            found.append(Trashed(name, b"", stored_size(catalog, run, name), False, False))
            continue
        entry = catalog.backend.stat(RunKeys(run).trash_record(name))
        if trash is None or entry is None:
            continue
        marks = standing(catalog, run, name)
        free = not marks.pinned and not marks.unreadable
        expired = now is not None and entry.modified + trash.grace <= now
        try:
            record = decode_any_record(trash.record.encode(), f"the record in the trash of {name}")
        except IntegrityError:
            record = None
        whole = isinstance(record, Commit)
        size = record.size if isinstance(record, Commit) else stored_size(catalog, run, name)
        ours = whole and trash.reason.startswith(RETENTION)
        found.append(Trashed(name, data, size, free and (ours or expired), expired))
    return found


def stored_size(catalog: Catalog, run: str, name: Name) -> int:
    """Bytes in a directory that no record tells the size of."""
    listed = catalog.backend.list(RunKeys(run).directory(name), recursive=True)
    return sum(max(0, e.size) for e in listed)


def purge_trash(
    catalog: Catalog, run: str, now: float | None, enough: Callable[[int], bool]
) -> int:
    """Purge what may go, the oldest first but expired before unexpired, until it is enough.

    Args:
        catalog, run: Where.
        now: The store's clock; ``None`` takes no grace period for over.
        enough: Given the bytes that were purged so far; asked before each.

    Returns:
        Bytes that were purged; those that another checkpoint shares are counted too.
    """
    freed = 0
    going = [t for t in trashed(catalog, run, now) if t.may_go]
    for one in sorted(going, key=lambda t: not t.expired):
        if enough(freed):
            break
        if purge(catalog, run, one.name, one.data, "removed from the trash to make room"):
            freed += one.size
    return freed


def make_room(catalog: Catalog, run: str, need: int) -> int:
    """Purge trash of the run until ``need`` bytes are free, where the storage tells what is.

    Returns:
        Bytes that are still missing; 0 when there is room, or nobody knows.
    """
    if missing(catalog, need) == 0:
        return 0
    try:
        empty_trash(catalog, run, lambda _: missing(catalog, need) == 0)
    except CkptError as error:  # the save itself will say what is wrong with the storage
        log.warning("the trash of run %s was not emptied to make room: %s", run, error)
    return missing(catalog, need)


def empty_trash(catalog: Catalog, run: str, enough: Callable[[int], bool] = lambda _: False) -> int:
    """Purge what may go until it is enough, where the storage lets that be done safely.

    Returns:
        Bytes that were purged.
    """
    if not catalog.trash_names(run) or not catalog.backend.is_exclusive():
        return 0
    try:
        now = catalog.backend.clock()
    except CkptError:  # asking for it takes a file, and the disk may be full
        now = None
    return purge_trash(catalog, run, now, enough)


def missing(catalog: Catalog, need: int) -> int:
    """How many bytes fewer than ``need`` are free; 0 when nobody knows."""
    free = catalog.backend.free_space()
    return 0 if free is None else max(0, need - free)


def no_room(catalog: Catalog, need: int, short: int) -> NoSpaceError:
    """The refusal of a save that needs more bytes than there are."""
    return NoSpaceError(
        f"no space left: {catalog.uri} has room for {need - short:,} bytes, and {need:,} are to "
        "be stored",
        hint="free some space, for example with ckpt prune, then do it again",
    )
