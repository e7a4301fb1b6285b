"""Which checkpoint a resume takes, and why newer ones were passed over."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore.advice import repair_command
from ckptstore.catalog import Found
from ckptstore.errors import IntegrityError, NotFoundError
from ckptstore.layout import Name
from ckptstore.maintenance.verify import verify
from ckptstore.reading import Checkpoint
from ckptstore.store import Store
from ckptstore.transfer import ProgressCallback
from ckptstore.uri import Ref


@dataclass(frozen=True)
class PassedOver:
    """A newer checkpoint that a resume does not take.

    Attributes:
        name: Which one.
        reason: Why not, for people.
        repair: The command that repairs it; ``None`` when it is not damaged.
    """

    name: Name
    reason: str
    repair: str | None = None

    def __str__(self) -> str:
        return f"{self.reason} (repair it: {self.repair})" if self.repair else self.reason


@dataclass(frozen=True)
class ResumePlan:
    """What a resume would do.

    Attributes:
        run: The run.
        chosen: The newest intact commit; ``None`` when there is none.
        passed_over: What is newer than it, newest first.
        commits: How many commits were looked at: all of the run's, when none is intact.
    """

    run: str
    chosen: Checkpoint | None
    passed_over: tuple[PassedOver, ...]
    commits: int

    def require(self) -> Checkpoint:
        """The chosen checkpoint.

        Raises:
            NotFoundError: the run has no commit at all.
            IntegrityError: it has commits, and none is intact. Whoever resumes must not start from
                scratch then.
        """
        if self.chosen is not None:
            return self.chosen
        if self.commits == 0:
            raise NotFoundError(f"run {self.run!r} has no checkpoint")
        first = self.passed_over[0]
        repair = f"repair it: {first.repair}; or " if first.repair is not None else ""
        raise IntegrityError(
            f"run {self.run!r} has {self.commits} checkpoint(s) and none is intact; "
            f"the newest, {first.name}: {first.reason}",
            hint=f"{repair}look at each: ckpt verify {self.run}@{first.name} --deep",
        )


def plan_resume(
    store: Store,
    run: str,
    *,
    deep: bool = False,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    refused: Mapping[Name, str] | None = None,
) -> ResumePlan:
    """Find the newest intact commit of a run, by the order of saving and never by step.

    Intact means: the record and the manifest are right, every file is there with its size, and
    nothing found the content damaged. Content itself is read only with ``deep``; a load verifies
    what it reads anyway, and falls back the same way.

    Args:
        store: The store.
        run: The run.
        deep: Read all of each candidate.
        progress: Told of every block read.
        cancel: Set it to end the search.
        refused: Checkpoints that a load has found damaged, and how: they are passed over.

    Raises:
        NotFoundError: there is no such store or run.
    """
    catalog = store.catalog
    catalog.require_run(run)
    # In this order a save that commits meanwhile is seen as committed, or not at all.
    unfinished = set(catalog.directories(run))
    leases = catalog.leases(run)
    records = set(catalog.record_names(run))
    lost = set(catalog.lost_records(run, unfinished, leases, records))
    trashed = set(catalog.trash_names(run))
    passed: list[PassedOver] = []
    commits = 0
    for name in sorted(records | (unfinished - trashed), reverse=True):
        found = catalog.find(run, name) if name in records else None
        if found is not None and not found.is_void:
            commits += 1
            if refused is not None and name in refused:
                passed.append(_damaged(store, run, name, refused[name]))
                continue
            checkpoint, reason = _judge(store, run, found, deep, progress, cancel)
            if reason is None:
                return ResumePlan(run, checkpoint, tuple(passed), commits)
            passed.append(_damaged(store, run, name, reason))
        elif name in lost:
            commits += 1
            passed.append(_damaged(store, run, name, "has lost its record"))
        elif name in unfinished:
            passed.append(PassedOver(name, "was never committed"))
    return ResumePlan(run, None, tuple(passed), commits)


def plan_from(store: Store, ref: Ref, *, deep: bool = False) -> ResumePlan:
    """The plan for a REF: ``RUN@latest`` falls back to older ones, anything else names just one.

    Raises:
        NotFoundError: there is no such store, run or checkpoint.
    """
    if ref.selector in (None, "latest"):
        return plan_resume(store, ref.run, deep=deep)
    checkpoint = store.resolve(ref)
    found = Found(checkpoint.name, checkpoint.commit)
    _, reason = _judge(store, ref.run, found, deep, None, None)
    if reason is None:
        return ResumePlan(ref.run, checkpoint, (), 1)
    passed = (_damaged(store, ref.run, checkpoint.name, reason),)
    return ResumePlan(ref.run, None, passed, 1)


def _damaged(store: Store, run: str, name: Name, reason: str) -> PassedOver:
    """One that a repair may bring back; not what was deleted meanwhile."""
    if reason == _DELETED:
        return PassedOver(name, reason)
    return PassedOver(name, reason, repair_command(store.catalog, f"{run}@{name}"))


_DELETED = "was deleted meanwhile"


def _judge(
    store: Store,
    run: str,
    found: Found,
    deep: bool,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> tuple[Checkpoint | None, str | None]:
    """The checkpoint, and why it cannot be resumed from (``None`` when it can)."""
    if found.commit is None:
        return None, str(found.problem)
    checkpoint = store.checkpoint_of(run, found)
    if checkpoint.standing.damaged and not deep:
        notes = checkpoint.standing.damage
        return None, f"damaged: {notes[0].path}: {notes[0].reason}" if notes else "damaged"
    try:
        result = verify(checkpoint, deep=deep, checksums=False, progress=progress, cancel=cancel)
    except NotFoundError:
        return None, _DELETED
    if result.ok:
        return checkpoint, None
    return None, f"damaged: {result.damage[0]}"
