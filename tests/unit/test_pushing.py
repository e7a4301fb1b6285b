from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import document
from ckptstore.errors import (
    CancelledError,
    IntegrityError,
    NotFoundError,
    SourceChangedError,
    UsageError,
)
from ckptstore.hashing import block_digest
from ckptstore.layout import RunKeys
from ckptstore.leases import STALE_SECONDS
from ckptstore.manifest import FileEntry
from ckptstore.pulling import pull
from ckptstore.records import Lease, Void
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.transfer import SourceFile
from tests.unit.support import (
    ABC,
    RUN,
    Clock,
    age,
    content,
    examples,
    file_store,
    flip,
    killed_save,
    memory_store,
    objects,
    read_tree,
    save,
    stop,
    stored_path,
    write_tree,
)

KEYS = RunKeys(RUN)
SIZE = sum(map(len, ABC.values()))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "src", ABC)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return file_store(tmp_path / "store")


def inode(path: Path) -> int:
    return path.stat().st_ino


# pull(push(tree)) == tree

SEGMENTS = st.text("ab-.[*? é", min_size=1, max_size=3).filter(lambda s: s not in (".", ".."))
TREES = st.dictionaries(
    st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join),
    st.tuples(st.binary(max_size=20), st.booleans()),
    max_size=6,
).filter(lambda tree: not any(b.startswith(f"{a}/") for a in tree for b in tree))
EMPTY = st.lists(st.sampled_from(["x", "y/z", "y/w", "q q"]), unique=True)


@pytest.mark.parametrize("kind", ["memory", "file"])
@examples(25)
@given(TREES, EMPTY)
def test_what_is_pulled_is_what_was_pushed(
    kind: str, tree: dict[str, tuple[bytes, bool]], empty: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        files = {path: data for path, (data, _) in tree.items()}
        executable = [path for path, (_, x) in tree.items() if x]
        write_tree(root / "src", files, executable=executable, empty=empty)
        store = memory_store() if kind == "memory" else file_store(root / "store")
        result = store.push(root / "src", RUN, 1)
        assert result.created
        assert result.sent == sum(map(len, files.values()))
        pull(result.checkpoint, root / "dest")
        assert read_tree(root / "dest") == files
        found = {str(p.relative_to(root / "dest")) for p in (root / "dest").rglob("*")}
        pushed = {str(p.relative_to(root / "src")) for p in (root / "src").rglob("*")}
        assert found == pushed
        for path, (_, x) in tree.items():
            assert os.access(root / "dest" / path, os.X_OK) is x or os.geteuid() == 0
            assert bool((root / "dest" / path).stat().st_mode & 0o100) is x


def test_links_inside_are_pushed_as_what_they_point_to(source: Path, store: Store) -> None:
    (source / "link").symlink_to("a.txt")
    (source / "again").symlink_to("sub")
    assert content(store.push(source, RUN, 1).checkpoint) == ABC | {
        "link": b"alpha",
        "again/b.bin": ABC["sub/b.bin"],
        "again/deep/c": b"",
    }


def test_a_source_that_is_refused_leaves_no_store_behind(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/link").symlink_to("/etc/passwd")
    with pytest.raises(Exception, match="outside"):
        file_store(tmp_path / "store").push(tmp_path / "src", RUN, 1)
    with pytest.raises(NotFoundError):
        file_store(tmp_path / "store").push(tmp_path / "none", RUN, 1)
    assert not (tmp_path / "store").exists()


def test_without_a_step_the_directory_says_it(tmp_path: Path, store: Store) -> None:
    assert store.push(write_tree(tmp_path / "step-40", ABC), RUN).checkpoint.step == 40
    with pytest.raises(UsageError):
        store.push(write_tree(tmp_path / "out", ABC), RUN)


# The same again


def test_the_same_content_again_is_the_same_commit_and_sends_nothing(
    source: Path, store: Store
) -> None:
    first = store.push(source, RUN, 1)
    before = objects(store)
    again = store.push(source, RUN, 1)
    assert (again.created, again.sent) == (False, 0)
    assert again.checkpoint.name == first.checkpoint.name
    assert objects(store) == before


def test_the_same_content_from_another_directory_is_the_same_commit(
    source: Path, store: Store, tmp_path: Path
) -> None:
    first = store.push(source, RUN, 1)
    shutil.copytree(source, tmp_path / "copy")
    assert store.push(tmp_path / "copy", RUN, 1).checkpoint.name == first.checkpoint.name


def test_tags_and_metrics_of_the_same_content_are_added_to_its_commit(
    source: Path, store: Store
) -> None:
    first = store.push(source, RUN, 1, SaveOptions(tags=["one"], metrics={"a": 1.0}))
    options = SaveOptions(tags=["two", "one"], metrics={"b": 2.0, "c": math.nan})
    again = store.push(source, RUN, 1, options)
    assert not again.created
    found = store.get(RUN, step=1)
    assert found.name == first.checkpoint.name
    assert found.tags == ["one", "two"]
    assert found.metrics == {"a": 1.0, "b": 2.0}
    before = objects(store)
    store.push(source, RUN, 1, options)
    assert objects(store) == before


@pytest.mark.parametrize(
    "change", ["content", "longer", "new file", "removed file", "exec bit", "empty directory"]
)
def test_a_source_that_differs_in_anything_makes_a_new_commit(
    change: str, source: Path, store: Store
) -> None:
    first = store.push(source, RUN, 1)
    match change:
        case "content":
            (source / "a.txt").write_bytes(b"ALPHA")
        case "longer":
            (source / "a.txt").write_bytes(b"alpha+")
        case "new file":
            (source / "new").write_bytes(b"")
        case "removed file":
            (source / "a.txt").unlink()
        case "exec bit":
            (source / "a.txt").chmod(0o755)
        case "empty directory":
            (source / "none").mkdir()
    second = store.push(source, RUN, 1)
    assert second.created
    assert second.checkpoint.seq == first.checkpoint.seq + 1
    assert content(second.checkpoint) == read_tree(source)
    assert content(store.get(RUN, name=str(first.checkpoint.name))) == ABC


def test_other_metadata_makes_a_new_commit_and_none_keeps_the_old(
    source: Path, store: Store
) -> None:
    first = store.push(source, RUN, 1, SaveOptions(metadata={"lr": 1}))
    assert not store.push(source, RUN, 1).created
    assert not store.push(source, RUN, 1, SaveOptions(metadata={"lr": 1})).created
    other = store.push(source, RUN, 1, SaveOptions(metadata={"lr": 2}))
    assert other.created
    assert other.sent == 0
    assert other.checkpoint.metadata == {"lr": 2}
    assert store.get(RUN, name=str(first.checkpoint.name)).metadata == {"lr": 1}


def test_metadata_that_json_spells_in_another_way_is_still_the_same(
    source: Path, store: Store
) -> None:
    options = SaveOptions(metadata={"betas": (0.9, 0.95), "ids": {1: "a"}})
    assert store.push(source, RUN, 1, options).created
    assert not store.push(source, RUN, 1, options).created


def test_the_same_content_at_another_step_is_another_commit(source: Path, store: Store) -> None:
    store.push(source, RUN, 1)
    second = store.push(source, RUN, 2)
    assert second.created
    assert second.sent == 0


def test_a_damaged_commit_is_not_returned_for_the_same_content(source: Path, store: Store) -> None:
    first = store.push(source, RUN, 1).checkpoint
    stored_path(first, "sub/b.bin").unlink()
    second = store.push(source, RUN, 1)
    assert second.created
    assert content(second.checkpoint) == ABC


# Dedupe


def test_an_unchanged_file_shares_its_inode_with_the_commit_before(
    source: Path, store: Store
) -> None:
    first = store.push(source, RUN, 1).checkpoint
    (source / "a.txt").write_bytes(b"new")
    second = store.push(source, RUN, 2)
    assert second.sent == 3
    for path in ABC:
        same = inode(stored_path(first, path)) == inode(stored_path(second.checkpoint, path))
        assert same is (path != "a.txt")
        assert stored_path(second.checkpoint, path).stat().st_mode & 0o777 == 0o444
    assert content(second.checkpoint) == ABC | {"a.txt": b"new"}


def test_a_deleted_checkpoint_takes_nothing_from_one_that_shares_its_files(
    source: Path, store: Store
) -> None:
    from ckptstore.maintenance import gc

    first = store.push(source, RUN, 1).checkpoint
    second = store.push(source, RUN, 2).checkpoint
    store.delete(first, grace=0.0)
    assert gc(store).removed
    assert not Path(first.path or "").exists()
    assert content(store.get(RUN, step=2)) == content(second) == ABC


def test_a_file_whose_exec_bit_changed_is_stored_anew_with_its_own_mode(
    source: Path, store: Store
) -> None:
    first = store.push(source, RUN, 1).checkpoint
    (source / "a.txt").chmod(0o755)
    second = store.push(source, RUN, 2)
    assert second.sent == 5
    assert second.checkpoint.entry("a.txt").exec
    assert not first.entry("a.txt").exec
    assert stored_path(second.checkpoint, "a.txt").stat().st_mode & 0o777 == 0o555
    assert stored_path(first, "a.txt").stat().st_mode & 0o777 == 0o444


def test_without_dedupe_each_checkpoint_has_its_own_copy(source: Path, tmp_path: Path) -> None:
    store = file_store(tmp_path / "store", dedupe="none")
    first = store.push(source, RUN, 1).checkpoint
    second = store.push(source, RUN, 2)
    assert second.sent == SIZE
    for path in ABC:
        assert inode(stored_path(first, path)) != inode(stored_path(second.checkpoint, path))


def test_reflinks_or_what_stands_in_for_them_move_no_bytes(source: Path, tmp_path: Path) -> None:
    store = file_store(tmp_path / "store", dedupe="reflink")
    store.push(source, RUN, 1)
    second = store.push(source, RUN, 2)
    assert second.sent == 0
    assert content(second.checkpoint) == ABC


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing", "link"])
def test_damage_in_the_stored_copy_is_not_passed_on(
    damage: str, source: Path, store: Store, tmp_path: Path
) -> None:
    first = store.push(source, RUN, 1).checkpoint
    path = stored_path(first, "a.txt")
    match damage:
        case "flipped":
            flip(path)
        case "shorter":
            path.chmod(0o644)
            path.write_bytes(b"alph")
        case "missing":
            path.unlink()
        case "link":
            path.unlink()
            path.symlink_to(source / "a.txt")
    second = store.push(source, RUN, 2)
    assert second.sent == 5
    assert content(second.checkpoint) == ABC


def test_nothing_is_taken_from_a_checkpoint_without_a_good_manifest(
    source: Path, store: Store
) -> None:
    first = store.push(source, RUN, 1).checkpoint
    store.backend.put(KEYS.manifest(first.name), b"not a manifest")
    second = store.push(source, RUN, 2)
    assert second.sent == SIZE
    assert content(second.checkpoint) == ABC


# A source that changes


@pytest.mark.parametrize("how", ["changed", "vanished"])
@pytest.mark.parametrize("which", ["the file that is read", "a file that was linked"])
def test_a_source_that_changes_while_it_is_pushed_is_not_committed(
    how: str, which: str, source: Path, store: Store
) -> None:
    if which == "a file that was linked":
        store.push(source, RUN, 1)
        (source / "sub/b.bin").write_bytes(b"other")
        victim = source / "a.txt"
    else:
        victim = source / "sub/b.bin"

    def spoil(_: int) -> None:
        if how == "vanished":
            victim.unlink(missing_ok=True)
        else:
            victim.write_bytes(os.urandom(5))

    before = [c.name for c in store.list(RUN)] if store.exists else []
    with pytest.raises(SourceChangedError, match=victim.name):
        store.push(source, RUN, 2, SaveOptions(progress=spoil, threads=1))
    assert [c.name for c in store.list(RUN)] == before


def test_a_file_that_grows_while_it_is_pushed_is_not_committed(source: Path, store: Store) -> None:
    def grow(_: int) -> None:
        with (source / "sub/b.bin").open("ab") as f:
            f.write(b"more")

    with pytest.raises(SourceChangedError):
        store.push(source, RUN, 1, SaveOptions(progress=grow, threads=1))
    assert store.list(RUN) == []


# Failing and taking over


def cancelled_push(store: Store, source: Path, *, after: int = 1, keep: bool = True) -> None:
    """Push until some blocks were sent, then cancel."""
    cancel = threading.Event()
    left = after

    def progress(_: int) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            cancel.set()

    options = SaveOptions(cancel=cancel, progress=progress, threads=1, keep_partial=keep)
    with pytest.raises(CancelledError):
        store.push(source, RUN, 1, options)


def test_a_cancelled_push_commits_nothing_and_cleans_up_unless_told_to_keep(
    source: Path, store: Store
) -> None:
    cancelled_push(store, source, keep=False)
    assert store.list(RUN) == []
    assert store.catalog.directories(RUN) == []
    assert store.catalog.leases(RUN) == []


def test_the_files_of_an_abandoned_push_are_taken_over_with_nothing_sent_again(
    source: Path, store: Store
) -> None:
    cancelled_push(store, source)
    (dead,) = store.catalog.directories(RUN)
    left = Path(store.backend.local_path(KEYS.directory(dead)) or "")
    assert set(read_tree(left)) == {"a.txt"}
    number = inode(left / "a.txt")
    result = store.push(source, RUN, 1)
    assert result.sent == SIZE - 5
    assert content(result.checkpoint) == ABC
    assert inode(stored_path(result.checkpoint, "a.txt")) == number
    assert store.catalog.directories(RUN) == [result.checkpoint.name]
    assert store.catalog.leases(RUN) == []
    found = store.catalog.find(RUN, dead)
    assert found is not None
    assert isinstance(found.record, Void)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_the_files_of_a_killed_push_are_taken_over(kind: str, source: Path, tmp_path: Path) -> None:
    store = memory_store() if kind == "memory" else file_store(tmp_path / "store")
    killed_save(store, 1)
    result = store.push(source, RUN, 1)
    assert result.sent == 0
    assert content(result.checkpoint) == ABC
    assert store.catalog.directories(RUN) == [result.checkpoint.name]


def test_the_files_of_a_save_of_another_step_are_left_alone(source: Path, store: Store) -> None:
    dead = killed_save(store, 2)
    result = store.push(source, RUN, 1)
    assert result.sent == SIZE
    assert dead in store.catalog.directories(RUN)


def test_what_changed_since_the_dead_push_is_sent_and_the_rest_is_not(
    source: Path, store: Store
) -> None:
    killed_save(store, 1)
    (source / "a.txt").write_bytes(b"ALPHA")
    result = store.push(source, RUN, 1)
    assert result.sent == 5
    assert content(result.checkpoint) == ABC | {"a.txt": b"ALPHA"}


def test_damage_in_the_files_of_a_dead_push_is_not_taken_over(source: Path, store: Store) -> None:
    dead = killed_save(store, 1)
    flip(Path(store.backend.local_path(KEYS.file(dead, "a.txt")) or ""))
    result = store.push(source, RUN, 1)
    assert result.sent == 5
    assert content(result.checkpoint) == ABC


def test_files_that_the_journal_of_a_dead_push_does_not_name_are_taken_over_too(
    source: Path, store: Store
) -> None:
    killed_save(store, 1)
    (held,) = store.catalog.leases(RUN)
    assert held.lease is not None
    bare = msgspec.structs.replace(held.lease, files=())
    store.backend.put(held.key, document.encode(bare))
    assert store.push(source, RUN, 1).sent == 0


def test_a_journal_that_lies_about_a_file_is_not_believed(source: Path, store: Store) -> None:
    """The digest is that of the source, the blocks are those of what lies there."""
    first = store.push(source, RUN, 1).checkpoint
    (source / "sub/b.bin").write_bytes(b"BETA" * 100)
    killed_save(store, 1, {"a.txt": b"wrong"})
    (held,) = store.catalog.leases(RUN)
    assert held.lease is not None
    honest = FileEntry.build("a.txt", 5, [block_digest(b"wrong")])
    lie = msgspec.structs.replace(honest, digest=first.entry("a.txt").digest)
    body: Lease = msgspec.structs.replace(held.lease, files=(lie,))
    store.backend.put(held.key, document.encode(body))
    result = store.push(source, RUN, 1)
    assert content(result.checkpoint)["a.txt"] == b"alpha"


def test_a_push_that_still_runs_is_left_alone(source: Path, store: Store) -> None:
    other = store.save(RUN, 1)
    other.add_bytes("a.txt", b"alpha")
    result = store.push(source, RUN, 1)
    assert result.sent == SIZE
    other.commit()
    assert len(store.list(RUN)) == 2


def test_a_push_without_a_heartbeat_for_long_is_taken_over_and_can_never_commit(
    source: Path, tmp_path: Path
) -> None:
    clock = Clock()
    store = memory_store(clock)
    asleep = store.save(RUN, 1)
    asleep.add_bytes("a.txt", b"alpha")
    clock.advance(STALE_SECONDS + 1)
    result = store.push(source, RUN, 1)
    assert result.sent == SIZE - 5
    with pytest.raises(Exception, match="given up"):
        asleep.commit()
    stop(asleep)
    assert [c.name for c in store.list(RUN)] == [result.checkpoint.name]


def test_a_stale_lease_on_disk_is_told_by_its_time(source: Path, store: Store) -> None:
    asleep = store.save(RUN, 1)
    asleep.add_bytes("a.txt", b"alpha")
    stop(asleep)
    (held,) = store.catalog.leases(RUN)
    age(store, held.key, STALE_SECONDS + 60)
    assert store.push(source, RUN, 1).sent == SIZE - 5


def test_several_dead_pushes_are_all_taken_over_and_removed(source: Path, store: Store) -> None:
    killed_save(store, 1, {"a.txt": b"alpha"})
    killed_save(store, 1, {"sub/b.bin": ABC["sub/b.bin"]})
    result = store.push(source, RUN, 1)
    assert result.sent == 0
    assert store.catalog.directories(RUN) == [result.checkpoint.name]


def test_progress_adds_up_to_the_size_whether_bytes_are_sent_or_not(
    source: Path, store: Store
) -> None:
    for step in (1, 2):
        told: list[int] = []
        store.push(source, RUN, step, SaveOptions(progress=told.append))
        assert sum(told) == SIZE


def test_a_push_onto_an_unreadable_newest_record_is_a_new_commit(
    source: Path, store: Store
) -> None:
    first = store.push(source, RUN, 1).checkpoint
    store.backend.put(KEYS.record(first.name), b"damaged")
    second = store.push(source, RUN, 1)
    assert second.created
    assert content(second.checkpoint) == ABC
    with pytest.raises(IntegrityError):
        store.get(RUN, name=str(first.name))


def test_a_push_of_an_older_state_after_a_newer_one_is_the_newest(
    tmp_path: Path, store: Store
) -> None:
    save(store, 5, {"a": b"1"})
    save(store, 5, {"a": b"2"})
    result = store.push(write_tree(tmp_path / "src", {"a": b"1"}), RUN, 5)
    assert result.created
    assert store.get(RUN, step=5).name == result.checkpoint.name


@pytest.mark.parametrize("below", ["", "store"])
def test_a_directory_that_is_or_holds_the_store_is_not_pushed(below: str, tmp_path: Path) -> None:
    store = file_store(tmp_path / below)
    save(store)
    before = read_tree(tmp_path)
    with pytest.raises(UsageError, match="inside"):
        store.push(tmp_path, RUN, 2)
    assert read_tree(tmp_path) == before


def test_a_directory_that_is_the_store_by_another_name_is_not_pushed(tmp_path: Path) -> None:
    save(file_store(tmp_path / "store"))
    (tmp_path / "link").symlink_to("store")
    before = read_tree(tmp_path / "store")
    with pytest.raises(UsageError, match="inside"):
        file_store(tmp_path / "link").push(tmp_path / "store", RUN, 2)
    assert read_tree(tmp_path / "store") == before


def test_what_an_interrupted_pull_left_in_a_source_is_not_pushed(
    store: Store, source: Path
) -> None:
    write_tree(source, {".ckpt-pull-00001-step-00000001-abcdefgh/files/a": b"half"})
    with pytest.raises(UsageError, match=r"\.ckpt-pull-"):
        store.push(source, RUN, 1)
    assert not store.exists


def test_a_file_that_differs_is_compared_once_and_then_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's newest commit, which is also the run's newest, is no reason to read it again."""
    read: list[str] = []
    original = SourceFile.read_into

    def counted(self: SourceFile, offset: int, buffer: memoryview) -> int:
        read.append(os.path.basename(self._path))
        return original(self, offset, buffer)

    monkeypatch.setattr(SourceFile, "read_into", counted)
    store = file_store(tmp_path / "store")
    tree = tmp_path / "tree"
    write_tree(tree, {"changes": b"one", "stays": b"same"})
    store.push(tree, RUN, 1)
    read.clear()
    (tree / "changes").write_bytes(b"two")
    assert store.push(tree, RUN, 1).sent == 3
    assert sorted(read) == ["changes", "changes", "stays"]
