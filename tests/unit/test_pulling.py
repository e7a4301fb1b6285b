from __future__ import annotations

import fcntl
import os
import random
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import deleting
from ckptstore.backends.base import Reader
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.errors import (
    AccessDeniedError,
    CancelledError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    TemporaryError,
)
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import STAGING_PREFIX, RunKeys
from ckptstore.manifest import FileEntry
from ckptstore.pulling import PullResult, pull, select
from ckptstore.reading import Checkpoint
from ckptstore.store import Store
from tests.unit.support import (
    ABC,
    RUN,
    examples,
    file_store,
    memory_store,
    objects,
    read_tree,
    save,
    write_tree,
)

BIG = random.Random(13).randbytes((1 << 20) + 1) * 33
"""Three blocks, the last a short one."""

SIZE = sum(map(len, ABC.values()))


@pytest.fixture
def checkpoint() -> Checkpoint:
    return save(memory_store())


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


def test_exactly_the_pushed_files_arrive(checkpoint: Checkpoint, dest: Path) -> None:
    result = pull(checkpoint, dest)
    assert read_tree(dest) == ABC
    assert (result.files, result.size, result.fetched) == (3, SIZE, SIZE)
    assert sorted(p.name for p in dest.iterdir()) == ["a.txt", "sub"]


def test_missing_parents_of_the_destination_are_made(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    pull(checkpoint, tmp_path / "a/b/c")
    assert read_tree(tmp_path / "a/b/c") == ABC


def test_an_existing_empty_destination_is_taken(checkpoint: Checkpoint, dest: Path) -> None:
    dest.mkdir()
    pull(checkpoint, dest)
    assert read_tree(dest) == ABC


def test_exec_bits_and_empty_directories_arrive_and_files_can_be_written(
    tmp_path: Path, dest: Path
) -> None:
    source = write_tree(
        tmp_path / "src", {"run.sh": b"#!", "data": b"x"}, executable=["run.sh"], empty=["e/f"]
    )
    old = os.umask(0o022)
    try:
        pull(memory_store().push(source, RUN, 1).checkpoint, dest)
    finally:
        os.umask(old)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in dest.iterdir() if p.is_file()}
    assert modes == {"run.sh": 0o755, "data": 0o644}
    assert (dest / "e/f").is_dir()


def test_pulled_files_share_nothing_with_the_store(tmp_path: Path, dest: Path) -> None:
    checkpoint = save(file_store(tmp_path / "store"))
    pull(checkpoint, dest)
    (dest / "a.txt").write_bytes(b"mine")
    assert checkpoint.read_bytes("a.txt") == b"alpha"


def test_an_empty_checkpoint_makes_an_empty_directory(dest: Path) -> None:
    pull(save(memory_store(), files={}), dest)
    assert list(dest.iterdir()) == []


# A destination that is taken


def test_a_destination_that_holds_something_is_a_conflict_and_is_left_alone(
    checkpoint: Checkpoint, dest: Path
) -> None:
    write_tree(dest, {"mine": b"mine"})
    with pytest.raises(ConflictError, match="mine"):
        pull(checkpoint, dest)
    assert sorted(p.name for p in dest.iterdir()) == ["mine"]


def test_force_replaces_files_of_the_same_names_and_leaves_others(
    checkpoint: Checkpoint, dest: Path
) -> None:
    write_tree(dest, {"mine": b"mine", "a.txt": b"old", "sub/other": b"other"})
    pull(checkpoint, dest, force=True)
    assert read_tree(dest) == ABC | {"mine": b"mine", "sub/other": b"other"}


def test_a_second_pull_into_the_result_of_the_first_is_a_conflict(
    checkpoint: Checkpoint, dest: Path
) -> None:
    pull(checkpoint, dest)
    with pytest.raises(ConflictError):
        pull(checkpoint, dest)


@pytest.mark.parametrize("force", [False, True])
def test_a_file_in_place_of_the_destination_is_a_conflict(
    force: bool, checkpoint: Checkpoint, dest: Path
) -> None:
    dest.write_bytes(b"mine")
    with pytest.raises(ConflictError, match="not a directory"):
        pull(checkpoint, dest, force=force)
    assert dest.read_bytes() == b"mine"


def test_a_destination_in_which_another_pull_works_is_a_conflict(
    checkpoint: Checkpoint, dest: Path
) -> None:
    staging = dest / f"{STAGING_PREFIX}{checkpoint.name}"
    staging.mkdir(parents=True)
    fd = os.open(staging, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConflictError, match="another pull"):
            pull(checkpoint, dest)
    finally:
        os.close(fd)
    pull(checkpoint, dest)
    assert read_tree(dest) == ABC


def refused_before_any_byte(checkpoint: Checkpoint, dest: Path) -> None:
    """The pull is refused at once, and what the destination held is as it was."""
    before = read_tree(dest) if dest.exists() else {}
    told: list[int] = []
    with pytest.raises(ConflictError):
        pull(checkpoint, dest, force=True, progress=told.append)
    assert told == []
    assert {k: v for k, v in read_tree(dest).items() if not k.startswith(STAGING_PREFIX)} == before


@pytest.mark.parametrize("target", ["../outside", "inside", "nowhere"])
def test_a_symbolic_link_on_the_way_is_refused_and_nothing_is_written_through_it(
    target: str, checkpoint: Checkpoint, dest: Path, tmp_path: Path
) -> None:
    write_tree(tmp_path / "outside", {"b.bin": b"precious"})
    write_tree(dest, {"inside/b.bin": b"precious too"})
    (dest / "sub").symlink_to(target)
    refused_before_any_byte(checkpoint, dest)
    assert read_tree(tmp_path / "outside") == {"b.bin": b"precious"}


def test_a_deeper_symbolic_link_on_the_way_is_refused(
    checkpoint: Checkpoint, dest: Path, tmp_path: Path
) -> None:
    write_tree(tmp_path / "outside", {"c": b"precious"})
    (dest / "sub").mkdir(parents=True)
    (dest / "sub/deep").symlink_to(tmp_path / "outside")
    refused_before_any_byte(checkpoint, dest)
    assert read_tree(tmp_path / "outside") == {"c": b"precious"}


def test_a_symbolic_link_in_place_of_a_file_is_replaced_and_not_followed(
    checkpoint: Checkpoint, dest: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    dest.mkdir()
    (dest / "a.txt").symlink_to(tmp_path / "precious")
    pull(checkpoint, dest, force=True)
    assert not (dest / "a.txt").is_symlink()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_symbolic_link_to_a_directory_can_be_the_destination(
    checkpoint: Checkpoint, dest: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    dest.symlink_to("real")
    pull(checkpoint, dest)
    assert read_tree(tmp_path / "real") == ABC


@pytest.mark.parametrize("tree", [{"a.txt/x": b""}, {"sub": b""}, {"sub/deep": b""}])
def test_a_directory_in_place_of_a_file_or_the_other_way_round_is_refused_at_once(
    tree: dict[str, bytes], checkpoint: Checkpoint, dest: Path
) -> None:
    refused_before_any_byte(checkpoint, write_tree(dest, tree))


def test_a_file_in_place_of_an_empty_directory_is_refused_at_once(
    tmp_path: Path, dest: Path
) -> None:
    source = write_tree(tmp_path / "src", {"a": b"a"}, empty=["d"])
    checkpoint = memory_store().push(source, RUN, 1).checkpoint
    refused_before_any_byte(checkpoint, write_tree(dest, {"d": b"a file"}))


@pytest.mark.parametrize(
    ("folds", "one", "two", "conflict"),
    [
        ({"case"}, "A/f", "a/f", True),
        ({"case", "form"}, "\u00e9", "E\u0301", True),
        ({"form"}, "\u00e9", "e\u0301", True),
        ({"form"}, "A", "a", False),
        (set(), "A", "a", False),
    ],
)
def test_names_that_are_one_name_on_the_file_system_are_refused_before_any_byte(
    folds: set[str], one: str, two: str, conflict: bool, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.pulling._Target._folds", lambda _: folds)
    checkpoint = save(memory_store(), files={one: b"1", two: b"2"})
    if conflict:
        refused_before_any_byte(checkpoint, dest)
    else:
        pull(checkpoint, dest)
        assert read_tree(dest) == {one: b"1", two: b"2"}


# Choosing files


def test_include_and_exclude_choose_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    cases: list[tuple[list[str], list[str], set[str]]] = [
        (["a.txt"], [], {"a.txt"}),
        (["sub/*"], [], {"sub/b.bin", "sub/deep/c"}),
        ([], ["sub/*"], {"a.txt"}),
        (["*"], ["*.bin"], {"a.txt", "sub/deep/c"}),
        (["a.*", "*/c"], [], {"a.txt", "sub/deep/c"}),
    ]
    for i, (include, exclude, expected) in enumerate(cases):
        result = pull(checkpoint, tmp_path / str(i), include=include, exclude=exclude)
        assert set(read_tree(tmp_path / str(i))) == expected
        assert result.files == len(expected)


@pytest.mark.parametrize(
    ("include", "exclude"), [(["nothing"], []), ([], ["*"]), (["A.TXT"], []), (["a.txt"], ["a*"])]
)
def test_patterns_that_match_nothing_are_an_error_before_anything_is_made(
    include: list[str], exclude: list[str], checkpoint: Checkpoint, dest: Path
) -> None:
    with pytest.raises(NotFoundError):
        pull(checkpoint, dest, include=include, exclude=exclude)
    assert not dest.exists()


def test_only_the_chosen_files_need_to_be_intact(checkpoint: Checkpoint, dest: Path) -> None:
    checkpoint.catalog.backend.delete([checkpoint.key("sub/b.bin")])
    pull(checkpoint, dest, include=["a.txt"])
    assert set(read_tree(dest)) == {"a.txt"}


@examples(100)
@given(st.lists(st.text("ab/", min_size=1, max_size=4), unique=True, max_size=6))
def test_excluding_exactly_what_another_includes_leaves_the_rest(paths: list[str]) -> None:
    files = [FileEntry.build(path, 0, []) for path in paths]
    chosen = select(files, include=["a*"])
    rest = select(files, exclude=["a*"])
    assert chosen == [e for e in files if e.path.startswith("a")]
    assert [e for e in files if e in chosen or e in rest] == files
    assert not [e for e in chosen if e in rest]
    assert select(files) == files


# Damage


def damaged(checkpoint: Checkpoint, how: str) -> None:
    backend = checkpoint.catalog.backend
    key = checkpoint.key("sub/b.bin")
    match how:
        case "flipped":
            backend.put(key, b"Beta" + ABC["sub/b.bin"][4:])
        case "shorter":
            backend.put(key, b"beta")
        case "longer":
            backend.put(key, ABC["sub/b.bin"] + b"!")
        case "missing":
            backend.delete([key])


@pytest.mark.parametrize("how", ["flipped", "shorter", "longer", "missing"])
def test_damage_is_an_integrity_error_and_nothing_is_in_the_destination(
    how: str, checkpoint: Checkpoint, dest: Path
) -> None:
    damaged(checkpoint, how)
    with pytest.raises(IntegrityError) as caught:
        pull(checkpoint, dest)
    assert [d.path for d in caught.value.damage] == ["sub/b.bin"]
    assert f"{RUN}@1 is damaged" in str(caught.value)
    assert list(dest.iterdir()) == []
    assert checkpoint.state == "damaged"


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_damage_found_by_a_forced_pull_leaves_the_destination_as_it_was(
    how: str, checkpoint: Checkpoint, dest: Path
) -> None:
    damaged(checkpoint, how)
    write_tree(dest, {"a.txt": b"mine"})
    with pytest.raises(IntegrityError):
        pull(checkpoint, dest, force=True)
    assert read_tree(dest) == {"a.txt": b"mine"}


def test_the_damaged_block_is_named(dest: Path) -> None:
    store = memory_store()
    checkpoint = save(store, files={"big": BIG})
    bad = bytearray(BIG)
    bad[BLOCK_SIZE] ^= 1
    store.backend.put(checkpoint.key("big"), bytes(bad))
    with pytest.raises(IntegrityError) as caught:
        pull(checkpoint, dest)
    (damage,) = caught.value.damage
    assert (damage.path, damage.offset, damage.length) == ("big", BLOCK_SIZE, BLOCK_SIZE)
    assert list(dest.iterdir()) == []


def test_a_damaged_manifest_is_an_integrity_error_before_anything_is_made(dest: Path) -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.put(RunKeys(RUN).manifest(checkpoint.name), b"x")
    with pytest.raises(IntegrityError):
        pull(store.get(RUN, step=1), dest)
    assert not dest.exists()


def test_damage_in_a_store_that_cannot_be_written_is_still_reported_as_damage(
    dest: Path,
) -> None:
    class ReadOnly(MemoryBackend):
        def create_exclusive(self, key: str, data: bytes) -> bool:
            raise AccessDeniedError("read-only")

    store = memory_store()
    damaged(save(store), "flipped")
    assert isinstance(store.backend, MemoryBackend)
    checkpoint = Store(ReadOnly(store.backend.space)).get(RUN, step=1)
    with pytest.raises(IntegrityError):
        pull(checkpoint, dest)
    assert list(dest.iterdir()) == []


def test_a_pull_changes_nothing_in_the_store(dest: Path) -> None:
    store = memory_store()
    checkpoint = save(store)
    before = objects(store)
    pull(checkpoint, dest)
    assert objects(store) == before


# Interruption


class Counting(MemoryBackend):
    """Notes what is read, and can fail at a key."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self.opened: list[str] = []
        self.fails: str | None = None

    def open_reader(self, key: str) -> Reader:
        if self.fails is not None and key.endswith(self.fails):
            raise TemporaryError("the storage is away")
        self.opened.append(key.rpartition("/")[2])
        return super().open_reader(key)


def interrupted(checkpoint: Checkpoint, dest: Path, after: int, **how: Any) -> None:
    """Pull until ``after`` blocks were done, then cancel."""
    cancel = threading.Event()
    left = after

    def progress(_: int) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            cancel.set()

    with pytest.raises(CancelledError):
        pull(checkpoint, dest, cancel=cancel, progress=progress, threads=1, **how)


def visible(dest: Path) -> list[str]:
    return [p.name for p in dest.iterdir() if not p.name.startswith(STAGING_PREFIX)]


def test_a_cancelled_pull_shows_no_file_and_the_next_takes_up_where_it_was(dest: Path) -> None:
    backend = Counting(Space())
    checkpoint = save(Store(backend), files={"1": b"one", "2": b"two", "3": b"three"})
    interrupted(checkpoint, dest, 2)
    assert visible(dest) == []
    backend.opened.clear()
    told: list[int] = []
    result = pull(checkpoint, dest, progress=told.append)
    assert backend.opened == ["3"]
    assert (result.fetched, result.size) == (5, 11)
    assert read_tree(dest) == {"1": b"one", "2": b"two", "3": b"three"}
    assert sum(told) == 11


def test_an_error_of_the_storage_keeps_what_was_fetched(dest: Path) -> None:
    backend = Counting(Space())
    checkpoint = save(Store(backend), files={"1": b"one", "2": b"two"})
    backend.fails = "/2"
    with pytest.raises(TemporaryError):
        pull(checkpoint, dest, threads=1)
    assert visible(dest) == []
    backend.fails = None
    assert pull(checkpoint, dest).fetched == 3
    assert read_tree(dest) == {"1": b"one", "2": b"two"}


def test_good_blocks_of_an_interrupted_file_are_kept(dest: Path) -> None:
    checkpoint = save(memory_store(), files={"big": BIG})
    interrupted(checkpoint, dest, 2)
    assert visible(dest) == []
    assert pull(checkpoint, dest).fetched == len(BIG) - 2 * BLOCK_SIZE
    assert read_tree(dest) == {"big": BIG}


def part_of(dest: Path) -> Path:
    (part,) = [p for p in dest.rglob("*") if p.parent.name == "parts"]
    return part


@pytest.mark.parametrize("how", ["flipped", "zeroed", "shorter", "longer", "empty"])
def test_what_an_interrupted_pull_left_is_not_trusted(how: str, dest: Path) -> None:
    checkpoint = save(memory_store(), files={"big": BIG})
    interrupted(checkpoint, dest, 2)
    part = part_of(dest)
    data = part.read_bytes()
    part.write_bytes(
        {
            "flipped": b"!" + data[1:],
            "zeroed": bytes(len(data)),
            "shorter": data[:-1],
            "longer": data + b"x",
            "empty": b"",
        }[how]
    )
    pull(checkpoint, dest)
    assert read_tree(dest) == {"big": BIG}


def test_zeros_are_written_over_what_an_interrupted_pull_left_in_their_place(dest: Path) -> None:
    data = b"a" * BLOCK_SIZE + bytes(BLOCK_SIZE) + b"tail"
    checkpoint = save(memory_store(), files={"big": data})
    interrupted(checkpoint, dest, 1)
    part_of(dest).write_bytes(b"x" * len(data))
    pull(checkpoint, dest)
    assert read_tree(dest) == {"big": data}


@pytest.mark.parametrize("change", [b"ONE", b"longer", b""])
def test_a_whole_file_of_an_interrupted_pull_is_checked_before_it_is_kept(
    change: bytes, dest: Path
) -> None:
    checkpoint = save(memory_store(), files={"1": b"one", "2": b"two"})
    interrupted(checkpoint, dest, 1)
    (staged,) = [p for p in dest.rglob("1") if p.parent.name == "files"]
    staged.write_bytes(change)
    assert pull(checkpoint, dest).fetched == 6
    assert read_tree(dest) == {"1": b"one", "2": b"two"}


def test_another_choice_of_files_after_an_interruption_arrives_right(dest: Path) -> None:
    checkpoint = save(memory_store(), files={"1": b"same", "2": b"same", "3": b"other"})
    interrupted(checkpoint, dest, 1)
    pull(checkpoint, dest, include=["2", "3"])
    assert read_tree(dest) == {"2": b"same", "3": b"other"}


def test_an_interrupted_pull_of_one_checkpoint_does_not_disturb_that_of_another(
    dest: Path,
) -> None:
    store = memory_store()
    first, second = save(store, 1, {"1": b"one", "2": b"x"}), save(store, 2, {"1": b"two"})
    interrupted(first, dest, 1)
    pull(second, dest)
    assert (dest / "1").read_bytes() == b"two"


def failing_rename(monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[[], None]:
    """Let the power go when ``name`` is moved into place."""
    rename = os.rename

    def stopping(source: str, target: str) -> None:
        if target.endswith(name) and "/parts/" not in source:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("ckptstore.pulling.os.rename", stopping)
    return lambda: monkeypatch.setattr("ckptstore.pulling.os.rename", rename)


def test_a_pull_interrupted_while_it_moved_files_into_place_is_finished_by_the_next(
    dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Counting(Space())
    files = {"1": b"one", "2": b"two", "d/3": b"three"}
    checkpoint = save(Store(backend), files=files)
    restore = failing_rename(monkeypatch, "/dest/2")
    with pytest.raises(KeyboardInterrupt):
        pull(checkpoint, dest)
    restore()
    assert visible(dest) == ["1"]
    backend.opened.clear()
    result = pull(checkpoint, dest)
    assert backend.opened == []
    assert result.fetched == 0
    assert read_tree(dest) == files


def test_the_outcome_counts_files_bytes_and_seconds(checkpoint: Checkpoint, dest: Path) -> None:
    result = pull(checkpoint, dest, include=["a.txt"])
    assert isinstance(result, PullResult)
    assert (result.files, result.size, result.fetched) == (1, 5, 5)
    assert result.seconds >= 0


@pytest.mark.parametrize("known", [True, False])
def test_a_checkpoint_that_was_purged_meanwhile_is_not_found_and_gets_no_mark(
    known: bool, dest: Path
) -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    if known:
        assert old.files  # its manifest was read before
    store.delete(old)
    _, trash = store.catalog.find_trash(RUN, old.name)
    assert deleting.purge(store.catalog, RUN, old.name, trash, "over")
    before = objects(store)
    with pytest.raises(NotFoundError):
        pull(old, dest)
    assert objects(store) == before
    assert not dest.exists() or read_tree(dest) == {}
