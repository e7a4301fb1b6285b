"""Voids: the one way to delete from a checkpoint's directory.

Whoever is about to delete there (gc, the purge of trash, a save that failed or takes over from a
dead one) first creates a void at the commit key. Creation is exclusive, so either the commit was
there first, and nothing is deleted; or the void was, and no commit can ever come: a writer that
slept for a day, or whose request was delayed in the network, finds the void and fails.
Voids stay. They also tell mirrors what must not be copied back.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore import document
from ckptstore.catalog import Catalog
from ckptstore.ids import random_letters
from ckptstore.layout import Name, RunKeys
from ckptstore.manifest import FORMAT
from ckptstore.records import Void, timestamp, writer_here


@dataclass(frozen=True)
class StandingVoid:
    """What stands at a commit key after :func:`ensure_void`; true when it is a void.

    Attributes:
        data: The void; empty when a commit, or something that cannot be read, stands there.
        created: Whether this call created it.
    """

    data: bytes = b""
    created: bool = False

    def __bool__(self) -> bool:
        return bool(self.data)


def ensure_void(catalog: Catalog, run: str, name: Name, reason: str) -> StandingVoid:
    """Make sure that ``name`` can never be committed.

    Returns:
        The void that stands at the commit key now. If it is false, nothing of the checkpoint may
        be deleted.
    """
    marker = catalog.require_deletable()
    void = Void(
        format=FORMAT,
        name=str(name),
        run=run,
        step=name.step,
        seq=name.seq,
        store=marker.store,
        created=timestamp(),
        writer=writer_here(random_letters()),
        reason=reason,
    )
    data = document.encode(void)
    if catalog.create_document(RunKeys(run).record(name), data):
        return StandingVoid(data, created=True)
    found = catalog.find(run, name)
    return StandingVoid(found.data) if found is not None and found.is_void else StandingVoid()


def discard(catalog: Catalog, run: str, name: Name, reason: str) -> bool:
    """Give up ``name`` for good and remove its directory and marks.

    Returns:
        Whether that was done; ``False`` when it is committed, and then nothing was touched.
    """
    if not ensure_void(catalog, run, name, reason):
        return False
    keys = RunKeys(run)
    catalog.backend.remove_tree(keys.directory(name))
    catalog.backend.remove_tree(keys.marks_of(name))
    return True
