from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptstore import deleting
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from ckptstore.layout import RunKeys
from ckptstore.maintenance import gc, verify
from ckptstore.records import BestRule, Void
from ckptstore.store import Store
from ckptstore.uri import Ref, parse_ref
from tests.unit.support import (
    ABC,
    RUN,
    Clock,
    content,
    file_store,
    flipped,
    memory_store,
    objects,
    save,
)

KEYS = RunKeys(RUN)


def steps(store: Store) -> list[int]:
    return [c.step for c in store.list(RUN)]


def test_a_deleted_checkpoint_is_gone_from_everything_but_the_trash() -> None:
    store = memory_store()
    old = save(store, 1, tags=["good"])
    save(store, 2)
    store.delete(old)
    assert steps(store) == [2]
    for ref in (f"{RUN}@1", f"{RUN}@good", f"{RUN}@{old.name}"):
        with pytest.raises(NotFoundError):
            store.resolve(parse_ref(ref))
    assert [(r.step, r.state) for r in store.rows(RUN, everything=True)] == [
        (1, "trashed"),
        (2, "ok"),
    ]
    assert store.catalog.trash_names(RUN) == [old.name]


def test_the_files_of_a_deleted_checkpoint_stay_as_they_were() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    before = {k: v for k, v in objects(store).items() if k.startswith(KEYS.directory(old.name))}
    store.delete(old)
    after = {k: v for k, v in objects(store).items() if k.startswith(KEYS.directory(old.name))}
    assert after == before


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_undelete_brings_back_exactly_what_was_deleted(kind: str, tmp_path: Path) -> None:
    store = memory_store() if kind == "memory" else file_store(tmp_path)
    old = save(store, 1, tags=["good"], metrics={"r": 1.0})
    save(store, 2)
    record = store.backend.read(KEYS.record(old.name), 2**20)
    before = objects(store)
    store.delete(old)
    back = store.undelete(Ref(None, RUN, "1"))
    assert back.name == old.name
    assert objects(store) == before
    assert store.backend.read(KEYS.record(old.name), 2**20) == record
    assert content(store.get(RUN, step=1)) == ABC
    assert steps(store) == [1, 2]


@pytest.mark.parametrize("selector", ["1", "latest", None])
def test_undelete_takes_the_newest_that_fits(selector: str | None) -> None:
    store = memory_store()
    first, second = save(store, 1), save(store, 1)
    save(store, 2)
    store.delete(first)
    store.delete(second)
    ref = Ref(None, RUN, selector or str(first.name))
    assert store.undelete(ref).name == (second.name if selector else first.name)


def test_what_was_never_deleted_or_never_was_cannot_be_undeleted() -> None:
    store = memory_store()
    checkpoint = save(store, 1)
    for ref in (Ref(None, RUN, "1"), Ref(None, RUN, "7"), Ref(None, RUN, "latest")):
        with pytest.raises(NotFoundError):
            store.undelete(ref)
    with pytest.raises(NotFoundError):
        store.undelete(Ref(None, RUN, str(checkpoint.name)))
    with pytest.raises(NotFoundError):
        store.undelete(Ref(None, "other", "1"))
    with pytest.raises(NotFoundError):
        deleting.undelete(store.catalog, RUN, checkpoint.name)


def test_a_checkpoint_can_be_deleted_and_brought_back_again_and_again() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    for _ in range(3):
        store.delete(old)
        assert steps(store) == [2]
        store.undelete(Ref(None, RUN, "1"))
        assert steps(store) == [1, 2]


# Guards


def test_the_newest_is_kept_unless_it_is_forced() -> None:
    store = memory_store()
    save(store, 1)
    newest = save(store, 2)
    with pytest.raises(ConflictError, match="newest"):
        store.delete(newest)
    store.delete(newest, force=True)
    assert steps(store) == [1]


def test_the_newest_that_is_not_damaged_is_kept() -> None:
    store = memory_store()
    good, bad = save(store, 1), save(store, 2)
    store.backend.put(bad.key("a.txt"), b"alphA")
    verify(bad, deep=True)
    with pytest.raises(ConflictError, match="newest"):
        store.delete(good)
    store.delete(store.get(RUN, step=2))
    assert steps(store) == [1]


def test_newest_means_saved_last_and_not_the_highest_step() -> None:
    store = memory_store()
    for step in (500, 1000, 600):
        save(store, step)
    with pytest.raises(ConflictError, match="newest"):
        store.delete(store.get(RUN, step=600))
    store.delete(store.get(RUN, step=1000))
    assert steps(store) == [500, 600]


@pytest.mark.parametrize(("mode", "kept"), [("max", 2), ("min", 1)])
def test_the_best_is_kept_unless_it_is_forced(mode: Any, kept: int) -> None:
    store = memory_store()
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.6)):
        save(store, step, metrics={"r": value}, best=BestRule("r", mode))
    best = store.resolve(Ref(None, RUN, "best"))
    assert best.step == kept
    with pytest.raises(ConflictError, match="best"):
        store.delete(best)
    store.delete(store.get(RUN, step=3))
    store.delete(best, force=True)
    assert len(steps(store)) == 2


def test_the_last_one_that_was_verified_is_kept_unless_it_is_forced() -> None:
    store = memory_store()
    first, second = save(store, 1), save(store, 2)
    save(store, 3)
    verify(first, deep=True)
    verify(second, deep=True)
    store.delete(first)
    with pytest.raises(ConflictError, match="verified"):
        store.delete(second)
    store.delete(second, force=True)
    assert steps(store) == [3]


@pytest.mark.parametrize("force", [False, True])
def test_a_pin_holds_even_against_force(force: bool) -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.pin(old)
    before = objects(store)
    with pytest.raises(ConflictError, match="pinned"):
        store.delete(old, force=force)
    assert objects(store) == before
    store.unpin(old)
    store.delete(old)
    assert steps(store) == [2]


def test_all_reasons_to_keep_it_are_named() -> None:
    store = memory_store()
    checkpoint = save(store, 1, metrics={"r": 1.0}, best=BestRule("r", "max"))
    verify(checkpoint, deep=True)
    with pytest.raises(ConflictError, match=r"newest.*best.*verified"):
        store.delete(checkpoint)


def test_a_refused_deletion_changes_nothing() -> None:
    store = memory_store()
    checkpoint = save(store, 1)
    before = objects(store)
    with pytest.raises(ConflictError):
        store.delete(checkpoint)
    assert objects(store) == before


class PinsMeanwhile(MemoryBackend):
    """Someone pins a checkpoint just after its trash record was written."""

    pin: Any = None

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        if "/trash/" in key and self.pin is not None:
            pin, self.pin = self.pin, None
            pin()


def test_a_pin_that_comes_while_it_is_deleted_still_holds() -> None:
    backend = PinsMeanwhile(Space())
    store = Store(backend)
    old = save(store, 1)
    save(store, 2)
    backend.pin = lambda: store.pin(old)
    with pytest.raises(ConflictError, match="pinned"):
        store.delete(old)
    assert steps(store) == [1, 2]
    assert store.catalog.trash_names(RUN) == []


def test_deleting_what_someone_else_deleted_is_not_found() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    before = objects(store)
    with pytest.raises(NotFoundError):
        store.delete(old)
    assert objects(store) == before


# Grace and purge


def test_after_its_grace_a_deleted_checkpoint_is_purged_and_cannot_come_back() -> None:
    clock = Clock()
    store = memory_store(clock)
    old = save(store, 1)
    save(store, 2)
    store.pin(old)
    store.unpin(old)
    store.delete(old, grace=100)
    clock.advance(99)
    gc(store)
    assert content(store.undelete(Ref(None, RUN, "1"))) == ABC
    store.delete(store.get(RUN, step=1), grace=100)
    clock.advance(101)
    gc(store)
    left = [k for k in objects(store) if str(old.name) in k]
    assert left == [KEYS.record(old.name)]
    found = store.catalog.find(RUN, old.name)
    assert found is not None
    assert isinstance(found.record, Void)
    for ref in (Ref(None, RUN, "1"), Ref(None, RUN, str(old.name))):
        with pytest.raises(NotFoundError):
            store.undelete(ref)


def test_undelete_after_a_void_says_that_it_is_gone_for_good() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    trash = store.backend.read(KEYS.trash_record(old.name), 2**20)
    deleting.purge(store.catalog, RUN, old.name, trash, "over")
    store.backend.put(KEYS.trash_record(old.name), trash)
    with pytest.raises(NotFoundError, match="for good"):
        store.undelete(Ref(None, RUN, "1"))


def test_a_purge_that_comes_after_an_undelete_removes_nothing() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    trash = store.backend.read(KEYS.trash_record(old.name), 2**20)
    store.undelete(Ref(None, RUN, "1"))
    store.backend.put(KEYS.trash_record(old.name), trash)
    assert not deleting.purge(store.catalog, RUN, old.name, trash, "over")
    assert content(store.get(RUN, step=1)) == ABC


def test_a_deletion_that_died_before_the_record_was_removed_changed_nothing() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    record, trash = KEYS.record(old.name), KEYS.trash_record(old.name)
    data = store.backend.read(trash, 2**20)
    store.undelete(Ref(None, RUN, "1"))
    store.backend.put(trash, data)
    assert steps(store) == [1, 2]
    assert [r.state for r in store.rows(RUN, everything=True)] == ["ok", "ok"]
    with pytest.raises(ConflictError, match="not deleted"):
        store.undelete(Ref(None, RUN, "1"))
    store.delete(store.get(RUN, step=1))
    assert store.backend.stat(record) is None
    store.undelete(Ref(None, RUN, "1"))
    assert steps(store) == [1, 2]


@pytest.mark.parametrize("how", ["flipped", "cut", "moved"])
def test_a_damaged_trash_record_is_an_integrity_error_and_everything_stays(how: str) -> None:
    clock = Clock()
    store = memory_store(clock)
    old, other = save(store, 1), save(store, 2)
    save(store, 3)
    store.delete(old, grace=0)
    key = KEYS.trash_record(old.name)
    data = store.backend.read(key, 2**20)
    bad = {"flipped": flipped(data, 900), "cut": data[:-5], "moved": data}[how]
    if how == "moved":
        store.delete(other, grace=0)
        bad = store.backend.read(KEYS.trash_record(other.name), 2**20)
        store.undelete(Ref(None, RUN, "2"))
    store.backend.put(key, bad)
    before = objects(store)
    clock.advance(10**9)
    with pytest.raises(IntegrityError):
        store.undelete(Ref(None, RUN, "1"))
    result = gc(store)
    assert not result.removed
    assert objects(store) == before
    assert [r.state for r in store.rows(RUN, everything=True)] == ["trashed", "ok", "ok"]


def test_a_checkpoint_whose_files_are_damaged_in_the_trash_is_not_brought_back() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    store.backend.delete([old.key("a.txt")])
    before = objects(store)
    with pytest.raises(IntegrityError, match=r"a\.txt"):
        store.undelete(Ref(None, RUN, "1"))
    assert objects(store) == before


@pytest.mark.parametrize("grace", [math.inf, math.nan, 1e308])
def test_whatever_grace_is_accepted_the_checkpoint_can_be_brought_back(grace: float) -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    with suppress(UsageError):  # to refuse it is as good
        store.delete(old, grace=grace)
        store.undelete(Ref(None, RUN, "1"))
    assert steps(store) == [1, 2]


# The hint


def hint(root: Path) -> str | None:
    path = root / KEYS.latest
    return str(path.readlink()) if path.is_symlink() else None


def test_the_hint_follows_the_newest_commit(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    first = save(store, 1)
    assert hint(tmp_path) == str(first.name)
    second = save(store, 2)
    assert hint(tmp_path) == str(second.name)
    store.delete(second, force=True)
    assert hint(tmp_path) == str(first.name)
    store.undelete(Ref(None, RUN, "2"))
    assert hint(tmp_path) == str(second.name)
    for step in (1, 2):
        store.delete(store.get(RUN, step=step), force=True)
    assert hint(tmp_path) is None


def test_a_wrong_hint_misleads_nobody(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    save(store, 1)
    second = save(store, 2)
    (tmp_path / KEYS.latest).unlink()
    (tmp_path / KEYS.latest).symlink_to("/etc")
    latest = store.latest(RUN)
    assert latest is not None
    assert latest.name == second.name
