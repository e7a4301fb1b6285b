"""A delete, an undelete, a purge and a gc at once, in every order of their operations."""

from __future__ import annotations

import pytest

from ckptstore import deleting, marks
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.catalog import Catalog
from ckptstore.errors import ConflictError
from ckptstore.ids import random_ids, seeded_ids
from ckptstore.layout import Name, RunKeys
from ckptstore.maintenance import gc
from ckptstore.manifest import decode_manifest
from ckptstore.reading import Checkpoint
from ckptstore.records import Commit, decode_record
from ckptstore.saving import Save
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.testing.schedules import Actor, explore, sample
from ckptstore.uri import Ref
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


def something_is_lost(space: Space) -> str | None:
    """The invariants: what has a commit record has all of its files, and what has files and has
    been committed once has a record (a void while it is being removed) or a trash record."""
    for key in space.objects:
        run, _, rest = key.partition("/")
        name = Name.parse(rest.partition("/")[0])
        if name is None or name.step > 2:  # a save that is under way has a lease
            continue
        keys = RunKeys(run)
        if keys.record(name) not in space.objects and keys.trash_record(name) not in space.objects:
            return f"{name} has neither a record nor a trash record"
    return committed_without_files(space)


def committed_without_files(space: Space) -> str | None:
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
        catalog = Catalog(backend, random_ids)
        trash, data = catalog.find_trash(RUN, name)
        return trash is not None and deleting.purge(catalog, RUN, name, data, "test")

    return act


def collector(backend: HookedBackend) -> str:
    gc(Store(backend), RUN, grace=0)
    return "collected"


def now() -> float:
    return NOW


PAIRS = (
    ("delete undelete", False),
    ("delete undelete", True),
    ("delete gc", True),
    ("undelete gc", True),
    ("undelete purge", True),
    ("delete purge", False),
    ("purge gc", True),
    ("delete delete", False),
    ("undelete undelete", True),
)


@pytest.mark.parametrize(("pair", "trashed"), PAIRS)
@pytest.mark.timeout(300)
def test_any_two_in_every_order_never_leave_a_commit_without_its_files(
    pair: str, trashed: bool
) -> None:
    space, name = world(trashed=trashed)
    actors = makers(name)
    result = explore(space, [actors[kind] for kind in pair.split()], something_is_lost, clock=now)
    assert result.schedules > 1


@pytest.mark.skipif(not FULL, reason="4,000 states take half a minute: make test-full")
@pytest.mark.timeout(900)
def test_a_delete_and_a_gc_in_every_order() -> None:
    space, name = world()
    result = explore(space, [deleter(name), collector], something_is_lost, clock=now)
    assert result.states > 1000


@pytest.mark.parametrize("trashed", [False, True])
@pytest.mark.timeout(900)
def test_all_four_in_random_orders_never_leave_a_commit_without_its_files(trashed: bool) -> None:
    space, name = world(trashed=trashed)
    result = sample(
        space,
        list(makers(name).values()),
        something_is_lost,
        clock=now,
        runs=5000 if FULL else 400,
        seed=1,
    )
    assert len(result.outcomes) > 3, "the orders matter"


@pytest.mark.timeout(900)
def test_two_deletes_an_undelete_and_a_gc_in_random_orders() -> None:
    space, name = world()
    actors = [deleter(name), deleter(name), undeleter(name), collector]
    runs = 5000 if FULL else 300
    # Between the two steps of a second delete there may be neither record; it is alive, and what
    # it would leave if it died then is kept as a checkpoint that lost its record.
    result = sample(
        space,
        actors,
        committed_without_files,
        clock=now,
        runs=runs,
        seed=2,
        at_end=something_is_lost,
    )
    assert result.schedules == runs


def makers(name: Name) -> dict[str, Actor]:
    return {
        "delete": deleter(name),
        "undelete": undeleter(name),
        "purge": purger(name),
        "gc": collector,
    }


def test_what_was_pinned_while_it_was_deleted_is_not_purged() -> None:
    """The purge looked at the trash record, and for pins, before the record went."""
    space, name = world()
    keys = RunKeys(RUN)
    record = space.objects[keys.record(name)][0]
    deleting._put_trash(Catalog(MemoryBackend(space), random_ids), RUN, name, record, 0, "test")

    def hook(operation: str, key: str, phase: str) -> None:
        if (operation, key, phase) == ("create_exclusive", keys.record(name), "before"):
            assert marks.pin(Catalog(MemoryBackend(space), random_ids), RUN, name)
            assert MemoryBackend(space).remove_if(keys.record(name), record)

    assert purger(name)(HookedBackend(MemoryBackend(space), hook)) is False
    assert not gc(Store(MemoryBackend(space)), grace=0).freed
    store = Store(MemoryBackend(space))
    assert store.undelete(Ref(None, RUN, str(name))).quick_check() == ()


def test_a_delete_that_backs_off_leaves_the_trash_record_of_another_that_died() -> None:
    """The other has removed the record, and was about to write its trash record anew."""
    space, name = world()
    keys = RunKeys(RUN)
    record = space.objects[keys.record(name)][0]

    def hook(operation: str, key: str, phase: str) -> None:
        at_trash = (operation, key, phase) == ("put", keys.trash_record(name), "after")
        if at_trash and keys.record(name) in space.objects:
            marks.pin(Catalog(MemoryBackend(space), random_ids), RUN, name)
            assert MemoryBackend(space).remove_if(keys.record(name), record)

    with pytest.raises(ConflictError, match="pinned"):
        deleter(name)(HookedBackend(MemoryBackend(space), hook))
    store = Store(MemoryBackend(space))
    assert store.undelete(Ref(None, RUN, str(name))).quick_check() == ()


def test_undelete_and_purge_end_with_exactly_one_winner() -> None:
    space, name = world(trashed=True)
    result = explore(space, [undeleter(name), purger(name)], something_is_lost, clock=now)
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

    def writer(backend: HookedBackend) -> str:
        save._backend = backend
        save._catalog = Catalog(backend, random_ids)
        save._ended = False
        with save:
            pass
        return "committed"

    try:
        runs = 3000 if FULL else 300
        result = sample(space, [writer, collector], something_is_lost, clock=now, runs=runs, seed=3)
    finally:
        save._forgotten.detach()
        save._lease.stop()
    ends = {outcome[0] for outcome in result.outcomes}
    assert ends == {"returned 'committed'", "ended with VoidedError"}
