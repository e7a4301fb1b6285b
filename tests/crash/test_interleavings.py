"""A delete, an undelete, a purge and a gc at once, in every order of their operations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckptstore import deleting
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.catalog import Catalog
from ckptstore.ids import random_ids, seeded_ids
from ckptstore.layout import Name
from ckptstore.maintenance import gc
from ckptstore.manifest import decode_manifest
from ckptstore.reading import Checkpoint
from ckptstore.records import Commit, decode_record
from ckptstore.saving import Save
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.testing.schedules import Actor, Exploration, explore
from tests.conftest import FULL

NOW = 1_000_000.0
RUN = "r"


def world(*, trashed: bool = False) -> tuple[Space, Name]:
    """Two commits long ago; the older one is what the actors fight for."""
    space = Space()
    store = Store(MemoryBackend(space, clock=lambda: 0.0), ids=seeded_ids("world"))
    for step in (1, 2):
        with store.save(RUN, step) as save:
            save.add_bytes("a", b"a" * step)
            save.add_bytes("b/c", b"c" * step)
    name = store.get(RUN, step=1).name
    if trashed:
        store.delete(store.get(RUN, step=1), grace=0, force=True)
    return space, name


def committed_without_files(space: Space) -> str | None:
    """The invariant: whatever has a commit record has all of its files."""
    for key, (data, _) in space.objects.items():
        run, _, rest = key.partition("/commits/")
        name = Name.parse(rest.removesuffix(".json"))
        if name is None:
            continue
        record = decode_record(data, run, name, key)
        if not isinstance(record, Commit):
            continue
        manifest = space.objects.get(f"{run}/{name}/MANIFEST.json")
        if manifest is None:
            return f"{name} is committed and has no manifest"
        for entry in decode_manifest(manifest[0], record.manifest.digest, key).files:
            found = space.objects.get(f"{run}/{name}/{entry.path}")
            if found is None or len(found[0]) != entry.size:
                return f"{name} is committed and lacks {entry.path}"
    return None


def deleter(name: Name) -> Actor:
    def act(backend: HookedBackend) -> str:
        catalog = Catalog(backend, random_ids)
        found = catalog.find(RUN, name)
        if found is None or found.commit is None:
            return "nothing to delete"
        deleting.delete(catalog, Checkpoint(catalog, RUN, found.commit), grace=0, force=True)
        return "deleted"

    return act


def undeleter(name: Name) -> Actor:
    def act(backend: HookedBackend) -> str:
        deleting.undelete(Catalog(backend, random_ids), RUN, name)
        return "undeleted"

    return act


def purger(name: Name) -> Actor:
    def act(backend: HookedBackend) -> bool:
        return deleting.purge(Catalog(backend, random_ids), RUN, name, "test")

    return act


def collector(backend: HookedBackend) -> str:
    gc(Catalog(backend, random_ids), RUN, grace=0)
    return "collected"


def run(actors: Sequence[Actor], space: Space, limit: int | None) -> Exploration:
    return explore(
        space, actors, committed_without_files, clock=lambda: NOW, limit=None if FULL else limit
    )


@pytest.mark.parametrize("trashed", [False, True])
@pytest.mark.parametrize(
    "pair",
    [
        "delete undelete",
        "delete gc",
        "undelete gc",
        "undelete purge",
        "delete purge",
        "purge gc",
        "delete delete",
        "undelete undelete",
    ],
)
@pytest.mark.timeout(900)
def test_any_two_in_every_order_never_leave_a_commit_without_its_files(
    pair: str, trashed: bool
) -> None:
    space, name = world(trashed=trashed)
    makers = {
        "delete": deleter(name),
        "undelete": undeleter(name),
        "purge": purger(name),
        "gc": collector,
    }
    result = run([makers[kind] for kind in pair.split()], space, 800)
    assert result.complete or not FULL


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("trashed", [False, True])
@pytest.mark.timeout(900)
def test_all_four_in_sampled_orders_never_leave_a_commit_without_its_files(
    trashed: bool, seed: int
) -> None:
    space, name = world(trashed=trashed)
    actors = [deleter(name), undeleter(name), purger(name), collector]
    limit = 20_000 if FULL else 500
    result = explore(
        space, actors, committed_without_files, clock=lambda: NOW, limit=limit, seed=seed
    )
    assert result.states == limit or result.complete


def test_undelete_and_purge_end_with_exactly_one_winner() -> None:
    space, name = world(trashed=True)
    result = run([undeleter(name), purger(name)], space, None)
    undeleted = {outcome for outcome in result.outcomes if outcome[0] == "returned 'undeleted'"}
    assert undeleted
    assert all(outcome[1] == "returned False" for outcome in undeleted)
    lost = result.outcomes - undeleted
    assert lost
    assert all(outcome == ("ended with NotFoundError", "returned True") for outcome in lost)


@pytest.mark.timeout(900)
def test_a_slow_writer_and_gc_end_with_a_whole_commit_or_none() -> None:
    """The writer's lease and files are ancient by the store's clock when gc comes."""
    space, _ = world()
    save = Save(Catalog(MemoryBackend(space, clock=lambda: 0.0), seeded_ids("slow")), RUN, 3)
    save.add_bytes("a", b"late")
    name = save.name

    def writer(backend: HookedBackend) -> str:
        save._backend = backend
        save._catalog = Catalog(backend, random_ids)
        save._ended = False
        with save:
            pass
        return "committed"

    try:
        result = run([writer, collector], space, 600)
    finally:
        save._lease._ended.set()
    ends = {outcome[0] for outcome in result.outcomes}
    assert ends <= {"returned 'committed'", "ended with VoidedError"}
    assert len(ends) == 2, (name, ends)
