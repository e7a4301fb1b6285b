"""Verification: is every stored byte what the record says it must be?"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ckptstore.errors import CkptError, Damage, NotFoundError
from ckptstore.layout import MANIFEST, RunKeys
from ckptstore.listing import RECORD_LOST, ref_of
from ckptstore.marks import note_verified
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
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> CheckResult:
    """Verify a checkpoint, and leave a mark of the outcome where the store can be written.

    Args:
        checkpoint: What to verify.
        deep: Read every byte; otherwise manifest, presence and sizes are checked, and damage that
            an earlier reading found still counts.
        threads: Blocks in flight.
        progress: Told of every block read.
        cancel: Set it to end the verification.

    Raises:
        CkptError: the storage could not be read. Damage is no exception: it is in the result.
    """
    damage = list(checkpoint.quick_check())
    checked = 0
    if deep and not any(d.path == MANIFEST for d in damage):
        transfers = [checkpoint.transfer(entry) for entry in checkpoint.files]
        threads = threads or checkpoint.catalog.backend.capabilities.threads
        mover = Mover(threads=threads, progress=progress, cancel=cancel)
        moved = mover.run(transfers, OnMismatch.COLLECT)
        damage = [d for m in moved for d in m.damage]
        checked = sum(e.size for e, m in zip(checkpoint.files, moved, strict=True) if m.entry)
    elif not damage:  # sizes prove nothing against what a look at the content has found
        damage = [
            Damage(note.path, note.offset, note.length, note.reason)
            for note in checkpoint.standing.content_damage
        ]
    result = CheckResult(
        checkpoint.ref,
        checkpoint.run,
        str(checkpoint.name),
        checked,
        tuple(damage),
        _extra(checkpoint) if not damage else (),
    )
    _leave_mark(checkpoint, result, deep)
    return result


def _extra(checkpoint: Checkpoint) -> tuple[str, ...]:
    root = RunKeys(checkpoint.run).directory(checkpoint.name)
    known = {e.path for e in checkpoint.files} | {MANIFEST}
    listed = checkpoint.catalog.backend.list(root, recursive=True)
    paths = (e.key[len(root) + 1 :] for e in listed)
    return tuple(sorted(p for p in paths if p not in known))


def _leave_mark(checkpoint: Checkpoint, result: CheckResult, deep: bool) -> None:
    if not result.ok:
        checkpoint.report_damage(result.damage, deep=deep)
        return
    try:
        note_verified(
            checkpoint.catalog, checkpoint.run, checkpoint.name, result.checked_bytes, deep=deep
        )
    except CkptError as error:  # a store that can only be read can still be verified
        log.warning("that %s is intact was not noted in the store: %s", result.ref, error)


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
    catalog = store.catalog
    directories = catalog.directories(run)
    leases = catalog.leases(run)
    view = RunView.of(catalog, run)
    for name in catalog.lost_records(run, directories, leases, view.names):
        damage = Damage(f"commits/{name}.json", 0, 0, RECORD_LOST)
        yield CheckResult(f"{run}@{name}", run, str(name), 0, (damage,))
    newest = {f.name.step: f.name for f in view.found}
    for found in view.found:
        if found.is_void:
            continue
        if found.commit is None:
            key = f"commits/{found.name}.json"
            damage = Damage(key, 0, 0, str(found.problem))
            yield CheckResult(f"{run}@{found.name}", run, str(found.name), 0, (damage,))
            continue
        checkpoint = Checkpoint(catalog, run, found.commit, ref=ref_of(run, found.name, newest))
        try:
            result = verify(
                checkpoint, deep=deep, threads=threads, progress=progress, cancel=cancel
            )
        except NotFoundError:  # deleted meanwhile
            continue
        bad_marks = tuple(
            Damage(key.partition("/")[2], 0, 0, "the mark is damaged")
            for key in view.standing(found.name).unreadable
        )
        yield CheckResult(
            result.ref,
            run,
            result.name,
            result.checked_bytes,
            result.damage + bad_marks,
            result.extra,
        )
