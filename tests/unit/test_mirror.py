"""A pass of a mirror: what is copied, what is not, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore import mirrors, open_store
from ckptstore.backends.local import LocalBackend
from ckptstore.errors import ConflictError, NotFoundError, UsageError
from ckptstore.ids import random_letters
from ckptstore.layout import RunKeys
from ckptstore.leases import LeaseKeeper
from ckptstore.maintenance import gc, verify
from ckptstore.maintenance.mirror import How, mirror, mirror_each
from ckptstore.records import writer_here
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.uri import parse_ref

RUN = "gsm8k"


@pytest.fixture
def source(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "source"))
    for step in (1, 2, 3):
        save(store, step)
    return store


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "target"))


def save(store: Store, step: int, content: bytes = b"weights") -> None:
    with store.save(RUN, step, metrics={"reward": step / 10}) as files:
        files.add_bytes("actor/w.bin", content * 1000 + b"%d" % step)
        files.add_bytes("empty", b"")
        files.add_empty_directory("nothing")


def steps(store: Store) -> list[int]:
    return [c.step for c in store.list(RUN)]


def tree(store: Store) -> dict[str, bytes]:
    """All that a mirror copies."""
    root = Path(store.uri)
    left_out = {"mirrors", "CKPTSTORE.json", "latest", "leases", "trash"}
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not left_out & set(path.relative_to(root).parts)
    }


def flip(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_everything_is_copied_byte_for_byte_and_once(source: Store, target: Store) -> None:
    result = mirror(source, target)
    assert result.ok
    assert len(result.copied) == 3
    assert result.sent_bytes == sum(c.size for c in source.list(RUN))
    assert tree(target) == tree(source)
    assert (Path(target.uri) / RUN / str(source.list(RUN)[0].name) / "nothing").is_dir()
    assert all(verify(c, deep=True).ok for c in target.list(RUN))
    again = mirror(source, target)
    assert again.ok
    assert (again.copied, again.sent_bytes) == ((), 0)
    assert again.behind.checkpoints == 0


def test_what_is_new_follows(source: Store, target: Store) -> None:
    mirror(source, target)
    save(source, 4)
    result = mirror(source, target)
    assert [ref.partition("-")[0] for ref in result.copied] == [f"{RUN}@00004"]
    assert steps(target) == [1, 2, 3, 4]


def test_the_source_knows_what_the_mirror_holds(source: Store, target: Store) -> None:
    names = [c.name for c in source.list(RUN)]
    mirrors.expect_mirror(source.catalog, target.uri)
    assert set(mirrors.owed(source.catalog, RUN, names)) == set(names)
    mirror(source, target)
    assert mirrors.owed(source.catalog, RUN, names) == {}
    (known,) = mirrors.known_mirrors(source.catalog)
    assert known.note is not None
    assert known.note.store == target.id
    assert known.note.problem is None
    # What the mirror loses is owed again, and comes again.
    lost = Path(target.uri) / RUN / "commits" / f"{names[1]}.json"
    lost.unlink()
    shutil.rmtree(Path(target.uri) / RUN / str(names[1]))
    assert len(mirror(source, target).copied) == 1
    assert steps(target) == [1, 2, 3]


def test_what_the_mirror_has_pruned_is_not_copied_back(source: Store, target: Store) -> None:
    mirror(source, target)
    target.delete(target.get(RUN, step=1), grace=0)
    assert mirror(source, target).copied == ()
    gc(target)
    assert mirror(source, target).copied == ()
    assert steps(target) == [2, 3]
    assert mirrors.owed(source.catalog, RUN, [c.name for c in source.list(RUN)]) == {}


def test_what_the_source_has_deleted_stays_unless_it_is_told_to(
    source: Store, target: Store
) -> None:
    mirror(source, target)
    source.delete(source.get(RUN, step=1), grace=0)
    mirror(source, target)
    gc(source)
    mirror(source, target)
    assert steps(target) == [1, 2, 3]
    assert mirror(source, target, How(delete=True, max_delete=0)).skipped
    assert steps(target) == [1, 2, 3]
    assert len(mirror(source, target, How(delete=True)).deleted) == 1
    assert steps(target) == [2, 3]


def test_deleting_never_follows_what_is_only_missing(source: Store, target: Store) -> None:
    """A source that has lost its records has deleted nothing."""
    mirror(source, target)
    name = source.list(RUN)[0].name
    (Path(source.uri) / RUN / "commits" / f"{name}.json").unlink()
    assert mirror(source, target, How(delete=True)).deleted == ()
    assert steps(target) == [1, 2, 3]


def test_guards_of_the_mirror_hold_for_its_deletions(source: Store, target: Store) -> None:
    mirror(source, target)
    target.pin(target.get(RUN, step=1))
    source.delete(source.get(RUN, step=1), grace=0)
    assert mirror(source, target, How(delete=True)).deleted == ()
    assert steps(target) == [1, 2, 3]


def test_marks_are_carried_along_and_verifications_stay(source: Store, target: Store) -> None:
    source.pin(source.get(RUN, step=1))
    source.tag(source.get(RUN, step=2), "release")
    verify(source.get(RUN, step=2), deep=True)
    mirror(source, target)
    assert target.get(RUN, step=1).standing.pinned
    assert target.get(RUN, step=2).tags == ["release"]
    assert target.get(RUN, step=2).standing.verified is None
    source.unpin(source.get(RUN, step=1))
    source.add_metrics(source.get(RUN, step=2), {"late": 1.0})
    mirror(source, target)
    assert not target.get(RUN, step=1).standing.pinned
    assert target.get(RUN, step=2).metrics["late"] == 1.0


def test_a_damaged_checkpoint_is_skipped_and_named_and_the_others_go(
    source: Store, target: Store
) -> None:
    damaged = source.get(RUN, step=2)
    flip(Path(source.uri) / RUN / str(damaged.name) / "actor/w.bin")
    result = mirror(source, target)
    assert [s.ref for s in result.skipped] == [f"{RUN}@{damaged.name}"]
    assert "content differs" in result.skipped[0].reason
    assert "ckpt repair" in (result.skipped[0].hint or "")
    assert steps(target) == [1, 3]
    assert source.get(RUN, step=2).state == "damaged"
    assert [s.ref for s in mirror(source, target).skipped] == [f"{RUN}@{damaged.name}"]
    assert set(mirrors.owed(source.catalog, RUN, [c.name for c in source.list(RUN)])) == {
        damaged.name
    }


@pytest.mark.parametrize("what", ["record", "manifest"])
def test_a_damaged_record_or_manifest_is_skipped(source: Store, target: Store, what: str) -> None:
    name = source.get(RUN, step=2).name
    keys = RunKeys(RUN)
    flip(Path(source.uri) / (keys.record(name) if what == "record" else keys.manifest(name)))
    result = mirror(source, target)
    assert len(result.skipped) == 1
    assert steps(target) == [1, 3]


def test_a_copy_that_is_damaged_in_the_mirror_is_no_copy(source: Store, target: Store) -> None:
    mirror(source, target)
    name = source.get(RUN, step=2).name
    flip(Path(target.uri) / RUN / str(name) / "actor/w.bin")
    verify(target.get(RUN, step=2), deep=True)
    result = mirror(source, target)
    assert [s.ref for s in result.skipped] == [f"{RUN}@{name}"]
    assert f"--store {target.uri} --from {source.uri}" in (result.skipped[0].hint or "")
    assert set(mirrors.owed(source.catalog, RUN, [name])) == {name}


def test_a_record_that_cannot_be_read_in_the_mirror_is_no_copy(
    source: Store, target: Store
) -> None:
    mirror(source, target)
    name = source.get(RUN, step=2).name
    flip(Path(target.uri) / RunKeys(RUN).record(name))
    mirrors.forget_mirror(source.catalog, mirrors.mirror_id(target.uri))
    result = mirror(source, target)
    assert [s.ref for s in result.skipped] == [f"{RUN}@{name}"]
    assert set(mirrors.owed(source.catalog, RUN, [name])) == {name}


def test_a_name_that_the_mirror_would_change_is_refused_before_a_byte_is_sent(
    source: Store, tmp_path: Path
) -> None:
    with source.save("odd", 1) as files:
        files.add_bytes("a\\b", b"x")
    backend = LocalBackend(str(tmp_path / "picky"))
    backend.capabilities = dataclasses.replace(backend.capabilities, forbidden="\\")
    target = Store(backend)
    result = mirror(source, target)
    assert len(result.copied) == 3
    assert len(result.skipped) == 1
    assert "cannot hold" in result.skipped[0].reason
    assert target.catalog.directories("odd") == []


def test_an_empty_source_is_refused(tmp_path: Path, target: Store) -> None:
    nothing = open_store(str(tmp_path / "nothing"))
    with pytest.raises(NotFoundError, match="there is no store"):
        mirror(nothing, target)
    nothing.create()
    with pytest.raises(NotFoundError, match="nothing to mirror"):
        mirror(nothing, target)
    assert not target.exists


def test_itself_a_copy_of_itself_and_a_place_inside_are_refused(
    source: Store, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="onto itself"):
        mirror(source, open_store(source.uri))
    (tmp_path / "alias").symlink_to(source.uri)
    with pytest.raises(UsageError, match="onto itself"):
        mirror(source, open_store(str(tmp_path / "alias")))
    with pytest.raises(UsageError, match="one in the other"):
        mirror(source, open_store(f"{source.uri}/mirror"))
    with pytest.raises(UsageError, match="one in the other"):
        mirror(source, open_store(str(tmp_path)))
    shutil.copytree(source.uri, tmp_path / "plain", symlinks=True)
    with pytest.raises(UsageError, match="plain copy"):
        mirror(source, open_store(str(tmp_path / "plain")))


def test_a_mirror_that_is_not_mounted_is_not_begun_anew(source: Store, target: Store) -> None:
    mirror(source, target)
    os.rename(target.uri, f"{target.uri}.unmounted")
    with pytest.raises(NotFoundError, match="no store any more"):
        mirror(source, open_store(target.uri))
    other = open_store(target.uri)
    other.create()
    with pytest.raises(ConflictError, match="another store"):
        mirror(source, other)
    mirrors.forget_mirror(source.catalog, mirrors.mirror_id(target.uri))
    assert mirror(source, other).ok
    assert steps(other) == [1, 2, 3]


def test_a_run_that_went_on_in_the_mirror_is_not_mixed_with_what_came_later(
    source: Store, target: Store
) -> None:
    mirror(source, target)
    save(target, 4, b"resumed from the mirror")
    save(source, 4)
    save(source, 5)
    result = mirror(source, target)
    assert not result.ok
    assert result.copied == ()
    assert "has gone on" in result.skipped[-1].reason
    back = mirror(target, source)
    assert not back.ok


def test_a_lost_store_comes_back_from_its_mirror(
    source: Store, target: Store, tmp_path: Path
) -> None:
    mirror(source, target)
    anew = open_store(str(tmp_path / "anew"))
    assert mirror(target, anew).ok
    assert tree(anew) == tree(source)
    save(anew, 4)
    assert mirror(anew, target).ok
    assert steps(target) == [1, 2, 3, 4]


def test_newest_first(source: Store, target: Store) -> None:
    result = mirror(source, target, How(newest_first=True))
    assert list(result.copied) == sorted(result.copied, reverse=True)


def test_a_dry_run_changes_nothing(source: Store, target: Store) -> None:
    result = mirror(source, target, How(dry_run=True))
    assert len(result.copied) == 3
    assert not Path(target.uri).exists()
    assert mirrors.known_mirrors(source.catalog) == []


def test_only_some_runs(source: Store, target: Store) -> None:
    with source.save("other", 1) as files:
        files.add_bytes("x", b"x")
    assert mirror(source, target, How(runs=["gsm*"])).ok
    assert target.runs() == [RUN]


def test_several_mirrors_do_not_fail_with_each_other(source: Store, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"a file, not a directory")
    uris = [str(tmp_path / "a"), str(blocked), str(tmp_path / "b")]

    def opener(uri: str) -> Callable[[], Store]:
        return lambda: open_store(uri)

    outcomes = mirror_each(source, [(uri, opener(uri)) for uri in uris])
    assert [o.ok for o in outcomes] == [True, False, True]
    assert outcomes[1].failure is not None
    assert steps(open_store(uris[0])) == steps(open_store(uris[2])) == [1, 2, 3]


def test_a_checkpoint_that_another_mirror_is_copying_is_left_to_it(
    source: Store, target: Store
) -> None:
    target.create()
    first = source.list(RUN)[0]
    writer = writer_here(random_letters())
    other = LeaseKeeper(target.catalog, RUN, first.name, writer, copy_of=source.id)
    try:
        result = mirror(source, target)
        assert len(result.copied) == 2
        assert result.behind.checkpoints == 1
    finally:
        other.abandon()
    assert len(mirror(source, target).copied) == 1
    assert tree(target) == tree(source)
    assert target.catalog.leases(RUN) == []


def test_gc_and_pushes_leave_what_a_mirror_has_begun(
    source: Store, target: Store, tmp_path: Path
) -> None:
    """A void would keep it from ever being mirrored."""
    cancel = threading.Event()
    cancel.set()
    with source.save(RUN, 4) as files:
        files.add_bytes("actor/w.bin", b"x")
    how = How(cancel=cancel)
    mirror(source, target, How(max_delete=0, runs=["none*", RUN]))
    name = source.get(RUN, step=4).name
    # What a mirror that was killed leaves: a directory, some files, a dead lease.
    (Path(target.uri) / RUN / "commits" / f"{name}.json").unlink()
    (Path(target.uri) / RUN / str(name) / "actor/w.bin").unlink()
    LeaseKeeper(
        target.catalog, RUN, name, writer_here(random_letters()), copy_of=source.id
    ).abandon()
    assert mirror(source, target, how).copied == ()
    gc(target, grace=0)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"another push of this step")
    pushed = target.push(tmp_path / "tree", RUN, 4, SaveOptions())
    assert target.catalog.find(RUN, name) is None
    target.delete(pushed.checkpoint, grace=0, force=True)
    assert len(mirror(source, target).copied) == 1
    assert target.resolve(parse_ref(f"{RUN}@{name}")).name == name


def test_a_copy_whose_source_is_gone_for_good_is_given_up(source: Store, target: Store) -> None:
    mirror(source, target)
    name = source.get(RUN, step=1).name
    (Path(target.uri) / RUN / "commits" / f"{name}.json").unlink()
    LeaseKeeper(
        target.catalog, RUN, name, writer_here(random_letters()), copy_of=source.id
    ).abandon()
    source.delete(source.get(RUN, step=1), grace=0)
    mirror(source, target)
    assert (Path(target.uri) / RUN / str(name)).exists(), "it can still be undeleted"
    gc(source)
    mirror(source, target)
    assert not (Path(target.uri) / RUN / str(name)).exists()
    assert target.catalog.leases(RUN) == []
