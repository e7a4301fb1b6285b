from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import deleting, document, marks
from ckptstore.backends.base import Capabilities
from ckptstore.backends.local import LocalBackend
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    PartialError,
)
from ckptstore.layout import TEMPORARY_PREFIX, Name, RunKeys
from ckptstore.leases import STALE_SECONDS
from ckptstore.maintenance import GcResult, gc
from ckptstore.records import Trash, Void
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend, Phase
from ckptstore.uri import Ref
from ckptstore.voiding import ensure_void
from tests.unit.support import (
    ABC,
    RUN,
    Clock,
    age,
    content,
    examples,
    failed_save,
    file_store,
    killed_save,
    memory_store,
    objects,
    read_tree,
    reasons,
    save,
    stop,
    write_tree,
)

KEYS = RunKeys(RUN)
DAY = 86400.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    store = memory_store(clock)
    save(store, 1)
    return store


def keys(result: GcResult) -> list[str]:
    return [a.key for a in result.removed]


def test_a_healthy_store_loses_nothing(store: Store, clock: Clock) -> None:
    save(store, 2, tags=["x"])
    store.pin(store.get(RUN, step=1))
    before = objects(store)
    clock.advance(1000 * DAY)
    assert gc(store).actions == ()
    assert objects(store) == before


def test_a_dead_save_is_collected_after_the_grace_with_its_lease(
    store: Store, clock: Clock
) -> None:
    dead = killed_save(store, 2)
    directory = KEYS.directory(dead)
    clock.advance(DAY - 1)
    result = gc(store)
    assert keys(result) == []
    assert "too recently" in reasons(result.actions)[directory]
    clock.advance(1)
    result = gc(store)
    assert directory in keys(result)
    assert "unfinished save" in reasons(result.actions)[directory]
    assert result.freed == sum(map(len, ABC.values()))
    assert [k for k in objects(store) if str(dead) in k] == [KEYS.record(dead)]
    found = store.catalog.find(RUN, dead)
    assert found is not None
    assert isinstance(found.record, Void)
    assert content(store.get(RUN, step=1)) == ABC


def test_a_live_lease_protects_a_directory_however_old_its_files_are(
    store: Store, clock: Clock
) -> None:
    one = store.save(RUN, 2)
    one.add_bytes("a", b"a")
    clock.advance(10 * DAY)
    one._lease._write()
    result = gc(store, grace=0)
    assert keys(result) == []
    assert reasons(result.actions)[KEYS.directory(one.name)] == "a save is writing it"
    one.commit()
    assert store.get(RUN, step=2).read_bytes("a") == b"a"


def test_the_age_of_a_save_is_its_last_heartbeat(store: Store, clock: Clock) -> None:
    one = store.save(RUN, 2)
    one.add_bytes("a", b"a")
    clock.advance(10 * DAY)
    one._lease._write()
    stop(one)
    clock.advance(STALE_SECONDS + 1)
    assert keys(gc(store)) == []
    clock.advance(DAY)
    assert KEYS.directory(one.name) in keys(gc(store))


def test_without_a_lease_the_age_is_that_of_the_youngest_file(store: Store, clock: Clock) -> None:
    directory = "run/00002-step-00000002-abcdefgh"
    store.backend.put(f"{directory}/old", b"")
    clock.advance(10 * DAY)
    store.backend.put(f"{directory}/young", b"")
    clock.advance(DAY - 1)
    assert keys(gc(store)) == []
    clock.advance(2)
    assert keys(gc(store)) == [directory]


def test_a_save_that_was_asleep_while_it_was_collected_can_never_commit(
    store: Store, clock: Clock
) -> None:
    asleep = store.save(RUN, 2)
    asleep.add_bytes("a", b"a")
    clock.advance(2 * DAY)
    assert KEYS.directory(asleep.name) in keys(gc(store))
    with pytest.raises(ConflictError):
        asleep.commit()
    stop(asleep)
    assert [c.step for c in store.list(RUN)] == [1]


def test_a_voided_directory_is_collected_at_once(store: Store) -> None:
    name = failed_save(store, 2)
    store.backend.put(KEYS.file(name, "late"), b"late")
    result = gc(store)
    assert keys(result) == [KEYS.directory(name)]
    assert reasons(result.actions)[KEYS.directory(name)] == "it was given up"
    assert store.backend.list(KEYS.directory(name)) == []


def test_voids_stay(store: Store, clock: Clock) -> None:
    name = failed_save(store, 2)
    clock.advance(1000 * DAY)
    gc(store)
    assert store.backend.stat(KEYS.record(name)) is not None


def test_trash_waits_for_its_own_grace_and_then_goes(store: Store, clock: Clock) -> None:
    save(store, 2)
    old = store.get(RUN, step=1)
    store.delete(old, grace=3 * DAY)
    clock.advance(2 * DAY)
    result = gc(store, grace=0)
    assert keys(result) == []
    assert "trash for another" in reasons(result.actions)[KEYS.directory(old.name)]
    clock.advance(DAY)
    result = gc(store)
    assert keys(result) == [KEYS.directory(old.name)]
    assert result.freed >= old.size
    assert store.catalog.trash_names(RUN) == []
    assert [c.step for c in store.list(RUN)] == [2]


def test_trash_that_was_undeleted_is_a_checkpoint_again(store: Store, clock: Clock) -> None:
    save(store, 2)
    store.delete(store.get(RUN, step=1), grace=0)
    store.undelete(Ref(None, RUN, "1"))
    clock.advance(DAY)
    assert gc(store).actions == ()
    assert content(store.get(RUN, step=1)) == ABC


def test_a_trash_record_left_beside_a_commit_takes_nothing_with_it(
    store: Store, clock: Clock
) -> None:
    save(store, 2)
    old = store.get(RUN, step=1)
    store.delete(old, grace=0)
    trash = store.backend.read(KEYS.trash_record(old.name), 2**20)
    store.undelete(Ref(None, RUN, "1"))
    store.backend.put(KEYS.trash_record(old.name), trash)
    clock.advance(DAY)
    said = gc(store, dry_run=True)
    assert KEYS.directory(old.name) not in keys(said)
    done = gc(store)
    assert KEYS.directory(old.name) not in keys(done)
    assert content(store.get(RUN, step=1)) == ABC


def test_purging_the_whole_of_a_run_leaves_its_voids_and_sequence(
    store: Store, clock: Clock
) -> None:
    store.delete(store.get(RUN, step=1), force=True, grace=0)
    clock.advance(1)
    gc(store)
    assert store.list(RUN) == []
    assert save(store, 2).seq == 2


# Records that are gone


def test_directories_without_any_record_are_refused_and_left_alone(clock: Clock) -> None:
    store = memory_store(clock)
    for step in (1, 2):
        save(store, step)
    for name in store.catalog.record_names(RUN):
        store.backend.delete([KEYS.record(name)])
    before = objects(store)
    clock.advance(1000 * DAY)
    for dry_run in (False, True):
        with pytest.raises(ConflictError, match="records may be lost"):
            gc(store, dry_run=dry_run)
    assert objects(store) == before
    assert len(keys(gc(store, force=True))) == 2


def test_a_run_that_lost_its_records_does_not_let_gc_touch_another_after_it(
    clock: Clock,
) -> None:
    store = memory_store(clock)
    lost = save(store, 1, run="a")
    killed_save(store, 2)
    save(store, 3)
    store.backend.delete([RunKeys("a").record(lost.name)])
    clock.advance(1000 * DAY)
    with pytest.raises(PartialError, match="run 'a'"):
        gc(store)
    with pytest.raises(ConflictError):
        gc(store, "a")
    assert store.backend.stat(RunKeys("a").directory(lost.name)) is not None
    gc(store, RUN)
    assert store.backend.stat(RunKeys("a").directory(lost.name)) is not None


def test_a_single_record_that_was_lost_does_not_hide_its_checkpoint_from_the_grace(
    store: Store, clock: Clock
) -> None:
    second = save(store, 2)
    clock.advance(DAY / 2)
    store.backend.delete([KEYS.record(second.name)])
    assert keys(gc(store)) == []


def test_storage_without_exclusive_creation_is_collected_only_by_force(
    store: Store, clock: Clock
) -> None:
    dead = killed_save(store, 2)
    clock.advance(2 * DAY)
    assert isinstance(store.backend, MemoryBackend)
    store.backend.capabilities = Capabilities(exclusive_create=False, parallel_blocks=False)
    before = objects(store)
    with pytest.raises(ConflictError, match="exclusively"):
        gc(store)
    assert objects(store) == before
    assert KEYS.directory(dead) in keys(gc(store, force=True))


def test_a_store_or_run_that_is_not_there_is_not_found(store: Store) -> None:
    with pytest.raises(NotFoundError):
        gc(memory_store())
    with pytest.raises(NotFoundError):
        gc(store, "other")


def test_only_the_run_that_was_named_is_collected(store: Store, clock: Clock) -> None:
    save(store, 1, run="other")
    one = store.save("other", 2)
    stop(one)
    dead = killed_save(store, 2)
    clock.advance(2 * DAY)
    gc(store, RUN)
    left = "\n".join(objects(store))
    assert f"{KEYS.directory(dead)}/" not in left
    assert store.catalog.leases("other")


# Leases and temporaries


def test_an_expired_lease_without_a_directory_goes(store: Store, clock: Clock) -> None:
    asleep = store.save(RUN, 2)
    stop(asleep)
    ensure_void(store.catalog, RUN, asleep.name, "x")
    store.backend.remove_tree(KEYS.directory(asleep.name))
    (held,) = store.catalog.leases(RUN)
    assert keys(gc(store)) == []
    clock.advance(STALE_SECONDS + 1)
    assert keys(gc(store)) == [held.key]
    assert store.catalog.leases(RUN) == []


def test_the_lease_of_a_dead_save_stays_as_long_as_its_directory(
    store: Store, clock: Clock
) -> None:
    killed_save(store, 2)
    clock.advance(STALE_SECONDS + 1)
    gc(store)
    assert len(store.catalog.leases(RUN)) == 1


@pytest.mark.parametrize(
    "place", ["", "run/", "run/commits/", "run/trash/", "run/leases/", "run/marks/x/"]
)
def test_temporaries_of_killed_processes_go_after_the_grace(
    place: str, store: Store, clock: Clock
) -> None:
    key = f"{place}{TEMPORARY_PREFIX}abcdefgh"
    store.backend.put(key, b"xyz")
    clock.advance(DAY - 1)
    assert keys(gc(store)) == []
    clock.advance(1)
    result = gc(store)
    assert keys(result) == [key]
    assert "killed" in reasons(result.actions)[key]
    assert store.backend.stat(key) is None


@pytest.mark.parametrize("key", ["notes.txt", "run/notes.txt", "run/backup/x", "other/file"])
def test_things_that_are_not_ours_are_left_alone(key: str, store: Store, clock: Clock) -> None:
    store.backend.put(key, b"mine")
    clock.advance(1000 * DAY)
    gc(store, grace=0)
    assert objects(store)[key] == b"mine"


def test_a_file_named_like_a_temporary_in_a_directory_of_someone_else_stays(
    store: Store, clock: Clock
) -> None:
    key = f"run/backup/{TEMPORARY_PREFIX}x"
    store.backend.put(key, b"mine")
    clock.advance(1000 * DAY)
    gc(store)
    assert key in objects(store)


# Dry runs


def live(store: Store, step: int) -> None:
    """A save that is taken for live: its lease cannot be read, and is young."""
    one = store.save(RUN, step)
    stop(one)
    store.backend.put(KEYS.lease(one.name, one.writer.id), b"")


SITUATIONS: dict[str, Callable[[Store, int], object]] = {
    "commit": save,
    "dead": killed_save,
    "failed": failed_save,
    "late file": lambda store, step: store.backend.put(
        KEYS.file(failed_save(store, step), "late"), b"late"
    ),
    "trash": lambda store, step: store.delete(save(store, step), force=True, grace=3600.0 * step),
    "temporary": lambda store, step: store.backend.put(
        f"run/commits/{TEMPORARY_PREFIX}x{step}", b"x"
    ),
    "live": live,
}


@examples(60)
@given(
    st.lists(st.sampled_from(sorted(SITUATIONS)), min_size=1, max_size=6),
    st.sampled_from([0.0, 3600.0, DAY, 3 * DAY]),
)
def test_a_dry_run_touches_nothing_and_says_what_the_run_after_it_does(
    situations: list[str], later: float
) -> None:
    clock = Clock()
    store = memory_store(clock)
    save(store, 0)
    for step, situation in enumerate(situations, 1):
        SITUATIONS[situation](store, step)
    clock.advance(later)
    before = objects(store)
    said = gc(store, dry_run=True)
    assert objects(store) == before
    assert said.dry_run
    done = gc(store)
    assert sorted(keys(said)) == sorted(keys(done))
    assert said.freed == done.freed
    removed = set(before) - set(objects(store))
    for key in removed:
        assert any(key == gone or key.startswith(f"{gone}/") for gone in keys(done)) or (
            "/trash/" in key
        )
    assert gc(store).removed == ()


# On a disk


@pytest.fixture
def disk(tmp_path: Path) -> Store:
    store = file_store(tmp_path)
    save(store, 1)
    return store


def test_a_dead_save_on_disk_is_collected_by_the_time_of_its_lease(disk: Store) -> None:
    dead = killed_save(disk, 2)
    assert keys(gc(disk)) == []
    (held,) = disk.catalog.leases(RUN)
    age(disk, held.key, DAY + 60)
    assert KEYS.directory(dead) in keys(gc(disk))
    assert not Path(disk.backend.local_path(KEYS.directory(dead)) or "").exists()
    assert content(disk.get(RUN, step=1)) == ABC


def test_old_times_of_files_do_not_shorten_the_grace_of_a_save(disk: Store) -> None:
    dead = killed_save(disk, 2)
    for path in ABC:
        age(disk, KEYS.file(dead, path), 1000 * DAY)
    assert keys(gc(disk)) == []


def test_an_empty_directory_on_disk_has_an_age_too(disk: Store) -> None:
    key = "run/00002-step-00000002-abcdefgh"
    Path(disk.backend.local_path(key) or "").mkdir()
    assert keys(gc(disk)) == []
    age(disk, key, DAY + 60)
    assert keys(gc(disk)) == [key]


def test_trash_on_disk_is_purged_by_the_time_of_its_record(disk: Store) -> None:
    save(disk, 2)
    old = disk.get(RUN, step=1)
    disk.delete(old, grace=3600)
    assert keys(gc(disk)) == []
    age(disk, KEYS.trash_record(old.name), 3660)
    assert keys(gc(disk)) == [KEYS.directory(old.name)]
    assert [p.name for p in Path(disk.uri, RUN).iterdir() if str(old.name) in p.name] == []


def test_a_temporary_on_disk_goes_after_the_grace(disk: Store) -> None:
    key = f"run/commits/{TEMPORARY_PREFIX}abcdefgh"
    Path(disk.uri, key).write_bytes(b"x")
    assert keys(gc(disk)) == []
    age(disk, key, DAY + 60)
    assert keys(gc(disk)) == [key]


def test_a_symbolic_link_among_the_checkpoints_is_not_followed(disk: Store, tmp_path: Path) -> None:
    precious = tmp_path.parent / f"{tmp_path.name}-precious"
    precious.mkdir()
    (precious / "f").write_bytes(b"precious")
    link = Path(disk.uri, RUN, "00009-step-00000009-abcdefgh")
    link.symlink_to(precious)
    inside = Path(disk.backend.local_path(KEYS.directory(killed_save(disk, 2))) or "")
    (inside / "link").symlink_to(precious)
    (held,) = disk.catalog.leases(RUN)
    age(disk, held.key, 10 * DAY)
    gc(disk)
    assert not inside.exists()
    assert (precious / "f").read_bytes() == b"precious"
    assert link.is_symlink()


def test_a_temporary_link_of_a_killed_process_goes_too(disk: Store) -> None:
    path = Path(disk.uri, RUN, f"{TEMPORARY_PREFIX}abcdefgh")
    path.symlink_to("nowhere")
    then = time.time() - 2 * DAY
    os.utime(path, (then, then), follow_symlinks=False)
    gc(disk)
    assert not path.is_symlink()


def test_the_clock_is_that_of_the_store_and_not_of_this_host(
    disk: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_save(disk, 2)
    now = time.time()
    clock: Any = lambda: now + 1000 * DAY  # noqa: E731 - one line
    monkeypatch.setattr(time, "time", clock)
    assert keys(gc(disk)) == []


# What a review found


def test_a_run_without_any_record_is_refused_although_a_trash_record_is_there(
    clock: Clock,
) -> None:
    store = memory_store(clock)
    trashed, *others = (save(store, step) for step in (1, 2, 3))
    store.delete(trashed, grace=0)
    store.backend.delete([KEYS.record(other.name) for other in others])
    before = objects(store)
    clock.advance(1000 * DAY)
    for dry_run in (False, True):
        with pytest.raises(ConflictError, match="2 directories"):
            gc(store, dry_run=dry_run)
    assert objects(store) == before


def test_a_complete_directory_that_lost_its_record_is_kept_and_removed_only_by_force_when_old(
    store: Store, clock: Clock
) -> None:
    lost = save(store, 2)
    save(store, 3)
    store.backend.delete([KEYS.record(lost.name)])
    assert keys(gc(store, force=True)) == []
    before = objects(store)
    clock.advance(1000 * DAY)
    for dry_run in (True, False):
        result = gc(store, grace=0, dry_run=dry_run)
        assert keys(result) == []
        assert "lost its record" in reasons(result.actions)[KEYS.directory(lost.name)]
    assert objects(store) == before
    assert keys(gc(store, force=True)) == [KEYS.directory(lost.name)]
    assert [c.step for c in store.list(RUN)] == [1, 3]


@pytest.mark.parametrize("mark", ["pin", "unreadable"])
def test_trash_that_is_pinned_or_may_be_is_kept_however_old(
    mark: str, store: Store, clock: Clock
) -> None:
    save(store, 2)
    old = store.get(RUN, step=1)
    store.delete(old, grace=0)
    if mark == "pin":
        with pytest.raises(ConflictError, match="deleted"):
            store.pin(old)
    else:
        store.backend.put(f"{KEYS.marks_of(old.name)}/0-x.json", b"torn")
    before = objects(store)
    clock.advance(1000 * DAY)
    for dry_run in (True, False):
        result = gc(store, grace=0, dry_run=dry_run)
        assert keys(result) == []
        assert "pinned" in reasons(result.actions)[KEYS.directory(old.name)]
    assert objects(store) == before
    assert content(store.undelete(Ref(None, RUN, "1"))) == ABC


def test_trash_goes_once_its_pin_is_ended(store: Store, clock: Clock) -> None:
    save(store, 2)
    old = store.get(RUN, step=1)
    store.delete(old, grace=0)
    with pytest.raises(ConflictError):
        store.pin(old)
    clock.advance(DAY)
    assert keys(gc(store)) == []
    marks.unpin(store.catalog, RUN, old.name)
    assert keys(gc(store)) == [KEYS.directory(old.name)]
    assert store.backend.list(KEYS.marks_of(old.name)) == []


@pytest.mark.parametrize("place", ["", "run/", "run/commits/", "run/leases/"])
def test_without_a_grace_temporaries_of_the_last_half_hour_are_left_alone(
    place: str, store: Store, clock: Clock
) -> None:
    key = f"{place}{TEMPORARY_PREFIX}abcdefgh"
    store.backend.put(key, b"xyz")
    clock.advance(STALE_SECONDS - 1)
    assert keys(gc(store, grace=0)) == []
    assert store.backend.stat(key) is not None
    clock.advance(1)
    assert keys(gc(store, grace=0)) == [key]
    assert store.backend.stat(key) is None


def test_a_void_in_a_stray_temporary_among_the_records_ends_as_a_standing_void(
    store: Store, clock: Clock
) -> None:
    name = failed_save(store, 2)
    key = f"{KEYS.commits}/{TEMPORARY_PREFIX}abcdefgh"
    store.backend.put(key, store.backend.read(KEYS.record(name), 2**20))
    store.backend.delete([KEYS.record(name)])
    clock.advance(DAY)
    assert keys(gc(store, dry_run=True)) == [key]
    assert store.catalog.find(RUN, name) is None
    assert keys(gc(store)) == [key]
    found = store.catalog.find(RUN, name)
    assert found is not None
    assert isinstance(found.record, Void)
    assert store.backend.stat(key) is None


def test_a_run_that_cannot_be_read_does_not_keep_gc_from_another(clock: Clock) -> None:
    store = memory_store(clock)
    save(store, 1, run="a")
    save(store, 1)
    dead = killed_save(store, 2)
    clock.advance(2 * DAY)

    def refuse(operation: str, key: str, phase: Phase) -> None:
        if key == "a" or key.startswith("a/"):
            raise AccessDeniedError("not yours")

    hooked = Store(HookedBackend(store.backend, refuse))
    with pytest.raises(PartialError, match="not yours"):
        gc(hooked)
    assert store.backend.list(KEYS.directory(dead)) == []
    assert [c.step for c in store.list("a")] == [1]
    with pytest.raises(AccessDeniedError):
        gc(hooked, "a")


def test_marks_of_a_voided_checkpoint_without_a_directory_are_collected(
    store: Store, clock: Clock
) -> None:
    save(store, 2)
    old = store.get(RUN, step=1)
    store.delete(old)
    _, trash = store.catalog.find_trash(RUN, old.name)
    assert deleting.purge(store.catalog, RUN, old.name, trash, "over")
    with pytest.raises(ConflictError):
        store.pin(old)
    store.tag(store.get(RUN, step=2), "good")
    marked = KEYS.marks_of(old.name)
    assert keys(gc(store, dry_run=True)) == [marked]
    assert store.backend.list(marked)
    assert keys(gc(store)) == [marked]
    assert store.backend.list(marked) == []
    assert store.get(RUN, step=2).tags == ["good"]


def outside(root: Path, files: dict[str, bytes]) -> Path:
    """A directory beside the store that nothing in the store may reach, with ancient files."""
    made = write_tree(root.parent / f"{root.name}-outside", files)
    for path in sorted(made.rglob("*")):
        os.utime(path, (1, 1))
    return made


@pytest.mark.parametrize("place", ["marks", "trash", "leases", "commits"])
def test_gc_reaches_nothing_through_a_directory_of_a_run_that_is_a_symbolic_link(
    place: str, disk: Store, tmp_path: Path
) -> None:
    name = str(Name(1, "abcdefgh", 1))
    files = {
        f"{name}.json": b"precious",
        f"{name}.abc.json": b"precious",
        f"{name}/0-a.json": b"precious",
        f"{name}/{TEMPORARY_PREFIX}x": b"precious",
        f"{TEMPORARY_PREFIX}abcdefgh": b"precious",
    }
    target = outside(tmp_path, files)
    if (tmp_path / RUN / place).exists():
        (tmp_path / RUN / place).rename(target.parent / f"{target.name}-aside")
    (tmp_path / RUN / place).symlink_to(target)
    with pytest.raises((IntegrityError, ConflictError)):
        gc(disk, grace=0)
    for force in (False, True):
        with suppress(CkptError):
            gc(disk, grace=0, force=force)
    assert read_tree(target) == files


def test_a_trash_record_behind_a_symbolic_link_is_not_believed(disk: Store, tmp_path: Path) -> None:
    save(disk, 2)
    old = disk.get(RUN, step=1)
    disk.delete(old, grace=0)
    trash = tmp_path / RUN / "trash"
    aside = tmp_path.parent / f"{tmp_path.name}-outside"
    trash.rename(aside)
    trash.symlink_to(aside)
    os.utime(aside / f"{old.name}.json", (1, 1))
    before = read_tree(tmp_path) | read_tree(aside)
    with suppress(CkptError):
        gc(disk)
    assert read_tree(tmp_path) | read_tree(aside) == before
    with pytest.raises(IntegrityError, match="symbolic link"):
        disk.undelete(Ref(None, RUN, "1"))


def test_a_run_that_is_a_symbolic_link_is_not_collected(disk: Store, tmp_path: Path) -> None:
    target = outside(
        tmp_path,
        {
            "commits/x": b"",
            "00001-step-00000001-abcdefgh/f": b"precious",
            f"{TEMPORARY_PREFIX}abcdefgh": b"precious",
        },
    )
    before = read_tree(target)
    (tmp_path / "linked").symlink_to(target)
    for run in (None, "linked"):
        for force in (False, True):
            with suppress(CkptError):
                gc(disk, run, grace=0, force=force)
            assert read_tree(target) == before
    with pytest.raises(IntegrityError, match="symbolic link"):
        gc(disk, "linked", grace=0, force=True)


@pytest.mark.parametrize("prefix", ["link", "link/sub", "link/sub/deep"])
def test_removing_a_tree_removes_nothing_behind_a_symbolic_link(
    prefix: str, tmp_path: Path
) -> None:
    target = write_tree(tmp_path / "outside", {"sub/deep/f": b"precious"})
    root = write_tree(tmp_path / "store", {"x": b""})
    (root / "link").symlink_to(target)
    backend = LocalBackend(str(root))
    with pytest.raises(CkptError) as caught:
        backend.remove_tree(prefix)
    assert read_tree(target) == {"sub/deep/f": b"precious"}
    if prefix != "link":
        assert isinstance(caught.value, IntegrityError)
        with pytest.raises(IntegrityError):
            backend.delete([f"{prefix}/f"])


def test_the_directory_of_a_dead_save_that_is_a_symbolic_link_loses_nothing(
    disk: Store, tmp_path: Path
) -> None:
    dead = killed_save(disk, 2)
    target = outside(tmp_path, {"a.txt": b"precious"})
    directory = tmp_path / KEYS.directory(dead)
    directory.rename(target.parent / f"{target.name}-aside")
    directory.symlink_to(target)
    (held,) = disk.catalog.leases(RUN)
    age(disk, held.key, 10 * DAY)
    with suppress(CkptError):
        gc(disk, grace=0, force=True)
    assert read_tree(target) == {"a.txt": b"precious"}


def test_a_void_in_a_trash_record_takes_no_files_back(store: Store) -> None:
    save(store, 2)
    old = store.get(RUN, step=1)
    void = store.backend.read(KEYS.record(failed_save(store, 3)), 2**20)
    store.delete(old)
    trash, _ = store.catalog.find_trash(RUN, old.name)
    assert isinstance(trash, Trash)
    changed = msgspec.structs.replace(trash, record=void.decode())
    store.backend.put(KEYS.trash_record(old.name), document.encode(changed))
    before = objects(store)
    with pytest.raises(IntegrityError):
        store.undelete(Ref(None, RUN, "1"))
    assert objects(store) == before
