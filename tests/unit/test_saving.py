from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends.base import Writer as BackendWriter
from ckptstore.backends.local import LocalBackend
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.catalog import Catalog
from ckptstore.errors import (
    AccessDeniedError,
    CancelledError,
    CkptError,
    ConflictError,
    IntegrityError,
    NoSpaceError,
    NotFoundError,
    SourceChangedError,
    TemporaryError,
    UsageError,
    VoidedError,
)
from ckptstore.ids import default_ids
from ckptstore.layout import MARKER, RunKeys
from ckptstore.records import BestRule, Void
from ckptstore.saveoptions import SaveOptions
from ckptstore.saving import Save
from ckptstore.store import Store
from ckptstore.voiding import ensure_void
from tests.unit.support import (
    ABC,
    RUN,
    attempt,
    content,
    failed_save,
    file_store,
    memory_store,
    objects,
    raising,
    read_tree,
    save,
)

KEYS = RunKeys(RUN)


def test_a_save_on_disk_is_plain_files_beside_their_manifest(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    checkpoint = save(store, 500)
    assert checkpoint.path == str(tmp_path / RUN / str(checkpoint.name))
    found = read_tree(Path(checkpoint.path))
    assert found.pop("MANIFEST.json")
    assert found == ABC


def test_a_commit_leaves_a_record_a_hint_and_neither_lease_nor_temporaries(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    checkpoint = save(store)
    found = [p for p in tmp_path.rglob("*") if p.is_symlink() or not p.is_dir()]
    keys = {str(p.relative_to(tmp_path)) for p in found}
    root = KEYS.directory(checkpoint.name)
    assert keys == {
        MARKER,
        KEYS.latest,
        KEYS.record(checkpoint.name),
        KEYS.manifest(checkpoint.name),
        *(f"{root}/{path}" for path in ABC),
    }
    assert os.readlink(tmp_path / KEYS.latest) == str(checkpoint.name)


def test_stored_files_are_read_only_and_keep_their_exec_bit(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    script = tmp_path / "script"
    script.write_bytes(b"#!/bin/sh\n")
    script.chmod(0o755)
    old = os.umask(0o022)
    try:
        with store.save(RUN, 1) as one:
            one.add_file("run.sh", script)
            one.add_bytes("data", b"x")
            with one.open("tool", executable=True) as f:
                f.write(b"y")
    finally:
        os.umask(old)
    checkpoint = store.get(RUN, step=1)
    assert {e.path: e.exec for e in checkpoint.files} == {
        "run.sh": True,
        "data": False,
        "tool": True,
    }
    root = Path(checkpoint.path or "")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in root.iterdir()}
    assert modes == {"run.sh": 0o555, "data": 0o444, "tool": 0o555, "MANIFEST.json": 0o444}


def test_nothing_is_visible_before_the_commit() -> None:
    store = memory_store()
    one = store.save(RUN, 1)
    one.add_bytes("a", b"a")
    assert store.list(RUN) == []
    assert store.latest(RUN) is None
    with pytest.raises(NotFoundError):
        store.get(RUN, step=1)
    one.commit()
    assert [c.name for c in store.list(RUN)] == [one.name]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing_but_a_void(error: type[BaseException], tmp_path: Path) -> None:
    for store in (memory_store(), file_store(tmp_path)):
        one = store.save(RUN, 1)
        with pytest.raises(error):
            attempt(one, lambda one: one.add_bytes("a", b"a"), raising(error()))
        assert set(objects(store)) == {MARKER, KEYS.record(one.name)}
        found = store.catalog.find(RUN, one.name)
        assert found is not None
        assert isinstance(found.record, Void)
        assert store.list(RUN) == []


def test_after_an_exception_no_directory_of_the_save_is_left(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    name = failed_save(store)
    assert not (tmp_path / RUN / str(name)).exists()


def test_sequence_numbers_count_saves_whatever_became_of_them() -> None:
    store = memory_store()
    assert save(store, 9).seq == 1
    assert failed_save(store).seq == 2
    second = save(store, 5)
    assert second.seq == 3
    store.delete(second, force=True)
    assert save(store, 7).seq == 4


def test_a_rolled_back_run_has_its_lower_step_as_the_newest() -> None:
    store = memory_store()
    for step in (500, 1000, 600):
        save(store, step)
    latest = store.latest(RUN)
    assert latest is not None
    assert latest.step == 600
    assert [c.step for c in store.list(RUN)] == [500, 1000, 600]


def test_saving_a_step_again_makes_a_new_checkpoint_and_leaves_the_old_one() -> None:
    store = memory_store()
    old = save(store, 5, {"a": b"old"})
    new = save(store, 5, {"a": b"new"})
    assert store.get(RUN, step=5).name == new.name
    assert content(store.get(RUN, name=str(old.name))) == {"a": b"old"}


def test_an_empty_save_is_a_checkpoint() -> None:
    store = memory_store()
    checkpoint = save(store, files={})
    assert (checkpoint.size, checkpoint.commit.files) == (0, 0)
    assert content(checkpoint) == {}


def test_the_parent_is_the_newest_commit_at_the_start_and_the_best_rule_goes_on() -> None:
    store = memory_store()
    first = save(store, 1, best=BestRule("reward", "max"))
    failed_save(store)
    second = save(store, 2)
    assert second.commit.parent == str(first.name)
    assert second.commit.best == BestRule("reward", "max")
    third = save(store, 3, best=BestRule("loss", "min"))
    assert third.commit.best == BestRule("loss", "min")
    assert save(store, 4).commit.best == BestRule("loss", "min")


@pytest.mark.parametrize(
    ("run", "step", "tags"),
    [("../x", 1, []), ("", 1, []), (RUN, -1, []), (RUN, 10**15, []), (RUN, 1, ["latest"])],
)
def test_a_save_that_cannot_be_is_refused_before_a_store_is_made(
    run: str, step: int, tags: list[str]
) -> None:
    store = memory_store()
    with pytest.raises(UsageError):
        store.save(run, step, tags=tags)
    assert objects(store) == {}


@pytest.mark.parametrize(
    "path", ["", "/abs", "../up", "a/../b", "MANIFEST.json", "manifest.json", "a\nb", "\udc80"]
)
def test_a_path_that_cannot_be_stored_is_refused_by_every_way_of_adding(path: str) -> None:
    store = memory_store()
    with store.save(RUN, 1) as one:
        calls: list[Any] = [
            lambda: one.add_bytes(path, b""),
            lambda: one.open(path),
            lambda: one.add_file(path, __file__),
            lambda: one.add_empty_directory(path),
        ]
        for call in calls:
            with pytest.raises(UsageError):
                call()
    assert content(store.get(RUN, step=1)) == {}


def test_a_path_is_taken_once() -> None:
    store = memory_store()
    with store.save(RUN, 1) as one:
        one.add_bytes("a", b"first")
        with pytest.raises(UsageError, match="before"):
            one.add_bytes("a", b"second")
        with pytest.raises(UsageError, match="before"):
            one.add_file("a", __file__)
        f = one.open("b")
        with pytest.raises(UsageError, match="before"):
            one.open("b")
        f.close()
    assert content(store.get(RUN, step=1)) == {"a": b"first", "b": b""}


@pytest.mark.parametrize("first", ["a", "a/b"])
def test_a_path_below_a_file_cannot_be_committed(first: str, tmp_path: Path) -> None:
    second = "a/b" if first == "a" else "a"
    for store in (memory_store(), file_store(tmp_path)):
        with pytest.raises(CkptError):
            save(store, files={first: b"", second: b""})
        assert store.list(RUN) == []


def test_an_empty_directory_that_is_not_empty_cannot_be_committed() -> None:
    store = memory_store()
    with pytest.raises(UsageError, match="not empty"):
        attempt(
            store.save(RUN, 1),
            lambda one: one.add_empty_directory("d"),
            lambda one: one.add_bytes("d/a", b""),
        )
    assert store.list(RUN) == []


def test_empty_directories_are_kept(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    with store.save(RUN, 1) as one:
        one.add_empty_directory("d/e")
        one.add_bytes("a", b"")
    checkpoint = store.get(RUN, step=1)
    assert checkpoint.manifest.empty_directories == ("d/e",)
    assert (Path(checkpoint.path or "") / "d/e").is_dir()


def test_a_save_that_has_ended_takes_nothing_more() -> None:
    store = memory_store()
    committed, aborted = store.save(RUN, 1), store.save(RUN, 2)
    committed.commit()
    aborted.abort()
    for one in (committed, aborted):
        calls: list[Any] = [
            lambda one=one: one.add_bytes("x", b""),
            lambda one=one: one.open("x"),
            lambda one=one: one.add_empty_directory("x"),
            lambda one=one: one.commit(),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="ended"):
                call()
    committed.abort()
    assert [c.step for c in store.list(RUN)] == [1]


def test_a_save_committed_within_its_block_is_committed_once() -> None:
    store = memory_store()
    with store.save(RUN, 1) as one:
        one.add_bytes("a", b"")
        one.commit()
    assert len(store.list(RUN)) == 1


def test_files_can_be_added_from_several_threads() -> None:
    store = memory_store()
    with store.save(RUN, 1) as one:
        threads = [
            threading.Thread(target=one.add_bytes, args=(f"f{i}", bytes([i]) * i))
            for i in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert content(store.get(RUN, step=1)) == {f"f{i}": bytes([i]) * i for i in range(16)}
    assert one.sent_bytes == sum(range(16))


def test_a_source_file_that_changes_while_it_is_added_makes_the_save_fail(tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(b"before")
    store = memory_store()

    def change(_: int) -> None:
        source.write_bytes(b"after!")

    with pytest.raises(SourceChangedError), store.save(RUN, 1, progress=change) as one:
        one.add_file("f", source)
    assert store.list(RUN) == []


def test_adding_a_file_follows_a_symbolic_link_and_misses_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    store = memory_store()
    with store.save(RUN, 1) as one:
        one.add_file("f", tmp_path / "link")
        with pytest.raises(NotFoundError):
            one.add_file("g", tmp_path / "none")
    assert content(store.get(RUN, step=1)) == {"f": b"x"}


def test_a_cancelled_save_commits_nothing(tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(b"x")
    cancel = threading.Event()
    cancel.set()
    store = memory_store()
    with pytest.raises(CancelledError), store.save(RUN, 1, cancel=cancel) as one:
        one.add_file("f", source)
    assert store.list(RUN) == []


def test_a_save_that_meets_a_void_fails_and_can_never_be_committed() -> None:
    store = memory_store()
    one = store.save(RUN, 1)
    one.add_bytes("a", b"a")
    assert ensure_void(store.catalog, RUN, one.name, "gc took it for dead")
    with pytest.raises(VoidedError):
        attempt(one)
    assert store.list(RUN) == []
    assert set(objects(store)) == {MARKER, KEYS.record(one.name)}


def test_a_void_never_replaces_a_commit() -> None:
    store = memory_store()
    checkpoint = save(store)
    assert not ensure_void(store.catalog, RUN, checkpoint.name, "by mistake")
    assert content(store.get(RUN, step=1)) == ABC


def test_keep_partial_leaves_the_files_and_an_abandoned_lease() -> None:
    store = memory_store()
    one = Save(store.catalog, RUN, 1, SaveOptions(keep_partial=True))
    one.add_bytes("a", b"kept")
    one.abort(RuntimeError())
    assert objects(store)[KEYS.file(one.name, "a")] == b"kept"
    assert store.catalog.find(RUN, one.name) is None
    (held,) = store.catalog.leases(RUN)
    assert held.lease is not None
    assert held.lease.abandoned
    assert [e.path for e in held.lease.files] == ["a"]
    assert store.list(RUN) == []


@pytest.mark.parametrize("error", [NoSpaceError("full"), VoidedError("voided")])
def test_partial_files_are_not_kept_when_they_fill_the_disk_or_were_given_up(
    error: CkptError,
) -> None:
    store = memory_store()
    one = Save(store.catalog, RUN, 1, SaveOptions(keep_partial=True))
    one.add_bytes("a", b"a")
    one.abort(error)
    assert set(objects(store)) == {MARKER, KEYS.record(one.name)}


class Lossy(MemoryBackend):
    """Storage that carries out the creation of a record, or not, and then loses the reply."""

    def __init__(self, *, carried_out: bool, failures: int = 1) -> None:
        super().__init__(Space())
        self.carried_out = carried_out
        self.failures = failures

    def create_exclusive(self, key: str, data: bytes) -> bool:
        if "/commits/" in key and self.failures:
            self.failures -= 1
            if self.carried_out:
                super().create_exclusive(key, data)
            raise TemporaryError("timed out")
        return super().create_exclusive(key, data)


def test_a_record_whose_creation_was_carried_out_but_not_confirmed_is_a_commit() -> None:
    store = Store(Lossy(carried_out=True))
    save(store)
    assert content(store.get(RUN, step=1)) == ABC


def test_a_record_whose_creation_failed_is_settled_by_a_void() -> None:
    store = Store(Lossy(carried_out=False))
    with pytest.raises(TemporaryError):
        save(store)
    assert store.list(RUN) == []
    (name,) = store.catalog.record_names(RUN)
    found = store.catalog.find(RUN, name)
    assert found is not None
    assert isinstance(found.record, Void)
    assert save(store).seq == 2


class NoHint(MemoryBackend):
    def set_hint(self, key: str, target: str) -> None:
        raise AccessDeniedError("no hint here")


def test_a_hint_that_cannot_be_written_neither_fails_the_save_nor_keeps_its_lease() -> None:
    store = Store(NoHint(Space()))
    threads = threading.active_count()
    with store.save(RUN, 1) as one:
        one.add_bytes("a", b"a")
    assert store.get(RUN, step=1).name == one.name
    assert store.catalog.leases(RUN) == []
    assert threading.active_count() == threads


def test_a_directory_in_place_of_the_hint_leaves_no_temporary(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    (tmp_path / RUN / "latest").mkdir(parents=True)
    store.create(into_nonempty=True)
    save(store)
    assert [p.name for p in (tmp_path / RUN).iterdir() if p.name.startswith(".")] == []


class CannotClean(MemoryBackend):
    def remove_tree(self, prefix: str) -> None:
        raise TemporaryError("away")


def test_a_failed_save_that_cannot_be_cleaned_up_keeps_no_thread_that_renews_its_lease() -> None:
    store = Store(CannotClean(Space()))
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="the real reason"):
        attempt(
            store.save(RUN, 1),
            lambda one: one.add_bytes("a", b"a"),
            raising(RuntimeError("the real reason")),
        )
    assert threading.active_count() == threads


def test_every_directory_of_a_checkpoint_is_durable_before_its_record(tmp_path: Path) -> None:
    events: list[str] = []

    class Watching(LocalBackend):
        def sync(self, directories: Iterable[str]) -> None:
            directories = list(directories)
            events.extend(directories)
            super().sync(directories)

        def create_exclusive(self, key: str, data: bytes) -> bool:
            events.append(key)
            return super().create_exclusive(key, data)

    checkpoint = save(Store(Watching(str(tmp_path))))
    root, record = KEYS.directory(checkpoint.name), KEYS.record(checkpoint.name)
    before = events[: events.index(record)]
    assert {f"{root}/sub/deep", f"{root}/sub", root, RUN, ""} <= set(before)
    assert before.index(f"{root}/sub/deep") < before.index(f"{root}/sub") < before.index(root)


def test_a_directory_that_is_taken_is_not_written_to() -> None:
    class Taken(MemoryBackend):
        refused = 0

        def make_directory(self, key: str) -> bool:
            if not self.refused:
                self.refused += 1
                self.put(f"{key}/theirs", b"theirs")
                return False
            return super().make_directory(key)

    store = Store(Taken(Space()))
    checkpoint = save(store)
    assert checkpoint.seq == 2
    assert [k for k in objects(store) if k.endswith("/theirs")]
    assert store.catalog.leases(RUN) == []


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    one = store.save(RUN, 1)
    planted = tmp_path / KEYS.file(one.name, "a")
    planted.write_bytes(b"planted")
    with pytest.raises(ConflictError):
        one.add_bytes("a", b"mine")
    assert planted.read_bytes() == b"planted"
    one.abort()


def test_metadata_tags_and_metrics_are_read_back() -> None:
    store = memory_store()
    save(store, metadata={"lr": 1e-4, "nested": [1, None]}, metrics={"r": 1}, tags=["b", "a", "a"])
    found = store.get(RUN, step=1)
    assert found.metadata == {"lr": 1e-4, "nested": [1, None]}
    assert found.metrics == {"r": 1.0}
    assert found.tags == ["a", "b"]


# A store that goes away


def names_of_records(root: Path) -> list[str]:
    return [p.name for p in root.rglob("*.json") if p.parent.name == "commits"]


def save_into_what_vanishes(
    root: Path, files: dict[str, bytes], late: bool, replaced: bool
) -> CkptError:
    """How a save ends whose store is moved away, and maybe replaced, before or after its files."""
    store = file_store(root)

    def add(one: Save) -> None:
        for path, data in files.items():
            one.add_bytes(path, data)

    def move(_: Save) -> None:
        root.rename(root.parent / "elsewhere")
        if replaced:
            save(file_store(root), 7, run="theirs")

    one = store.save(RUN, 1)
    with pytest.raises(CkptError) as caught:
        attempt(one, *((add, move) if late else (move, add)))
    return caught.value


VANISHING = pytest.mark.parametrize(
    ("files", "late", "replaced"),
    [
        pytest.param(
            files,
            late,
            replaced,
            id=f"{'some' if files else 'no'} files-moved {'after' if late else 'before'}"
            f"-{'replaced' if replaced else 'gone'}",
        )
        for files in ({}, ABC)
        for late in ((False, True) if files else (True,))
        for replaced in (False, True)
    ],
)


@VANISHING
def test_a_save_into_a_store_that_was_moved_away_or_replaced_says_that_it_has_gone(
    files: dict[str, bytes], late: bool, replaced: bool, tmp_path: Path
) -> None:
    error = save_into_what_vanishes(tmp_path / "store", files, late, replaced)
    assert isinstance(error, NotFoundError), error


@VANISHING
def test_a_save_into_a_store_that_was_moved_away_or_replaced_commits_nothing_anywhere(
    files: dict[str, bytes], late: bool, replaced: bool, tmp_path: Path
) -> None:
    save_into_what_vanishes(tmp_path / "store", files, late, replaced)
    records = [p for p in tmp_path.rglob("*.json") if p.parent.name == "commits"]
    commits = [p for p in records if b'"kind":"commit"' in p.read_bytes()]
    assert [p.parent.parent.name for p in commits] == ["theirs"] * replaced
    if replaced:
        assert content(file_store(tmp_path / "store").get("theirs", step=7)) == ABC


@VANISHING
def test_a_save_into_a_store_that_was_moved_away_or_replaced_leaves_no_void_in_either(
    files: dict[str, bytes], late: bool, replaced: bool, tmp_path: Path
) -> None:
    save_into_what_vanishes(tmp_path / "store", files, late, replaced)
    assert [n for n in names_of_records(tmp_path) if "step-00000007" not in n] == []


# Forks


FORKING = """
import os, sys
from ckptstore import open_store

def child(leave):
    if leave == "exit":
        sys.exit(0)
    if leave == "error":
        raise SystemExit("of the child")

def fork(leave):
    pid = os.fork()
    if pid == 0:
        child(leave)
        return False
    os.waitpid(pid, 0)
    return True

def main(uri, how):
    store = open_store(uri)
    if how == "outside":
        one = store.save("run", 1)
        one.add_bytes("a", b"before")
        if not fork("exit"):
            return
        (held,) = store.catalog.leases("run")
        assert held.lease is not None and not held.lease.abandoned
        one.add_bytes("b", b"after")
        one.commit()
        return
    with store.save("run", 1) as one:
        one.add_bytes("a", b"before")
        if not fork(how):
            return  # leaves the block without an exception
        (held,) = store.catalog.leases("run")
        assert held.lease is not None and not held.lease.abandoned
        one.add_bytes("b", b"after")

main(*sys.argv[1:])
"""


@pytest.mark.parametrize("how", ["outside", "exit", "error", "return"])
def test_a_forked_child_that_ends_does_not_end_the_save_of_its_parent(
    how: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKING), str(tmp_path), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "never committed" not in done.stderr
    store = file_store(tmp_path)
    assert content(store.get(RUN, step=1)) == {"a": b"before", "b": b"after"}
    assert store.catalog.leases(RUN) == []


# Locks, second tries, links


def test_a_file_forgotten_while_its_save_holds_the_lock_in_the_same_thread_ends_nothing() -> None:
    store = memory_store()
    one = store.save(RUN, 1)

    def forget() -> None:
        f = one.open("a")
        f.write(b"half")
        with one._lock:
            del f

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    one.add_bytes("a", b"whole")
    one.commit()
    assert content(store.get(RUN, step=1)) == {"a": b"whole"}


def test_a_file_that_could_not_be_opened_can_be_tried_again_in_the_same_save() -> None:
    class FailsOnce(MemoryBackend):
        failures = 1

        def open_writer(
            self, key: str, *, size: int | None = None, executable: bool = False, **more: bool
        ) -> BackendWriter:
            if key.endswith("/a") and self.failures:
                self.failures -= 1
                raise TemporaryError("not now")
            return super().open_writer(key, size=size, executable=executable, **more)

    store = Store(FailsOnce(Space()))
    with store.save(RUN, 1) as one:
        with pytest.raises(TemporaryError):
            one.open("a")
        one.add_bytes("a", b"a")
    assert content(store.get(RUN, step=1)) == {"a": b"a"}


def test_a_link_that_says_exists_about_our_own_file_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def repeated(*args: Any, **how: Any) -> None:
        link(*args, **how)
        link(*args, **how)  # raises FileExistsError, as a repeated request over NFS

    monkeypatch.setattr(os, "link", repeated)
    backend = LocalBackend(str(tmp_path))
    assert backend.create_exclusive("d/x", b"one")
    assert not backend.create_exclusive("d/x", b"two")
    assert not backend.create_exclusive("d/x", b"one")
    store = file_store(tmp_path / "store")
    assert content(save(store)) == ABC
    assert list(tmp_path.rglob(".ckpt-tmp-*")) == []


@pytest.mark.parametrize("answer", ["exists", "error"])
def test_a_document_that_was_created_without_our_knowing_is_made_durable(answer: str) -> None:
    events: list[str] = []

    class Repeated(MemoryBackend):
        def create_exclusive(self, key: str, data: bytes) -> bool:
            super().create_exclusive(key, data)
            events.append(f"created {key}")
            if answer == "error":
                raise TemporaryError("timed out")
            return False

        def sync(self, directories: Iterable[str]) -> None:
            events.extend(directories)

    catalog = Catalog(Repeated(Space()), default_ids())
    assert catalog.create_document("d/x", b"mine")
    assert events == ["created d/x", "d"]
    events.clear()
    if answer == "exists":
        assert not catalog.create_document("d/x", b"other")
    else:
        with pytest.raises(TemporaryError):
            catalog.create_document("d/x", b"other")
    assert events == ["created d/x"]


@pytest.mark.timeout(10)
def test_a_source_that_became_a_fifo_does_not_block_a_save(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    store = memory_store()
    begun = time.monotonic()
    with pytest.raises(CkptError), store.save(RUN, 1) as one:
        one.add_file("f", tmp_path / "f")
    assert time.monotonic() - begun < 5
    assert store.list(RUN) == []


@pytest.mark.parametrize("what", ["run", "commits", "leases"])
def test_a_save_writes_nothing_through_a_symbolic_link(what: str, tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    store.create()
    target = tmp_path / "outside"
    target.mkdir()
    (tmp_path / "store/run").mkdir()
    if what == "run":
        (tmp_path / "store/run").rmdir()
        (tmp_path / "store/run").symlink_to(target)
    else:
        (tmp_path / "store/run" / what).symlink_to(target)
    with pytest.raises(IntegrityError, match="symbolic link"):
        save(store)
    assert list(target.iterdir()) == []
