"""Repair: what comes back, from where, and what is never touched."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from ckptstore.backends.local import LocalBackend
from ckptstore.errors import IntegrityError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import MARKER, Name, RunKeys
from ckptstore.maintenance import (
    RepairResult,
    gc,
    repair,
    repair_name,
    repair_run,
    restore_marker,
    verify,
    verify_run,
)
from ckptstore.mirrors import expect_mirror, note_attempt
from ckptstore.reading import Checkpoint
from ckptstore.resume import plan_resume
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.uri import parse_ref
from ckptstore.voiding import discard
from tests.conftest import FULL
from tests.unit.support import (
    ABC,
    RUN,
    age,
    content,
    file_store,
    flip,
    flipped,
    killed_save,
    memory_store,
    save,
    stored_path,
)

KEYS = RunKeys(RUN)
BIG = random.Random(17).randbytes((1 << 20) + 3) * 33
"""Three blocks, the last one short."""


def mirror_of(store: Store, root: Path) -> Store:
    """A mirror as `cp -a` makes it."""
    shutil.copytree(store.uri, root, symlinks=True)
    return file_store(root)


def whole(store: Store, run: str = RUN) -> bool:
    return all(r.ok for r in verify_run(store, run, deep=True))


def mend(store: Store, *sources: Store, step: int = 1) -> RepairResult:
    return repair(store.get(RUN, step=step), sources)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = file_store(tmp_path / "store", dedupe="none")
    save(store, 1, {**ABC, "big": BIG})
    return store


@pytest.fixture
def mirror(store: Store, tmp_path: Path) -> Store:
    return mirror_of(store, tmp_path / "mirror")


# Files


@pytest.mark.parametrize("position", [0, BLOCK_SIZE - 1, BLOCK_SIZE, len(BIG) - 1])
def test_only_the_damaged_block_is_fetched(position: int, store: Store, mirror: Store) -> None:
    flip(stored_path(store.get(RUN, step=1), "big"), position)
    result = mend(store, mirror)
    block = min(BLOCK_SIZE, len(BIG) - position // BLOCK_SIZE * BLOCK_SIZE)
    assert (result.ok, result.fetched_bytes) == (True, block)
    assert [f.path for f in result.fixed] == ["big"]
    assert content(store.get(RUN, step=1)) == {**ABC, "big": BIG}
    assert store.get(RUN, step=1).state == "ok"
    assert whole(store)


@pytest.mark.parametrize("how", ["missing", "cut", "long", "empty", "fifo", "link"])
def test_what_is_no_file_of_its_size_comes_back(how: str, store: Store, mirror: Store) -> None:
    path = stored_path(store.get(RUN, step=1), "big")
    path.unlink()
    if how == "fifo":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to("a.txt")
    elif how != "missing":
        path.write_bytes({"cut": BIG[: BLOCK_SIZE + 5], "long": BIG + b"x", "empty": b""}[how])
    result = mend(store, mirror)
    assert result.ok
    own = {"cut": BLOCK_SIZE, "long": len(BIG)}.get(how, 0)
    assert result.fetched_bytes == len(BIG) - own, "its own good blocks are not fetched"
    assert stored_path(store.get(RUN, step=1), "big").read_bytes() == BIG
    assert whole(store)


def test_a_directory_in_the_place_of_a_file_is_left_and_the_rest_is_repaired(
    store: Store, mirror: Store
) -> None:
    checkpoint = store.get(RUN, step=1)
    path = stored_path(checkpoint, "a.txt")
    path.unlink()
    (path / "inside").mkdir(parents=True)
    flip(stored_path(checkpoint, "sub/b.bin"))
    result = mend(store, mirror)
    assert [d.path for d in result.left] == ["a.txt"]
    assert [f.path for f in result.fixed] == ["sub/b.bin"]
    assert (path / "inside").is_dir()


def test_an_empty_file_and_a_directory_that_are_missing_come_back(
    store: Store, mirror: Store
) -> None:
    shutil.rmtree(stored_path(store.get(RUN, step=1), "sub/b.bin").parent)
    assert mend(store, mirror).ok
    assert content(store.get(RUN, step=1)) == {**ABC, "big": BIG}


def test_the_exec_bit_comes_back_and_nothing_is_fetched(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    with store.save(RUN, 1) as one:
        one.open("run.sh", executable=True).close()
        one.add_bytes("data", b"data")
    checkpoint = store.get(RUN, step=1)
    stored_path(checkpoint, "run.sh").chmod(0o444)
    stored_path(checkpoint, "data").chmod(0o555)
    result = mend(store)
    assert ({f.path for f in result.fixed}, result.fetched_bytes) == ({"run.sh", "data"}, 0)
    assert stored_path(checkpoint, "run.sh").stat().st_mode & 0o100
    assert not stored_path(checkpoint, "data").stat().st_mode & 0o100
    assert not mend(store).fixed


def test_another_copy_in_the_store_is_enough(tmp_path: Path) -> None:
    store = file_store(tmp_path, dedupe="none")
    save(store, 1, {"data": BIG})
    save(store, 2, {"renamed": BIG, "other": b"x"})
    flip(stored_path(store.get(RUN, step=1), "data"), BLOCK_SIZE)
    flip(stored_path(store.get(RUN, step=2), "renamed"), 0)
    results = list(repair_run(store, RUN))
    assert [(r.ok, r.fetched_bytes) for r in results] == [(True, 0), (True, 0)]
    assert whole(store)


def test_a_source_that_is_damaged_too_gives_what_is_intact_there(
    store: Store, mirror: Store, tmp_path: Path
) -> None:
    other = mirror_of(store, tmp_path / "other")
    flip(stored_path(store.get(RUN, step=1), "big"), 0)
    flip(stored_path(mirror.get(RUN, step=1), "big"), 1)
    flip(stored_path(mirror.get(RUN, step=1), "big"), BLOCK_SIZE)
    (Path(mirror.uri) / KEYS.manifest(mirror.get(RUN, step=1).name)).unlink()
    before = stored_path(store.get(RUN, step=1), "big").read_bytes()
    result = mend(store, mirror)
    assert [(d.path, d.offset) for d in result.left] == [("big", 0)]
    assert stored_path(store.get(RUN, step=1), "big").read_bytes() == before
    assert store.get(RUN, step=1).state == "damaged"
    assert mend(store, mirror, other).ok
    assert whole(store)


def test_a_good_file_is_repaired_although_another_cannot_be(store: Store, mirror: Store) -> None:
    checkpoint = store.get(RUN, step=1)
    for path in ("a.txt", "sub/b.bin"):
        flip(stored_path(checkpoint, path))
    flip(stored_path(mirror.get(RUN, step=1), "a.txt"))
    result = mend(store, mirror)
    assert [f.path for f in result.fixed] == ["sub/b.bin"]
    assert [d.path for d in result.left] == ["a.txt"]
    assert store.get(RUN, step=1).state == "damaged"


def test_checkpoints_that_share_the_damaged_file_share_the_good_one(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store", dedupe="link")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "weights").write_bytes(BIG)
    for step in (1, 2, 3):
        (tree / "step").write_bytes(b"%d" % step)
        store.push(tree, RUN, step)
    mirror = mirror_of(store, tmp_path / "mirror")
    paths = [stored_path(store.get(RUN, step=step), "weights") for step in (1, 2, 3)]
    assert len({p.stat().st_ino for p in paths}) == 1
    flip(paths[0])
    paths[0].chmod(0o444)
    assert [r.ok for r in verify_run(store, RUN, deep=True)] == [False, False, False]
    result = mend(store, mirror, step=2)
    assert (result.ok, result.fetched_bytes) == (True, BLOCK_SIZE)
    assert set(result.shared) == {f"{RUN}@1", f"{RUN}@3"}
    assert len({p.stat().st_ino for p in paths}) == 1, "no space was lost"
    assert [c.state for c in store.list(RUN)] == ["ok", "ok", "ok"]
    assert whole(store)


def test_a_reader_that_has_the_damaged_file_open_is_not_disturbed(
    store: Store, mirror: Store
) -> None:
    path = stored_path(store.get(RUN, step=1), "a.txt")
    flip(path)
    with path.open("rb") as f:
        assert mend(store, mirror).ok
        assert f.read() != ABC["a.txt"]


def test_a_dry_run_changes_nothing(store: Store, mirror: Store) -> None:
    flip(stored_path(store.get(RUN, step=1), "big"))
    (Path(store.uri) / KEYS.manifest(save(store, 2).name)).unlink()
    before = snapshot(Path(store.uri))
    told = list(repair_run(store, RUN, [mirror], dry_run=True))
    assert [[f.path for f in r.fixed] for r in told] == [["big"], []]
    assert [d.path for d in told[1].left] == ["MANIFEST.json"]
    assert snapshot(Path(store.uri)) == before


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and not p.is_symlink()
    }


def test_what_is_whole_is_verified_and_nothing_else(store: Store) -> None:
    result = mend(store)
    assert (result.fixed, result.left, result.fetched_bytes) == ((), (), 0)
    assert store.get(RUN, step=1).standing.verified is not None


def test_a_memory_store_is_repaired_too() -> None:
    store, mirror = memory_store(), memory_store()
    checkpoint = save(store)
    for key, data in list(store.backend.space.objects.items()):  # type: ignore[attr-defined]
        mirror.backend.put(key, data[0])
    store.backend.put(checkpoint.key("a.txt"), b"alphA")
    assert mend(store, Store(mirror.backend)).ok
    assert whole(store)


# Manifests


@pytest.mark.parametrize("how", ["missing", "flipped", "empty"])
def test_the_manifest_comes_back(how: str, store: Store, mirror: Store) -> None:
    checkpoint = store.get(RUN, step=1)
    path = Path(store.uri) / KEYS.manifest(checkpoint.name)
    good = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(flipped(good, 99) if how == "flipped" else b"")
    flip(stored_path(checkpoint, "a.txt"))
    assert not verify(checkpoint).ok
    result = mend(store, mirror)
    assert result.ok
    assert [f.path for f in result.fixed] == ["MANIFEST.json", "a.txt"]
    assert path.read_bytes() == good
    assert store.get(RUN, step=1).state == "ok"


def test_a_manifest_that_is_not_the_pinned_one_is_not_taken(store: Store, mirror: Store) -> None:
    name = store.get(RUN, step=1).name
    (Path(store.uri) / KEYS.manifest(name)).unlink()
    path = Path(mirror.uri) / KEYS.manifest(name)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(flipped(data, 99))
    result = mend(store, mirror)
    assert [d.path for d in result.left] == ["MANIFEST.json"]
    assert store.backend.stat(KEYS.manifest(name)) is None


# Records


def lose(store: Store, name: Name, how: str) -> bytes:
    """Damage a record; its good bytes."""
    path = Path(store.uri) / KEYS.record(name)
    data = path.read_bytes()
    path.unlink()
    bad = {
        "missing": None,
        "flipped": flipped(data, 8 * 200),
        "cut": data[:100],
        "empty": b"",
        "zeros": bytes(len(data)),
    }[how]
    if bad is not None:
        path.write_bytes(bad)
    return data


LOST = pytest.mark.parametrize("how", ["missing", "flipped", "cut", "empty", "zeros"])


@LOST
def test_the_record_comes_back(how: str, store: Store, mirror: Store) -> None:
    name = store.get(RUN, step=1).name
    good = lose(store, name, how)
    (result,) = repair_run(store, RUN, [mirror])
    assert result.ok, result
    assert store.backend.read(KEYS.record(name), 2**20) == good
    assert whole(store)


@LOST
def test_the_record_comes_back_after_everything_else(how: str, store: Store, mirror: Store) -> None:
    checkpoint = store.get(RUN, step=1)
    lose(store, checkpoint.name, how)
    flip(stored_path(checkpoint, "big"))
    flip(stored_path(mirror.get(RUN, step=1), "big"), 1)
    before = snapshot(Path(store.uri))
    (result,) = repair_run(store, RUN, [mirror])
    assert {d.path for d in result.left} == {"big", f"commits/{checkpoint.name}.json"}
    assert snapshot(Path(store.uri)) == before
    flip(stored_path(mirror.get(RUN, step=1), "big"), 1)
    (result,) = repair_run(store, RUN, [mirror])
    assert result.ok, result
    assert whole(store)


def test_one_that_lost_record_and_manifest_comes_back(store: Store, mirror: Store) -> None:
    name = store.get(RUN, step=1).name
    lose(store, name, "missing")
    (Path(store.uri) / KEYS.manifest(name)).unlink()
    (result,) = repair_run(store, RUN, [mirror])
    assert result.ok, result
    assert whole(store)


def test_one_changed_byte_of_a_record_needs_no_mirror(store: Store) -> None:
    name = store.get(RUN, step=1).name
    good = lose(store, name, "flipped")
    assert repair_name(store, RUN, name).ok
    assert store.backend.read(KEYS.record(name), 2**20) == good


@pytest.mark.parametrize("how", ["missing", "cut", "zeros"])
def test_without_a_source_the_record_stays_as_it_is(how: str, store: Store) -> None:
    name = store.get(RUN, step=1).name
    lose(store, name, how)
    before = snapshot(Path(store.uri))
    (result,) = repair_run(store, RUN)
    assert [d.path for d in result.left] == [f"commits/{name}.json"]
    assert snapshot(Path(store.uri)) == before


def test_what_was_deleted_does_not_come_back(store: Store, mirror: Store) -> None:
    name = store.get(RUN, step=1).name
    store.delete(store.get(RUN, step=1), force=True)
    result = repair_name(store, RUN, name, [mirror])
    assert "was deleted" in result.left[0].reason
    assert list(repair_run(store, RUN, [mirror])) == []
    assert store.backend.stat(KEYS.record(name)) is None
    path = Path(store.uri) / KEYS.record(name)
    path.write_bytes(b"rubbish beside the trash record")
    assert not repair_name(store, RUN, name, [mirror]).ok
    assert store.backend.read(KEYS.record(name), 2**20) == b"rubbish beside the trash record"


def test_what_was_given_up_for_good_does_not_come_back(store: Store, mirror: Store) -> None:
    name = store.get(RUN, step=1).name
    store.delete(store.get(RUN, step=1), force=True, grace=0)
    age(store, KEYS.trash_record(name), 86400)
    gc(store, grace=0)
    assert repair_name(store, RUN, name, [mirror]).fixed == ()
    found = store.catalog.find(RUN, name)
    assert found is not None
    assert found.is_void
    lose(store, name, "zeros")  # not even when the void cannot be read
    result = repair_name(store, RUN, name, [mirror])
    assert "nothing of it is here" in result.left[0].reason
    assert store.backend.read(KEYS.record(name), 2**20).strip(b"\0") == b""


def test_a_void_that_is_being_acted_on_is_not_replaced(store: Store, mirror: Store) -> None:
    """A killed purge: void, some files removed; then the void is damaged as well."""
    checkpoint = store.get(RUN, step=1)
    lose(store, checkpoint.name, "zeros")
    stored_path(checkpoint, "a.txt").unlink()
    (result,) = repair_run(store, RUN, [mirror])
    assert "could have been given up" in result.left[0].reason
    assert not stored_path(checkpoint, "a.txt").exists()


def test_a_void_comes_back(store: Store, tmp_path: Path) -> None:
    name = killed_save(store, 7)
    assert discard(store.catalog, RUN, name, "for a test")
    mirror = mirror_of(store, tmp_path / "mirror")
    for how in ("flipped", "cut", "zeros"):
        good = lose(store, name, how)
        assert repair_name(store, RUN, name, [mirror]).ok
        assert store.backend.read(KEYS.record(name), 2**20) == good


@pytest.mark.parametrize("purged", [False, True])
def test_a_deletion_between_the_look_and_the_replacement_stands(
    purged: bool, store: Store, mirror: Store
) -> None:
    """This repair falls asleep; another one mends the record, and then somebody deletes it."""
    name = store.get(RUN, step=1).name
    lose(store, name, "cut")
    key = KEYS.record(name)
    asleep = True

    def hook(operation: str, at: str, phase: str) -> None:
        nonlocal asleep
        if asleep and (operation, at, phase) == ("put", key, "before"):
            asleep = False
            assert repair_name(store, RUN, name, [mirror]).ok
            store.delete(store.get(RUN, step=1), force=True, grace=0)
            if purged:
                age(store, KEYS.trash_record(name), 86400)
                assert gc(store, grace=0).removed

    slow = Store(HookedBackend(store.backend, hook))
    result = repair_name(slow, RUN, name, [mirror])
    assert not asleep
    assert "meanwhile" in result.left[0].reason
    found = store.catalog.find(RUN, name)
    if purged:
        assert found is not None
        assert found.is_void
    else:
        assert found is None
        assert store.undelete(parse_ref(f"{RUN}@1")).step == 1
        assert whole(store)


def test_a_record_that_is_being_saved_is_not_put_there(store: Store, tmp_path: Path) -> None:
    mirror = mirror_of(store, tmp_path / "mirror")
    one = store.save(RUN, 2)
    one.add_bytes("a", b"a")
    theirs = mirror.save(RUN, 2)
    theirs.abort()
    # The mirror has a commit of the name that is being saved here.
    shutil.copytree(Path(store.uri) / RUN / str(one.name), Path(mirror.uri) / RUN / str(one.name))
    other = file_store(tmp_path / "other")
    assert not [r for r in repair_run(store, RUN, [mirror, other]) if r.left or r.fixed]
    one.commit()
    assert whole(store)


# Marks


def test_a_mark_comes_back_and_is_never_dropped_unasked(store: Store, tmp_path: Path) -> None:
    checkpoint = store.get(RUN, step=1)
    store.pin(checkpoint)
    mirror = mirror_of(store, tmp_path / "mirror")
    (mark,) = Path(store.uri, KEYS.marks_of(checkpoint.name)).iterdir()
    good = mark.read_bytes()
    for bad, sources in ((flipped(good, 900), []), (b"x", [mirror]), (b"", [mirror])):
        mark.chmod(0o644)
        mark.write_bytes(bad)
        assert not store.get(RUN, step=1).standing.pinned
        assert mend(store, *sources).ok
        assert mark.read_bytes() == good
    mark.chmod(0o644)
    mark.write_bytes(b"x")
    result = mend(store)
    assert [d.path for d in result.left] == [f"marks/{checkpoint.name}/{mark.name}"]
    assert mark.read_bytes() == b"x"
    assert repair(store.get(RUN, step=1), drop_marks=True).ok
    assert not mark.exists()


# The marker


def test_the_marker_comes_back_when_a_byte_has_changed(store: Store) -> None:
    path = Path(store.uri) / MARKER
    good = path.read_bytes()
    for position in range(len(good)):
        path.chmod(0o644)
        path.write_bytes(good[:position] + bytes([good[position] ^ 0xA5]) + good[position + 1 :])
        with pytest.raises(IntegrityError):
            file_store(path.parent)
        result = restore_marker(store.backend)
        assert result is not None
        assert result.ok
        assert path.read_bytes() == good
    assert restore_marker(store.backend) is None


@pytest.mark.parametrize("how", ["lost", "empty"])
def test_a_marker_is_never_guessed(how: str, store: Store, mirror: Store) -> None:
    """A mirror has an id of its own, and its records name the store they were saved to."""
    path = Path(store.uri) / MARKER
    store_id = store.id
    path.unlink()
    if how == "empty":
        path.write_bytes(b"")
    result = restore_marker(store.backend, [mirror])
    assert result is not None
    assert store_id in result.left[0].reason
    assert "--store-id" in result.left[0].reason
    note_attempt(mirror.catalog, expect_mirror(mirror.catalog, store.uri), store="mirrorsmirrorsmi")
    result = restore_marker(store.backend, [mirror])
    assert result is not None
    assert result.ok
    assert file_store(path.parent).id == "mirrorsmirrorsmi"
    path.unlink()
    result = restore_marker(store.backend, store_id=store_id)
    assert result is not None
    assert result.ok
    assert file_store(path.parent).id == store_id


def test_where_no_store_was_no_marker_is_made(tmp_path: Path) -> None:
    (tmp_path / "store" / "thing").mkdir(parents=True)
    assert restore_marker(file_store(tmp_path / "store").backend) is None


# All of it, a bit at a time


def test_a_flipped_bit_in_any_file_is_found_and_repaired(tmp_path: Path) -> None:
    """Data, manifests, records, voids, marks and the marker; each flip in a fresh copy."""
    origin = file_store(tmp_path / "origin")
    for step in (1, 2):
        save(origin, step, {**ABC, "data": b"%d" % step * 3000})
    origin.pin(origin.get(RUN, step=1))
    origin.tag(origin.get(RUN, step=2), "good")
    discard(origin.catalog, RUN, killed_save(origin, 3), "for a test")
    for lease in Path(origin.uri, KEYS.leases).iterdir():
        lease.unlink()
    files = [p for p in Path(origin.uri).rglob("*") if p.is_file() and not p.is_symlink()]
    files = [p for p in files if p.stat().st_size and "latest" not in p.parts]
    mirror = mirror_of(origin, tmp_path / "mirror")
    rng = random.Random(4)
    kinds: dict[str, int] = {}
    for turn in range(5000 if FULL else 200):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        shutil.copytree(origin.uri, tmp_path / "store", symlinks=True)
        victim = files[turn % len(files)].relative_to(origin.uri)
        path = tmp_path / "store" / victim
        good = path.read_bytes()
        bit = rng.randrange(len(good) * 8)
        path.chmod(0o644)
        path.write_bytes(flipped(good, bit))
        where = f"bit {bit} of {victim}"
        kind = victim.parts[1] if len(victim.parts) > 2 else victim.name
        kinds[kind] = kinds.get(kind, 0) + 1
        if victim.name == MARKER:
            with pytest.raises(IntegrityError):
                file_store(tmp_path / "store")
            result = restore_marker(LocalBackend(str(tmp_path / "store")), [mirror])
            assert result is not None, where
            assert result.ok, where
        store = file_store(tmp_path / "store")
        assert whole(store) is (victim.name == MARKER), where
        results = list(repair_run(store, RUN, [mirror]))
        assert all(r.ok for r in results), (where, results)
        is_data = str(victim.parts[1]).startswith("0") if len(victim.parts) > 2 else False
        assert sum(r.fetched_bytes for r in results) <= (BLOCK_SIZE if is_data else 0), where
        assert path.read_bytes() == good, where
        assert whole(store), where
        assert plan_resume(store, RUN).passed_over == (), where
    assert {"commits", "marks", MARKER} < set(kinds)


def test_damage_that_a_resume_meets_names_the_command(store: Store) -> None:
    flip(stored_path(store.get(RUN, step=1), "a.txt"))
    checkpoint: Checkpoint = store.get(RUN, step=1)
    assert not verify(checkpoint, deep=True).ok
    save(store, 2)
    bad = save(store, 3)
    stored_path(bad, "a.txt").unlink()
    plan = plan_resume(store, RUN)
    command = f"ckpt repair {RUN}@{bad.name} --store {store.uri} --from"
    assert plan.passed_over[0].repair == f"{command} STORE"
    expect_mirror(store.catalog, "s3://bucket/ckpts")
    assert plan_resume(store, RUN).passed_over[0].repair == f"{command} s3://bucket/ckpts"
    with pytest.raises(IntegrityError) as caught:
        store.resolve(parse_ref(f"{RUN}@1")).read_bytes("a.txt")
    assert f"ckpt repair {RUN}@1 --store" in str(caught.value.hint)
