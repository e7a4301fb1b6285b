"""Deleting: into the trash, back out of it, and for good.

A deleted checkpoint loses its record and keeps its files until its grace period has ended; a trash
record keeps what the record was. Every step is safe against every other actor at every moment:

- the trash record stands before the record goes, so nothing is ever without either;
- the record is removed only while it still is that commit;
- ``undelete`` creates the record exclusively, ``purge`` creates a void there exclusively: one of
  the two happens, never both.
"""

from __future__ import annotations

import logging

from ckptstore import document
from ckptstore.catalog import Catalog
from ckptstore.durations import LONGEST
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    UsageError,
    printable,
)
from ckptstore.ids import random_letters
from ckptstore.layout import Name, RunKeys
from ckptstore.marks import standing
from ckptstore.reading import Checkpoint
from ckptstore.records import Commit, Trash, decode_record, timestamp, writer_here
from ckptstore.runview import RunView
from ckptstore.voiding import discard, ensure_void

log = logging.getLogger(__name__)

DEFAULT_GRACE = 24 * 3600.0
"""Seconds that a deleted checkpoint can be brought back."""


def delete(
    catalog: Catalog,
    checkpoint: Checkpoint,
    *,
    grace: float = DEFAULT_GRACE,
    force: bool = False,
    even_owed: bool = False,
    reason: str = "deleted by hand",
) -> None:
    """Move a checkpoint to the trash.

    Args:
        catalog: The store.
        checkpoint: What to delete.
        grace: Seconds until gc may remove its files.
        force: Also when it is the newest, the best or the last verified one, or a mirror lacks it.
            A pin always holds.
        even_owed: Also when a mirror lacks it.
        reason: Kept in the trash record.

    Raises:
        ConflictError: a guard holds, or someone else deleted it meanwhile.
    """
    if not 0 <= grace <= LONGEST:
        raise UsageError(f"a grace period of {grace} seconds cannot be")
    catalog.require_deletable()
    run, name = checkpoint.run, checkpoint.name
    keys = RunKeys(run)
    found = catalog.find(run, name)
    if found is None or found.is_void:
        raise NotFoundError(f"{checkpoint.ref} is not there any more")
    if found.commit is None:
        raise IntegrityError(
            f"{checkpoint.ref} is not deleted: {found.problem}",
            hint="a record that cannot be read protects its checkpoint",
        )
    check_guards(catalog, checkpoint, force, even_owed=even_owed)
    trash = _put_trash(catalog, run, name, found.data, grace, reason)
    try:
        # A pin may have come since the first look.
        check_guards(catalog, checkpoint, force, even_owed=even_owed)
    except ConflictError:
        catalog.backend.remove_if(keys.trash_record(name), trash)
        if catalog.find(run, name) is None:
            # Another delete removed the record between the two, and may have died since.
            _put_trash(catalog, run, name, found.data, grace, reason)
        raise
    if not catalog.backend.remove_if(keys.record(name), found.data):
        raise ConflictError(f"{checkpoint.ref} was deleted by someone else at the same time")
    # Written anew: whoever judged the first one to be a leftover beside a commit removes only that.
    _put_trash(catalog, run, name, found.data, grace, reason)
    refresh_hint(catalog, run)


def _put_trash(
    catalog: Catalog, run: str, name: Name, record: bytes, grace: float, reason: str
) -> bytes:
    """Write a trash record; no two have the same bytes."""
    trash = document.encode(
        Trash(
            name=str(name),
            run=run,
            record=record.decode(),
            grace=grace,
            created=timestamp(),
            writer=writer_here(random_letters()),
            reason=reason,
        )
    )
    keys = RunKeys(run)
    catalog.backend.put(keys.trash_record(name), trash)
    catalog.backend.sync([keys.trash, run])
    return trash


def check_guards(
    catalog: Catalog, checkpoint: Checkpoint, force: bool, *, even_owed: bool = False
) -> None:
    """Refuse to delete what is guarded; ``force`` overrides all guards but a pin.

    A checkpoint that a mirror lacks is guarded too, unless ``even_owed`` says that it may go.

    Raises:
        ConflictError: a guard holds.
    """
    view = RunView.of(catalog, checkpoint.run, owed=not (force or even_owed))
    standing = view.standing(checkpoint.name)
    if standing.pinned:
        raise ConflictError(
            f"{checkpoint.ref} is pinned",
            hint=f"ckpt pin --remove {checkpoint.ref} --store {catalog.uri}",
        )
    if standing.unreadable:
        raise ConflictError(
            f"{checkpoint.ref} has a mark that cannot be read and may be a pin: "
            f"{printable(standing.unreadable[0])}",
            hint="look at it; if it is of no use, remove that file by hand",
        )
    guards = view.guards(checkpoint.name)
    guards += [f"it is owed to {uri}, which lacks it" for uri in view.owed_to(checkpoint.name)]
    if guards and not force:
        raise ConflictError(
            f"{checkpoint.ref} is kept: {', and '.join(guards)}",
            hint="delete it all the same with --force",
        )


def undelete(catalog: Catalog, run: str, name: Name) -> Checkpoint:
    """Bring a deleted checkpoint back.

    Raises:
        NotFoundError: it is not in the trash, or its grace period ended and gc removed it.
        ConflictError: it is not deleted.
        IntegrityError: its trash record or its files are damaged; everything stays as it is.
    """
    catalog.require_writable()
    keys = RunKeys(run)
    trash, trash_data = catalog.find_trash(run, name)
    if trash is None:
        raise NotFoundError(
            f"{run}@{name} is not in the trash",
            hint=f"what is: ckpt list {catalog.uri} {run} --all",
        )
    _check_undeletable(catalog, run, name)
    data = trash.record.encode()
    commit = decode_record(data, run, name, f"the record in the trash of {run}@{name}")
    if not isinstance(commit, Commit):
        raise IntegrityError(f"the trash of {run}@{name} holds no commit")
    checkpoint = Checkpoint(catalog, run, commit)
    damage = checkpoint.quick_check()
    if damage:
        _check_undeletable(catalog, run, name)  # is a purge at work on it?
        raise checkpoint.damaged_error(damage)
    if not catalog.create_document(keys.record(name), data):
        _check_undeletable(catalog, run, name)
        raise ConflictError(f"{run}@{name} is being deleted")
    catalog.backend.remove_if(keys.trash_record(name), trash_data)  # not one of a later delete
    refresh_hint(catalog, run)
    return checkpoint


def _check_undeletable(catalog: Catalog, run: str, name: Name) -> None:
    """Refuse what has a record: a commit is not deleted, a void was removed for good."""
    found = catalog.find(run, name)
    if found is None:
        return
    if found.is_void:
        raise NotFoundError(f"{run}@{name} has been removed for good: its grace period had ended")
    raise ConflictError(f"{run}@{name} is not deleted")


def purge(catalog: Catalog, run: str, name: Name, trash: bytes, reason: str) -> bool:
    """Remove a trashed checkpoint for good.

    Args:
        catalog: The store.
        run, name: Which one.
        trash: Its trash record, as it was when its time was found to be over.
        reason: Kept in the void.

    Returns:
        Whether its files were removed; ``False`` when it was undeleted, deleted anew or pinned
        meanwhile: the trash record stays then, for a delete may be at work on it.
    """
    key = RunKeys(run).trash_record(name)
    if catalog.find_trash(run, name)[1] != trash:
        return False
    void = ensure_void(catalog, run, name, reason)
    if not void:
        return False
    if void.created and (
        catalog.find_trash(run, name)[1] not in (trash, b"") or _may_be_pinned(catalog, run, name)
    ):
        # Undeleted and deleted anew since the look before the void, or pinned while the delete was
        # at work. Nothing is removed yet, so the void that was created here can go.
        catalog.backend.remove_if(RunKeys(run).record(name), void.data)
        return False
    discard(catalog, run, name, reason)
    catalog.backend.delete([key])
    return True


def _may_be_pinned(catalog: Catalog, run: str, name: Name) -> bool:
    now = standing(catalog, run, name)
    return now.pinned or bool(now.unreadable)


def refresh_hint(catalog: Catalog, run: str) -> None:
    """Let ``latest`` name the run's newest commit. It is for people only, so failing is no harm."""
    try:
        newest = catalog.newest(run)
        if newest is not None:
            catalog.backend.set_hint(RunKeys(run).latest, str(newest.name))
        else:
            catalog.backend.delete([RunKeys(run).latest])
    except CkptError as error:
        log.warning("the hint %s was not renewed: %s", RunKeys(run).latest, error)
