from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptstore import deleting
from ckptstore.backends.local import LocalBackend
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.errors import CkptError, ConflictError, IntegrityError, NotFoundError, UsageError
from ckptstore.layout import RunKeys
from ckptstore.maintenance import gc, verify
from ckptstore.records import BestRule, Void
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend, Phase
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
    read_tree,
    save,
    write_tree,
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


# What comes in between


def once(store: Store, operation: str, key: str, phase: Phase, do: Callable[[], object]) -> Store:
    """The same store, where something is done once around an operation."""
    left = [do]

    def hook(now: str, at: str, when: Phase) -> None:
        if (now, at, when) == (operation, key, phase) and left:
            left.pop()()

    return Store(HookedBackend(store.backend, hook))


def test_an_undelete_leaves_the_trash_record_of_a_later_delete() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    _, first = store.catalog.find_trash(RUN, old.name)
    record = KEYS.record(old.name)
    hooked = once(store, "create_exclusive", record, "after", lambda: store.delete(old))
    hooked.undelete(Ref(None, RUN, "1"))
    assert steps(store) == [2]
    _, second = store.catalog.find_trash(RUN, old.name)
    assert second not in (b"", first)
    assert content(store.undelete(Ref(None, RUN, "1"))) == ABC
    assert store.catalog.trash_names(RUN) == []


def test_a_purge_by_a_trash_record_that_was_replaced_does_nothing() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    _, stale = store.catalog.find_trash(RUN, old.name)
    store.undelete(Ref(None, RUN, "1"))
    store.delete(old)
    before = objects(store)
    assert not deleting.purge(store.catalog, RUN, old.name, stale, "over")
    assert not deleting.purge(store.catalog, RUN, old.name, b"", "over")
    assert objects(store) == before
    assert content(store.undelete(Ref(None, RUN, "1"))) == ABC


def test_what_was_undeleted_and_deleted_anew_just_before_the_void_of_a_purge_is_kept() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    _, trash = store.catalog.find_trash(RUN, old.name)

    def anew() -> None:
        store.undelete(Ref(None, RUN, "1"))
        store.delete(old)

    hooked = once(store, "create_exclusive", KEYS.record(old.name), "before", anew)
    assert not deleting.purge(hooked.catalog, RUN, old.name, trash, "over")
    assert store.catalog.find_trash(RUN, old.name)[1] != trash
    assert store.catalog.find(RUN, old.name) is None
    assert content(store.undelete(Ref(None, RUN, "1"))) == ABC


@pytest.mark.parametrize("force", [False, True])
def test_a_mark_that_cannot_be_read_holds_even_against_force(force: bool) -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.pin(old)
    (mark,) = store.backend.list(KEYS.marks_of(old.name))
    store.backend.put(mark.key, b"torn")
    before = objects(store)
    with pytest.raises(ConflictError, match="cannot be read"):
        store.delete(old, force=force)
    assert objects(store) == before


def test_pinning_what_was_deleted_meanwhile_is_a_conflict() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    with pytest.raises(ConflictError, match="deleted"):
        store.pin(old)
    assert content(store.undelete(Ref(None, RUN, "1"))) == ABC


# Removing an object only if it is still the same, on a disk


def test_another_object_than_the_one_to_be_removed_never_leaves_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(str(tmp_path))
    backend.put("d/x", b"theirs")
    moved: list[object] = []
    for call in ("rename", "replace", "unlink"):
        monkeypatch.setattr(os, call, lambda *paths, **_: moved.append(paths))
    assert not backend.remove_if("d/x", b"mine")
    assert not backend.remove_if("d/x", b"theirs and more")
    assert not backend.remove_if("d/none", b"mine")
    assert moved == []
    assert backend.read("d/x", 100) == b"theirs"


@pytest.mark.parametrize("links", [True, False])
def test_an_object_that_was_replaced_after_the_look_is_put_back(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(str(tmp_path))
    backend.put("d/x", b"mine")
    rename = os.rename

    def replaced(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        backend.put("d/x", b"theirs")
        rename(source, target)

    def no_link(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "rename", replaced)
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    assert not backend.remove_if("d/x", b"mine")
    assert read_tree(tmp_path) == {"d/x": b"theirs"}


# Symbolic links in the place of directories


@pytest.mark.parametrize("place", ["marks", "trash", "commits"])
def test_a_delete_writes_and_removes_nothing_through_a_symbolic_link(
    place: str, tmp_path: Path
) -> None:
    store = file_store(tmp_path / "store")
    old = save(store, 1, tags=["x"])
    save(store, 2)
    store.pin(old)
    store.unpin(old)
    directory = tmp_path / "store" / RUN / place
    target = tmp_path / "outside"
    if directory.exists():
        directory.rename(target)
    else:
        write_tree(target, {"f": b"precious"})
    directory.symlink_to(target)
    before = read_tree(target)
    with pytest.raises(IntegrityError):
        store.delete(old, force=True)
    assert read_tree(target) == before


def test_nothing_is_deleted_from_a_run_that_is_a_symbolic_link(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    old = save(store, 1)
    save(store, 2)
    run = tmp_path / "store" / RUN
    run.rename(tmp_path / "outside")
    run.symlink_to(tmp_path / "outside")
    before = read_tree(tmp_path / "outside")
    with pytest.raises(CkptError):
        store.delete(old, force=True)
    assert read_tree(tmp_path / "outside") == before
