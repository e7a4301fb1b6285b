"""How a store stands: what it holds, what only it holds, what its mirrors lack, how long it lasts.

Nothing is changed, and each record is read once. What a mirror holds is asked of the mirror itself;
of one that does not answer it is what the store has noted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ckptstore import mirrors
from ckptstore.catalog import Catalog, HeldLease
from ckptstore.layout import Name, check_run
from ckptstore.leases import is_copy, is_live, store_time
from ckptstore.listing import ref_of
from ckptstore.maintenance.mirrorstatus import (
    ASK_SECONDS,
    Answer,
    Loss,
    MirrorStatus,
    RunMirror,
    ask_all,
    loss_of,
    run_mirror,
)
from ckptstore.mirrors import Mirror
from ckptstore.records import Commit, moment
from ckptstore.room import stored_size, trashed
from ckptstore.runview import RunView
from ckptstore.store import Store

_RECENT = 21
"""Growth is computed from the newest so many commits."""

_IDLE_INTERVALS = 10
"""A run that has not saved for so many of its intervals does not grow any more."""


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint of a run that is not known to be damaged.

    Attributes:
        ref, name, step, size: Which one.
        created: When it was saved, by its writer's clock.
        age: Seconds since then by this host's clock; ``None`` when ``created`` is no time.
    """

    ref: str
    name: Name
    step: int
    created: str
    size: int
    age: float | None


@dataclass(frozen=True)
class Verified:
    """The last time that every byte of a checkpoint was found right.

    Attributes:
        ref: Which one.
        at: When, by the verifier's clock.
    """

    ref: str
    at: str


@dataclass(frozen=True)
class Held:
    """Directories that are no checkpoints.

    Attributes:
        count: How many.
        bytes: Bytes in them.
    """

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.count + other.count, self.bytes + other.bytes)


@dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Attributes:
        run: Which one.
        newest: Its newest checkpoint; ``None`` when it has no intact one.
        checkpoints: How many it has, damaged ones included.
        bytes: Sum of their sizes; what several of them share (hard links) is counted in each.
        damaged: REFs of those that are known to be damaged.
        growth: Bytes a second at which it is saved, if nothing is deleted; 0 for a run that has
            stopped, ``None`` when too few saves tell.
        verified: The last verification.
        trash: What lies in the trash.
        unfinished: Saves that are being written, and copies that a mirror has begun.
        orphans: What dead saves left.
        mirrors: How far each of its mirrors is.
        loss: What would be lost if the store died now.
    """

    run: str
    newest: Newest | None
    checkpoints: int
    bytes: int
    damaged: tuple[str, ...]
    growth: float | None
    verified: Verified | None
    trash: Held
    unfinished: Held
    orphans: Held
    mirrors: tuple[RunMirror, ...]
    loss: Loss


@dataclass(frozen=True)
class StoreStatus:
    """How a store stands.

    Attributes:
        uri, id: Which one.
        at: When this was found out, in seconds since 1970.
        free: Bytes that can still be stored; ``None`` where that is unknown or has no limit.
        mirrors: Its mirrors.
        runs: Its runs (the one that was asked for).
    """

    uri: str
    id: str
    at: float
    free: int | None
    mirrors: tuple[MirrorStatus, ...]
    runs: tuple[RunStatus, ...]

    @property
    def growth(self) -> float | None:
        """Bytes a second of its runs together; ``None`` when none of them tells."""
        known = [r.growth for r in self.runs if r.growth is not None]
        return sum(known) if known else None

    @property
    def full_in(self) -> float | None:
        """Seconds until it is full if all goes on like this and nothing is deleted."""
        if self.free is None or not self.growth:
            return None
        return self.free / self.growth


def status(
    store: Store, run: str | None = None, *, ask: bool = True, seconds: float = ASK_SECONDS
) -> StoreStatus:
    """How a store and its mirrors stand.

    Args:
        store: The store.
        run: Only this run; growth and the time until the store is full are those of this run.
        ask: Ask the mirrors themselves. One that cannot be reached is no error here.
        seconds: How long the mirrors have to answer, all at once.

    Raises:
        NotFoundError: there is no such store or run.
        CkptError: the store could not be read.
    """
    catalog = store.catalog
    if run is not None:
        catalog.require_run(check_run(run))
    runs = [run] if run is not None else catalog.runs()
    known = mirrors.known_mirrors(catalog)
    views = [_Looked.at(catalog, one) for one in runs]
    newest = {looked.run: looked.view.newest for looked in views}
    answers = ask_all(known, store.id, newest, seconds) if ask else {}
    found = tuple(_run_status(catalog, looked, known, answers) for looked in views)
    return StoreStatus(
        uri=store.uri,
        id=store.id,
        at=time.time(),
        free=store.backend.free_space(),
        mirrors=tuple(MirrorStatus.of(m, answers.get(m.id)) for m in known),
        runs=found,
    )


@dataclass(frozen=True)
class _Looked:
    """What a run has, listed in the order that tells a live save from a dead one."""

    run: str
    directories: Sequence[Name]
    leases: Sequence[HeldLease]
    view: RunView
    trash: frozenset[Name]
    lost: Sequence[Name]

    @classmethod
    def at(cls, catalog: Catalog, run: str) -> _Looked:
        directories = catalog.directories(run)
        leases = catalog.leases(run)
        view = RunView.of(catalog, run)
        lost = catalog.lost_records(run, directories, leases, view.names)
        return cls(run, directories, leases, view, frozenset(catalog.trash_names(run)), lost)


def _run_status(
    catalog: Catalog, looked: _Looked, known: Sequence[Mirror], answers: dict[str, Answer]
) -> RunStatus:
    run, view = looked.run, looked.view
    intact = {n: c for n, c in view.commits if not view.standing(n).damaged}
    latest = {f.name.step: f.name for f in view.found}
    bad = [f.name for f in view.found if f.name not in intact] + list(looked.lost)
    reached = tuple(
        run_mirror(catalog, m, run, intact, answers.get(m.id)) for m in known if m.wants(run)
    )
    trash, unfinished, orphans = _others(catalog, looked)
    newest = view.newest
    return RunStatus(
        run=run,
        newest=_newest(run, newest, intact[newest], latest) if newest is not None else None,
        checkpoints=len(view.found) + len(looked.lost),
        bytes=sum(c.size for _, c in view.commits)
        + sum(stored_size(catalog, run, n) for n in looked.lost),
        damaged=tuple(ref_of(run, n, latest) for n in sorted(bad)),
        growth=growth_of([c for _, c in view.commits], time.time()),
        verified=_verified(run, view, latest),
        trash=trash,
        unfinished=unfinished,
        orphans=orphans,
        mirrors=reached,
        loss=loss_of(intact, reached),
    )


def _newest(run: str, name: Name, commit: Commit, latest: dict[int, Name]) -> Newest:
    saved = moment(commit.created)
    return Newest(
        ref=ref_of(run, name, latest),
        name=name,
        step=commit.step,
        created=commit.created,
        size=commit.size,
        age=max(0.0, time.time() - saved) if saved is not None else None,
    )


def _verified(run: str, view: RunView, latest: dict[int, Name]) -> Verified | None:
    times = [(at, name) for name, _ in view.commits if (at := view.standing(name).verified)]
    if not times:
        return None
    at, name = max(times)
    return Verified(ref_of(run, name, latest), at)


def growth_of(commits: Sequence[Commit], now: float) -> float | None:
    """Bytes a second at which a run is saved; 0 when it has stopped, ``None`` when that is unknown.

    The median of the newest sizes over the median of the times between saves: a clock that jumped
    or a pause between two of them changes neither. What was deleted in between is seen by the
    sequence numbers.

    Args:
        commits: In order of saving.
        now: Seconds since 1970 by this host's clock.
    """
    newest = commits[-_RECENT:]
    times = [(c.seq, at) for c in newest if (at := moment(c.created)) is not None]
    pauses = [
        (later - earlier) / (seq - before)
        for (before, earlier), (seq, later) in pairwise(times)
        if seq > before and later > earlier
    ]
    if not pauses:
        return None
    pause = median(pauses)
    if now - times[-1][1] > _IDLE_INTERVALS * max(pause, times[-1][1] - times[-2][1]):
        return 0.0
    return median(c.size for c in newest) / pause


def _others(catalog: Catalog, looked: _Looked) -> tuple[Held, Held, Held]:
    """What the trash holds, what is being written, and what dead saves left."""
    run = looked.run
    committed = {f.name for f in looked.view.found}
    trash = unfinished = orphans = Held()
    for one in trashed(catalog, run, None) if looked.trash else ():
        if one.name not in committed:
            trash += Held(1, one.size)
    voided = set(looked.view.names) - committed
    now = store_time(catalog) if looked.leases else 0.0
    live = {held.name for held in looked.leases if is_live(held, now) or is_copy(held)} - voided
    known = committed | looked.trash | set(looked.lost)
    for name in looked.directories:
        if name in known:
            continue
        held = Held(1, stored_size(catalog, run, name))
        if name in live:
            unfinished += held
        else:
            orphans += held
    return trash, unfinished, orphans
