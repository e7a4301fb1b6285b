from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import msgspec
import pytest

from ckptstore import document
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.catalog import HeldLease
from ckptstore.errors import TemporaryError
from ckptstore.layout import RunKeys
from ckptstore.leases import HEARTBEAT_SECONDS, STALE_SECONDS, LeaseKeeper, is_dead, is_live
from ckptstore.manifest import FileEntry
from ckptstore.records import Lease, writer_here
from ckptstore.store import Store
from tests.unit.support import RUN, Clock, killed_save, memory_store, objects, save, stop

KEYS = RunKeys(RUN)


def held(store: Store) -> HeldLease:
    (found,) = store.catalog.leases(RUN)
    return found


def lease(store: Store) -> Lease:
    found = held(store).lease
    assert found is not None
    return found


def test_a_save_has_a_lease_from_before_its_directory_until_after_its_record() -> None:
    events: list[str] = []

    class Watching(MemoryBackend):
        def put(self, key: str, data: bytes) -> None:
            events.append(key.split("/")[-2] if "/" in key else key)
            super().put(key, data)

        def make_directory(self, key: str) -> bool:
            events.append("directory")
            return super().make_directory(key)

        def delete(self, keys: Iterable[str]) -> None:
            keys = list(keys)
            events.extend(f"delete {k.rpartition('/')[0].rpartition('/')[2]}" for k in keys)
            super().delete(keys)

    store = Store(Watching(Space()))
    store.create()
    events.clear()
    save(store, files={"a": b"a"})
    assert events[0] == "leases"
    assert events[1] == "directory"
    assert events.index("commits") < events.index("delete leases")
    assert store.catalog.leases(RUN) == []


def test_a_lease_says_who_saves_what() -> None:
    store = memory_store()
    one = store.save(RUN, 1)
    assert held(store).name == one.name
    assert (lease(store).run, lease(store).name) == (RUN, str(one.name))
    assert lease(store).writer == one.writer
    assert not lease(store).abandoned
    one.abort()
    assert store.catalog.leases(RUN) == []


def test_a_lease_is_live_for_half_an_hour_after_its_last_heartbeat() -> None:
    clock = Clock()
    store = memory_store(clock)
    one = store.save(RUN, 1)
    stop(one)
    found = held(store)
    assert is_live(found, clock.now)
    assert is_live(found, clock.now + STALE_SECONDS - 1)
    assert not is_live(found, clock.now + STALE_SECONDS)
    assert not is_dead(found)
    assert STALE_SECONDS >= 6 * HEARTBEAT_SECONDS


def test_an_abandoned_lease_and_that_of_a_gone_process_are_dead_at_once() -> None:
    store = memory_store()
    killed_save(store)
    found = held(store)
    assert is_dead(found)
    assert not is_live(found, found.modified)
    assert found.lease is not None
    alive = HeldLease(found.key, found.name, found.modified, None)
    assert is_live(alive, found.modified)
    abandoned = msgspec.structs.replace(lease_here(store), abandoned=True)
    assert is_dead(HeldLease(found.key, found.name, found.modified, abandoned))


def lease_here(store: Store) -> Lease:
    one = store.save("other", 1)
    (found,) = store.catalog.leases("other")
    one.abort()
    assert found.lease is not None
    assert not is_dead(found)
    return found.lease


def test_a_lease_that_cannot_be_read_is_live_until_it_is_stale() -> None:
    clock = Clock()
    store = memory_store(clock)
    one = store.save(RUN, 1)
    stop(one)
    store.backend.put(held(store).key, b"damaged")
    found = held(store)
    assert found.lease is None
    assert is_live(found, clock.now)
    assert not is_live(found, clock.now + STALE_SECONDS)


def keeper(store: Store, heartbeat: float = HEARTBEAT_SECONDS) -> LeaseKeeper:
    store.create()
    name = store.catalog.new_name(RUN, 1)
    return LeaseKeeper(store.catalog, RUN, name, writer_here("w"), heartbeat=heartbeat)


def wait_for(condition: threading.Event) -> None:
    assert condition.wait(20)


class Beating(MemoryBackend):
    """Notes heartbeats, and can be away."""

    def __init__(self) -> None:
        super().__init__(Space())
        self.beats = 0
        self.three = threading.Event()
        self.away = False

    def put(self, key: str, data: bytes) -> None:
        if "/leases/" in key:
            self.beats += 1
            if self.beats >= 3:
                self.three.set()
            if self.away:
                raise TemporaryError("away")
        super().put(key, data)


def test_a_lease_is_renewed_until_it_is_let_go() -> None:
    backend = Beating()
    store = Store(backend)
    one = keeper(store, 0.01)
    wait_for(backend.three)
    one.release()
    assert store.catalog.leases(RUN) == []
    count = backend.beats
    time.sleep(0.05)
    assert backend.beats == count


def test_storage_that_is_away_does_not_end_the_heartbeat() -> None:
    backend = Beating()
    store = Store(backend)
    one = keeper(store, 0.01)
    backend.away = True
    wait_for(backend.three)
    backend.three.clear()
    backend.away = False
    wait_for(backend.three)
    one.release()


def test_no_thread_is_left_when_a_lease_has_ended() -> None:
    store = memory_store()
    before = threading.active_count()
    keeper(store).release()
    keeper(store).abandon()
    assert threading.active_count() == before


def test_an_abandoned_lease_stays_with_its_journal() -> None:
    store = memory_store()
    one = keeper(store)
    entry = FileEntry.build("a", 0, [])
    one.completed([entry])
    one.abandon()
    assert lease(store).abandoned
    assert lease(store).files == (entry,)


def test_many_small_files_cost_few_writes_of_the_journal() -> None:
    backend = Beating()
    store = Store(backend)
    one = keeper(store)
    for i in range(500):
        one.completed([FileEntry.build(f"f{i}", 0, [])])
    assert backend.beats <= 5
    one.release()


def test_the_journal_is_written_as_files_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.leases.JOURNAL_SECONDS", 0.0)
    store = memory_store()
    one = store.save(RUN, 1)
    one.add_bytes("a", b"a")
    one.add_bytes("b", b"b")
    assert [e.path for e in lease(store).files] == ["a", "b"]
    one.abort()


def test_a_journal_that_is_too_long_is_left_out_and_the_lease_still_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckptstore.leases.JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr("ckptstore.document.SIZE_LIMIT", 2000)
    store = memory_store()
    one = keeper(store)
    one.completed([FileEntry.build(f"f{i}", 0, []) for i in range(100)])
    assert lease(store).files == ()
    assert len(objects(store)[held(store).key]) <= document.SIZE_LIMIT
    one.release()
