"""Lives of a run: a job that was started again shuts out what is left of the one before.

A job that was killed and started again decides what it resumes from while workers of its old life,
perhaps on other hosts, may still be saving. What they committed after that decision would be a
checkpoint that the new life does not know. So a job begins a *life* before it decides, and each of
its saves names that life:

    a new life:  creates its document in ``lives/`` → looks at the leases → voids those of older
                 lives → decides
    a save:      writes its lease, with its life    → looks at ``lives/`` → … → record

Each writes before it looks, so of a save and a newer life at least one sees the other. A life that
sees the lease creates the void exclusively where the record would be: it stands, or the commit was
there first and is known to the decision. A save that sees the newer life fails.

This rests on the lease staying until its save has ended: with a commit, with a void, or before it
had a directory. Life documents are never removed, for the highest number must stay.
"""

from __future__ import annotations

import logging

from ckptstore import document
from ckptstore.catalog import Catalog, HeldLease
from ckptstore.errors import CkptError, ConflictError, NotFoundError, SupersededError, printable
from ckptstore.ids import random_letters
from ckptstore.layout import LIFE_LIMIT, Name, RunKeys, life_number
from ckptstore.leases import is_live
from ckptstore.records import Life, decode_life, process_here, timestamp, writer_here
from ckptstore.voiding import discard, ensure_void

log = logging.getLogger(__name__)


def begin_life(catalog: Catalog, run: str) -> Life:
    """Begin a new life of a run, and end the unfinished saves of all older ones.

    When this has returned, what belongs to an older life is committed already or never will be.
    A save that belongs to no life is left alone.

    Raises:
        CkptError: the storage failed, and older lives may go on. What was done stays: the number is
            used up, and the next life does the rest.
    """
    catalog.require_writable()
    life = _create(catalog, run)
    older = [held for held in catalog.leases(run) if _is_older(catalog, held, life)]
    now = catalog.backend.clock() if older else 0.0
    for held in older:
        _give_up(catalog, held, life, now)
    catalog.check_alive()  # the leases of a disk that was unmounted look like none
    return life


def require_newest(catalog: Catalog, run: str, life: int) -> None:
    """Make sure that no newer life of the run has begun.

    Raises:
        SupersededError: one has.
        NotFoundError: this life has not begun here, or what says so was removed; its number could
            be given to another.
    """
    newest = newest_life(catalog, run)
    if newest > life:
        raise SupersededError(
            f"{_described(catalog, run, newest)}: life {life}, which this save belongs to, commits "
            "nothing any more",
            hint="end this process; two jobs must not share a run",
        )
    if newest < life:
        raise NotFoundError(
            f"there is no life {life} of run {run!r} in {catalog.uri}",
            hint="begin one with Store.begin_life, and leave the run's lives/ alone",
        )


def newest_life(catalog: Catalog, run: str) -> int:
    """The number of the run's newest life, 0 when none has begun; names are listed, none is read.

    Whatever has the name of a life counts, readable or not: its number is taken.
    """
    listed = catalog.backend.list(RunKeys(run).lives)
    numbers = [n for e in listed if (n := life_number(e.key.rpartition("/")[2])) is not None]
    if not numbers:
        catalog.check_alive()
    return max(numbers, default=0)


def _create(catalog: Catalog, run: str) -> Life:
    """The document of a new life, under a number that nobody else has."""
    keys = RunKeys(run)
    writer, process = writer_here(random_letters()), process_here()
    number = 0
    while True:
        # Also above a number that was found taken and that the listing does not show yet.
        number = max(number, newest_life(catalog, run)) + 1
        if number >= LIFE_LIMIT:
            raise ConflictError(f"run {run!r} in {catalog.uri} has used up its numbers of lives")
        life = Life(run=run, life=number, created=timestamp(), writer=writer, process=process)
        if catalog.create_document(keys.life(number), document.encode(life)):
            catalog.backend.sync([keys.lives, run, ""])  # someone else may have made these just now
            return life


def _is_older(catalog: Catalog, held: HeldLease, life: Life) -> bool:
    lease = held.lease
    if lease is None:
        # It has gone since it was listed, with the end of its save; or it is damaged, and then
        # nothing says that it is not an older life's.
        return catalog.backend.stat(held.key) is not None
    return lease.life is not None and lease.life < life.life


def _give_up(catalog: Catalog, held: HeldLease, life: Life, now: float) -> None:
    """Make sure that an older life's save never commits; a commit that is there already stands."""
    run, name = life.run, held.name
    reason = f"life {life.life} of the run has begun"
    # A delete writes its trash record before it removes the record, so what is looked for in this
    # order and has neither was never committed.
    if catalog.find(run, name) is None and _is_trashed(catalog, run, name):
        return
    if not ensure_void(catalog, run, name, reason):
        return
    log.info("the unfinished save %s@%s is given up: %s", run, name, reason)
    if is_live(held, now):  # its process may be writing files: they are left to gc
        return
    try:
        if not _is_trashed(catalog, run, name):  # with the void in place nothing more gets there
            discard(catalog, run, name, reason)
            catalog.backend.delete([held.key])
    except CkptError as error:  # what stays is not visible, and gc will find it
        log.warning("files of %s@%s were not removed: %s", run, name, error)


def _is_trashed(catalog: Catalog, run: str, name: Name) -> bool:
    """Whether it was committed, and deleted since: then its files have a grace period."""
    return catalog.backend.stat(RunKeys(run).trash_record(name)) is not None


def _described(catalog: Catalog, run: str, number: int) -> str:
    """A life for people: which, where and since when."""
    key = RunKeys(run).life(number)
    try:
        data = catalog.backend.read(key, document.SIZE_LIMIT)
        life = decode_life(data, run, number, key)
    except CkptError as error:  # that it is there is enough
        return f"life {number} of run {run!r} has begun ({error})"
    host = printable(life.writer.host)
    began = printable(life.created)
    return f"life {number} of run {run!r} began on {host} (process {life.writer.pid}) at {began}"
