from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from ckptstore.errors import CancelledError, IntegrityError, NotFoundError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import RunKeys
from ckptstore.maintenance import CheckResult, gc, verify, verify_run
from ckptstore.resume import plan_resume
from ckptstore.store import Store
from tests.unit.support import (
    ABC,
    RUN,
    failed_save,
    file_store,
    flip,
    flipped,
    killed_save,
    memory_store,
    objects,
    read_tree,
    save,
    stored_path,
)
from tests.unit.test_reading import read_only

KEYS = RunKeys(RUN)
SIZE = sum(map(len, ABC.values()))
BIG = random.Random(17).randbytes((1 << 20) + 3) * 33


def check(store: Store, *, deep: bool = False, step: int = 1) -> CheckResult:
    return verify(store.get(RUN, step=step), deep=deep)


def test_a_whole_checkpoint_is_ok_and_a_deep_look_counts_its_bytes() -> None:
    store = memory_store()
    checkpoint = save(store)
    quick, deep = check(store), check(store, deep=True)
    assert (quick.ok, quick.checked_bytes) == (True, 0)
    assert (deep.ok, deep.checked_bytes, deep.damage, deep.extra) == (True, SIZE, (), ())
    assert (deep.ref, deep.run, deep.name) == (f"{RUN}@1", RUN, str(checkpoint.name))


def test_a_deep_look_that_finds_it_whole_is_noted_and_a_quick_one_is_not() -> None:
    store = memory_store()
    save(store)
    check(store)
    assert store.get(RUN, step=1).standing.verified is None
    check(store, deep=True)
    assert store.get(RUN, step=1).standing.verified is not None


@pytest.mark.parametrize("position", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, len(BIG) - 1])
def test_a_flipped_bit_anywhere_is_found_in_its_block(position: int, tmp_path: Path) -> None:
    store = file_store(tmp_path)
    checkpoint = save(store, files={"big": BIG, "other": b"x"})
    flip(stored_path(checkpoint, "big"), position)
    assert check(store).ok
    result = check(store, deep=True)
    (damage,) = result.damage
    offset = position // BLOCK_SIZE * BLOCK_SIZE
    assert (damage.path, damage.offset) == ("big", offset)
    assert damage.length == min(BLOCK_SIZE, len(BIG) - offset)
    assert store.get(RUN, step=1).state == "damaged"


@pytest.mark.parametrize("deep", [False, True])
def test_missing_files_and_wrong_sizes_are_found_by_any_look(deep: bool) -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.put(checkpoint.key("a.txt"), b"alpha!")
    store.backend.delete([checkpoint.key("sub/b.bin")])
    result = check(store, deep=deep)
    assert [(d.path, d.reason) for d in result.damage] == [
        ("a.txt", "size is 6, must be 5"),
        ("sub/b.bin", "missing"),
    ]
    assert store.get(RUN, step=1).state == "damaged"


def test_an_empty_file_that_is_missing_or_not_empty_is_found_by_a_deep_look() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.put(checkpoint.key("sub/deep/c"), b"x")
    assert [d.path for d in check(store, deep=True).damage] == ["sub/deep/c"]
    store.backend.delete([checkpoint.key("sub/deep/c")])
    assert [d.reason for d in check(store, deep=True).damage] == ["missing"]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_a_bad_manifest_is_damage_and_no_file_is_read(how: str, deep: bool) -> None:
    store = memory_store()
    key = KEYS.manifest(save(store).name)
    data = store.backend.read(key, 2**20)
    store.backend.put(key, data[:-1] if how == "cut" else flipped(data, 100))
    if how == "missing":
        store.backend.delete([key])
    result = check(store, deep=deep)
    assert [d.path for d in result.damage] == ["MANIFEST.json"]
    assert result.checked_bytes == 0


def test_files_that_the_manifest_does_not_name_are_reported_and_no_damage() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.put(checkpoint.key("planted.py"), b"evil")
    result = check(store, deep=True)
    assert result.ok
    assert result.extra == ("planted.py",)


def test_damage_that_was_repaired_is_no_damage_any_more() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.put(checkpoint.key("a.txt"), b"alphA")
    assert not check(store, deep=True).ok
    store.backend.put(checkpoint.key("a.txt"), b"alpha")
    assert not check(store).ok, "sizes prove nothing about content"
    assert store.get(RUN, step=1).state == "damaged"
    assert check(store, deep=True).ok
    assert check(store).ok
    assert store.get(RUN, step=1).state == "ok"


def test_the_same_result_again_is_noted_once() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.put(checkpoint.key("a.txt"), b"alphA")
    check(store, deep=True)
    before = objects(store)
    check(store, deep=True)
    assert objects(store) == before


def test_verification_changes_no_file_of_the_checkpoint() -> None:
    store = memory_store()
    save(store)
    before = objects(store)
    check(store, deep=True)
    after = objects(store)
    assert before.items() <= after.items()
    assert {k for k in after if k not in before} == {
        k for k in after if k.startswith(KEYS.marks) and k not in before
    }


@pytest.mark.parametrize("damage", [False, True])
def test_a_store_that_cannot_be_written_can_be_verified(damage: bool) -> None:
    store = memory_store()
    checkpoint = save(store)
    if damage:
        store.backend.put(checkpoint.key("a.txt"), b"alphA")
    assert check(read_only(store), deep=True).ok is not damage


def test_progress_is_told_of_every_byte_and_cancelling_ends_it() -> None:
    store = memory_store()
    checkpoint = save(store, files={"big": BIG})
    told: list[int] = []
    verify(checkpoint, deep=True, progress=told.append)
    assert sum(told) == len(BIG)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        verify(checkpoint, deep=True, cancel=cancel)


# A whole run


def test_every_commit_of_a_run_is_verified_and_nothing_else() -> None:
    store = memory_store()
    old, new = save(store, 5), save(store, 5)
    failed_save(store, 6)
    killed_save(store, 7)
    store.delete(old)
    older = save(store, 5)
    results = list(verify_run(store, RUN, deep=True))
    assert [(r.name, r.ref, r.ok) for r in results] == [
        (str(new.name), f"{RUN}@{new.name}", True),
        (str(older.name), f"{RUN}@5", True),
    ]


def test_a_record_that_cannot_be_read_is_damage_of_its_checkpoint() -> None:
    store = memory_store()
    save(store, 1)
    bad = save(store, 2)
    store.backend.put(KEYS.record(bad.name), b"x")
    first, second = verify_run(store, RUN)
    assert first.ok
    assert not second.ok
    assert second.name == str(bad.name)
    assert second.damage[0].path == f"commits/{bad.name}.json"


def test_a_mark_that_cannot_be_read_is_damage() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.pin(checkpoint)
    (mark,) = store.backend.list(KEYS.marks_of(checkpoint.name))
    store.backend.put(mark.key, b"x")
    (result,) = verify_run(store, RUN)
    assert [d.path for d in result.damage] == [mark.key.removeprefix(f"{RUN}/")]


def test_damage_in_one_does_not_end_the_verification_of_the_others() -> None:
    store = memory_store()
    for step in (1, 2, 3):
        save(store, step)
    store.backend.put(store.get(RUN, step=2).key("a.txt"), b"alphA")
    results = list(verify_run(store, RUN, deep=True))
    assert [r.ok for r in results] == [True, False, True]


def test_a_store_that_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        list(verify_run(memory_store(), RUN))


def test_a_complete_directory_whose_record_is_missing_is_damage_of_its_run() -> None:
    store = memory_store()
    save(store, 1)
    lost = save(store, 2)
    killed_save(store, 3)
    failed_save(store, 4)
    store.backend.delete([KEYS.record(lost.name)])
    results = {r.name: r for r in verify_run(store, RUN)}
    assert len(results) == 2
    (damage,) = results[str(lost.name)].damage
    assert (damage.path, damage.reason) == (f"commits/{lost.name}.json", "its record is missing")


@pytest.mark.timeout(20)
def test_a_stored_file_that_is_a_fifo_is_damage_and_blocks_nothing(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    checkpoint = save(store)
    path = stored_path(checkpoint, "a.txt")
    path.unlink()
    os.mkfifo(path)
    for deep in (False, True):
        assert [d.path for d in check(store, deep=deep).damage] == ["a.txt"]
    with pytest.raises(IntegrityError, match=r"a\.txt"):
        store.get(RUN, step=1).read_bytes("a.txt")
    assert store.get(RUN, step=1).state == "damaged"


@pytest.mark.timeout(20)
def test_a_manifest_that_is_a_fifo_is_damage_and_blocks_nothing(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    path = tmp_path / KEYS.manifest(save(store).name)
    path.unlink()
    os.mkfifo(path)
    assert [d.path for d in check(store, deep=True).damage] == ["MANIFEST.json"]


def spoiled_record(store: Store, root: Path, how: str) -> str:
    """The name of a commit at whose key there is no file any more."""
    save(store, 1)
    bad = save(store, 2)
    path = root / KEYS.record(bad.name)
    path.rename(root / RUN / "aside")
    if how == "fifo":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to("../aside")
    else:
        path.mkdir()
    return str(bad.name)


SPOILED = pytest.mark.parametrize("how", ["fifo", "link", "directory"])


@pytest.mark.timeout(20)
@SPOILED
def test_a_record_that_is_no_file_is_an_integrity_error_and_blocks_nothing(
    how: str, tmp_path: Path
) -> None:
    store = file_store(tmp_path)
    name = spoiled_record(store, tmp_path, how)
    with pytest.raises(IntegrityError):
        store.get(RUN, name=name)
    assert store.get(RUN, step=1).step == 1


@pytest.mark.timeout(20)
@SPOILED
def test_a_record_that_is_no_file_is_damage_in_listings_and_verification(
    how: str, tmp_path: Path
) -> None:
    store = file_store(tmp_path)
    name = spoiled_record(store, tmp_path, how)
    assert [(r.step, r.state) for r in store.rows(RUN)] == [(1, "ok"), (2, "damaged")]
    results = {r.name: r.ok for r in verify_run(store, RUN)}
    assert results.get(name) is False


@pytest.mark.timeout(20)
@SPOILED
def test_gc_keeps_a_checkpoint_whose_record_is_no_file(how: str, tmp_path: Path) -> None:
    store = file_store(tmp_path)
    name = spoiled_record(store, tmp_path, how)
    before = read_tree(tmp_path / RUN / name)
    assert gc(store, grace=0).removed == ()
    assert read_tree(tmp_path / RUN / name) == before


@pytest.mark.timeout(20)
@SPOILED
def test_a_dry_run_of_gc_keeps_a_checkpoint_whose_record_is_no_file(
    how: str, tmp_path: Path
) -> None:
    store = file_store(tmp_path)
    spoiled_record(store, tmp_path, how)
    assert gc(store, grace=0, dry_run=True).removed == ()


@pytest.mark.timeout(20)
@SPOILED
def test_a_run_whose_only_record_is_no_file_is_no_start_from_scratch(
    how: str, tmp_path: Path
) -> None:
    store = file_store(tmp_path)
    spoiled_record(store, tmp_path, how)
    store.delete(store.get(RUN, step=1), force=True)
    with pytest.raises(IntegrityError):
        plan_resume(store, RUN).require()
