"""Verification: is every stored byte what the record says it must be?"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptstore.errors import CkptError, Damage, NotFoundError
from ckptstore.layout import MANIFEST, Name, RunKeys
from ckptstore.listing import RECORD_LOST, ref_of
from ckptstore.marks import Standing, note_verified
from ckptstore.reading import Checkpoint
from ckptstore.runview import RunView
from ckptstore.store import Store
from ckptstore.transfer import Mover, OnMismatch, ProgressCallback

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckResult:
    """What a verification found.

    Attributes:
        ref, run, name: Which checkpoint.
        checked_bytes: Bytes whose digests were compared.
        damage: What is not as it must be.
        extra: Files in its directory that the manifest does not name; they are never read.
    """

    ref: str
    run: str
    name: str
    checked_bytes: int
    damage: tuple[Damage, ...]
    extra: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


def verify(
    checkpoint: Checkpoint,
    *,
    deep: bool = False,
    checksums: bool = True,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> CheckResult:
    """Verify a checkpoint, and leave a mark of the outcome where the store can be written.

    Args:
        checkpoint: What to verify.
        deep: Read every byte; otherwise manifest, presence, sizes and stored checksums are
            checked, and damage of content that was found earlier still counts.
        checksums: Without ``deep``: compare the checksums that the storage keeps, where it keeps
            any; that is a request for each file.
        threads: Blocks in flight.
        progress: Told of every block read.
        cancel: Set it to end the verification.

    Raises:
        CkptError: the storage could not be read. Damage is no exception: it is in the result.
        CancelledError: ``cancel`` was set; no mark was left.
    """
    damage, checked = checkpoint.quick_check(), 0
    if any(d.path == MANIFEST for d in damage):
        _leave_damage(checkpoint, damage, deep=deep, whole=deep)
    elif deep:
        damage, checked = find_damage(checkpoint, threads=threads, progress=progress, cancel=cancel)
        _leave_damage(checkpoint, damage, deep=True, whole=True)
    else:
        _leave_damage(checkpoint, damage, deep=False)
        differing = checkpoint.checksum_check() if checksums else ()
        # Only a look at content ends this: another one at sizes proves nothing against it.
        _leave_damage(checkpoint, differing, deep=True)
        damage += tuple(d for d in differing if d.path not in {e.path for e in damage})
        known = {d.path for d in damage}
        damage += tuple(
            Damage(note.path, note.offset, note.length, note.reason)
            for note in checkpoint.standing.content_damage
            if note.path not in known
        )
    if not damage:
        _leave_verified(checkpoint, checked, deep=deep)
    return CheckResult(
        checkpoint.ref,
        checkpoint.run,
        str(checkpoint.name),
        checked,
        damage,
        _extra(checkpoint) if not damage else (),
    )


def find_damage(
    checkpoint: Checkpoint,
    *,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> tuple[tuple[Damage, ...], int]:
    """Read every byte of a checkpoint whose manifest is good; no mark is left.

    Returns:
        What is damaged, and how many bytes were compared.
    """
    transfers = [checkpoint.transfer(entry) for entry in checkpoint.files]
    threads = threads or checkpoint.catalog.backend.capabilities.threads
    mover = Mover(threads=threads, progress=progress, cancel=cancel)
    moved = mover.run(transfers, OnMismatch.COLLECT)
    checked = sum(e.size for e, m in zip(checkpoint.files, moved, strict=True) if m.entry)
    return tuple(d for m in moved for d in m.damage), checked


def _extra(checkpoint: Checkpoint) -> tuple[str, ...]:
    root = RunKeys(checkpoint.run).directory(checkpoint.name)
    known = {e.path for e in checkpoint.files} | {MANIFEST}
    listed = checkpoint.catalog.backend.list(root, recursive=True)
    paths = (e.key[len(root) + 1 :] for e in listed)
    return tuple(sorted(p for p in paths if p not in known))


def _leave_damage(
    checkpoint: Checkpoint, damage: tuple[Damage, ...], *, deep: bool, whole: bool = False
) -> None:
    if damage:
        checkpoint.report_damage(damage, deep=deep, whole=whole)


def _leave_verified(checkpoint: Checkpoint, checked: int, *, deep: bool) -> None:
    try:
        note_verified(checkpoint.catalog, checkpoint.run, checkpoint.name, checked, deep=deep)
    except CkptError as error:  # a store that can only be read can still be verified
        log.warning("that %s is intact was not noted in the store: %s", checkpoint.ref, error)


@dataclass(frozen=True)
class Look:
    """One look at a run: what there is to verify, and what is wrong before anything is read.

    Attributes:
        checkpoints: The readable commits, in order of saving.
        problems: Of each name whose record is lost or cannot be read.
    """

    checkpoints: Sequence[Checkpoint]
    problems: Sequence[CheckResult]


def look_at(store: Store, run: str) -> Look:
    """Look at a run now.

    Raises:
        NotFoundError: there is no such store.
    """
    catalog = store.catalog
    directories = catalog.directories(run)
    leases = catalog.leases(run)
    view = RunView.of(catalog, run)
    lost = catalog.lost_records(run, directories, leases, view.names)
    problems = dict.fromkeys(lost, RECORD_LOST)
    problems |= {f.name: str(f.problem) for f in view.found if f.commit is None}
    newest = {f.name.step: f.name for f in view.found}
    return Look(
        [
            Checkpoint(
                catalog,
                run,
                commit,
                ref=ref_of(run, name, newest),
                standing=view.standing(name),
            )
            for name, commit in view.commits
        ],
        [
            CheckResult(
                f"{run}@{name}",
                run,
                str(name),
                0,
                (Damage(f"commits/{name}.json", 0, 0, reason),),
            )
            for name, reason in problems.items()
        ],
    )


def with_bad_marks(result: CheckResult, standing: Standing) -> CheckResult:
    """The result with the marks that cannot be read: they are damage, though not of content."""
    bad = tuple(
        Damage(key.partition("/")[2], 0, 0, "the mark is damaged") for key in standing.unreadable
    )
    return replace(result, damage=result.damage + bad)


def verify_run(
    store: Store,
    run: str,
    *,
    deep: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Iterator[CheckResult]:
    """Verify every commit of a run, records that cannot be read and marks included."""
    look = look_at(store, run)
    problems = {r.name: r for r in look.problems}
    checkpoints = {str(c.name): c for c in look.checkpoints}
    names = {n: Name.parse(n) for n in (*problems, *checkpoints)}
    for name in sorted(names, key=lambda n: names[n] or ()):
        if name in problems:
            yield problems[name]
            continue
        checkpoint = checkpoints[name]
        before = checkpoint.standing
        try:
            result = verify(
                checkpoint, deep=deep, threads=threads, progress=progress, cancel=cancel
            )
        except NotFoundError:  # deleted meanwhile
            continue
        yield with_bad_marks(result, before)
