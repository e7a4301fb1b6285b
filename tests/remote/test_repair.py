"""Verification and repair where there are no files: what is compared, what is fetched."""

from __future__ import annotations

import random
from collections import Counter

import ckptstore
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import RunKeys
from ckptstore.maintenance import repair, repair_run, verify, verify_run
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from tests.remote.places import Place
from tests.unit.support import RUN, content, flipped, save

KEYS = RunKeys(RUN)
FILES = {
    "big": random.Random(5).randbytes(BLOCK_SIZE + 1000),
    "small": b"small" * 20,
    "empty": b"",
}


def counting(store: Store) -> tuple[Store, Counter[tuple[str, str]]]:
    """The store, and how often each operation was done to each key."""
    count: Counter[tuple[str, str]] = Counter()

    def hook(operation: str, key: str, phase: str) -> None:
        if phase == "before":
            count[operation, key] += 1

    return Store(HookedBackend(store.backend, hook)), count


def copy_of(store: Store, uri: str) -> Store:
    """A mirror, object by object."""
    for entry in store.backend.list("", recursive=True):
        backend = ckptstore.open_store(uri).backend
        writer = backend.open_writer(entry.key, size=entry.size)
        data = memoryview(store.backend.read(entry.key, 2**40))
        for offset in range(0, len(data), BLOCK_SIZE):
            writer.write(offset, data[offset : offset + BLOCK_SIZE])
        writer.finish(len(data))
    return ckptstore.open_store(uri)


def test_stored_checksums_are_compared_and_nothing_is_read(place: Place) -> None:
    store = ckptstore.open_store(place.uri())
    checkpoint = save(store, 1, FILES)
    assert all(e.crc64nvme for e in checkpoint.files if e.size)
    looked, count = counting(store)
    assert verify(looked.get(RUN, step=1)).ok
    keys = [checkpoint.key(path) for path in FILES]
    assert {k: n for k, n in count.items() if k[1] in keys} == {("checksum", k): 1 for k in keys}
    store.backend.put(checkpoint.key("small"), flipped(FILES["small"], 77))
    result = verify(store.get(RUN, step=1))
    assert [(d.path, d.reason) for d in result.damage] == [("small", "the stored checksum differs")]
    again = store.get(RUN, step=1)
    assert [n.path for n in again.standing.content_damage] == ["small"], "only reading ends it"
    store.backend.put(checkpoint.key("small"), FILES["small"])
    assert not verify(store.get(RUN, step=1)).ok
    assert verify(store.get(RUN, step=1), deep=True).ok
    assert verify(store.get(RUN, step=1)).ok


def test_a_damaged_store_is_repaired_block_by_block(place: Place) -> None:
    store = ckptstore.open_store(place.uri())
    checkpoint, other = save(store, 1, FILES), save(store, 2, {"x": b"x"})
    mirror = copy_of(store, place.uri())
    writer = store.backend.open_writer(checkpoint.key("big"), size=len(FILES["big"]), replace=True)
    bad = memoryview(flipped(FILES["big"], 8 * (BLOCK_SIZE + 3)))
    writer.write(0, bad[:BLOCK_SIZE])
    writer.write(BLOCK_SIZE, bad[BLOCK_SIZE:])
    writer.finish(len(bad))
    store.backend.delete([checkpoint.key("small"), KEYS.manifest(other.name)])
    record = store.backend.read(KEYS.record(other.name), 2**20)
    store.backend.put(KEYS.record(other.name), flipped(flipped(record, 2000), 3000))
    assert [r.ok for r in verify_run(store, RUN, deep=True)] == [False, False]
    results = list(repair_run(store, RUN, [mirror]))
    assert all(r.ok for r in results), results
    assert results[0].fetched_bytes == 1000 + len(FILES["small"])
    assert all(r.ok for r in verify_run(store, RUN, deep=True))
    assert all(r.ok for r in verify_run(store, RUN)), "the stored checksums are right, too"
    assert content(store.get(RUN, step=1)) == FILES


def test_a_store_elsewhere_is_repaired_from_a_bucket(place: Place) -> None:
    mirror = ckptstore.open_store(place.uri())
    checkpoint = save(mirror, 1, FILES)
    store = ckptstore.open_store("memory://repaired-from-a-bucket")
    for entry in mirror.backend.list("", recursive=True):
        store.backend.put(entry.key, mirror.backend.read(entry.key, 2**40))
    store.backend.put(checkpoint.key("big"), flipped(FILES["big"], 0))
    result = repair(Store(store.backend).get(RUN, step=1), [mirror])
    assert (result.ok, result.fetched_bytes) == (True, BLOCK_SIZE)
