"""What else may happen to a checkpoint in the target while a mirror is at it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore import open_store
from ckptstore.backends.local import LocalBackend
from ckptstore.errors import NotFoundError
from ckptstore.ids import random_letters
from ckptstore.layout import TEMPORARY_PREFIX
from ckptstore.leases import LeaseKeeper
from ckptstore.maintenance import gc
from ckptstore.maintenance.mirror import mirror
from ckptstore.records import writer_here
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend, Phase

RUN = "r"


@pytest.fixture
def source(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "source"))
    for step in (1, 2, 3):
        with store.save(RUN, step) as files:
            files.add_bytes("actor/w.bin", b"%d" % step * 5000)
    return store


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "target"))


def hooked(target: Store, operation: str, part: str, act: Callable[[], None]) -> Store:
    """The store, in which ``act`` happens before the first such operation on such a key."""
    happened: list[str] = []

    def hook(done: str, key: str, phase: Phase) -> None:
        if (done, phase) == (operation, "before") and part in key and not happened:
            happened.append(key)
            act()

    return Store(HookedBackend(LocalBackend(target.uri), hook))


def remove(store: Store, step: int) -> None:
    store.delete(store.get(RUN, step=step), grace=0, force=True)
    gc(store, grace=0)


def test_what_the_target_removes_while_its_marks_are_carried_ends_no_pass(
    source: Store, target: Store
) -> None:
    mirror(source, target)
    with source.save(RUN, 4) as files:
        files.add_bytes("actor/w.bin", b"new")
    source.pin(source.get(RUN, step=1))

    def removed_under_the_writer() -> None:
        remove(target, 1)
        raise NotFoundError("marks: No such file or directory")

    result = mirror(source, hooked(target, "create_exclusive", "/marks/", removed_under_the_writer))
    assert result.ok, result
    assert [c.step for c in target.list(RUN)] == [2, 3, 4]
    assert mirror(source, target).ok
    assert not (Path(target.uri) / RUN / "marks" / str(source.get(RUN, step=1).name)).exists()


@pytest.mark.parametrize("operation", ["write", "finish", "open_writer"])
def test_what_another_mirror_copies_and_the_target_removes_meanwhile_is_no_failure(
    source: Store, target: Store, operation: str
) -> None:
    target.create()

    def copied_and_removed() -> None:
        for lease in (Path(target.uri) / RUN / "leases").iterdir():
            lease.unlink()  # the other one looked for leases before this one's was written
        assert mirror(source, target).ok
        remove(target, 1)

    result = mirror(source, hooked(target, operation, "w.bin", copied_and_removed))
    assert result.ok, result
    assert not result.skipped
    assert [c.step for c in target.list(RUN)] == [2, 3]
    assert result.behind.checkpoints == 0


def test_a_file_that_another_mirror_is_just_naming_ends_no_pass(
    source: Store, target: Store
) -> None:
    """For a moment it has neither its temporary nor its final name."""
    target.create()
    name = source.get(RUN, step=1).name
    directory = Path(target.uri) / RUN / str(name) / "actor"
    others: list[LeaseKeeper] = []

    def renamed_aside() -> None:
        writer = writer_here(random_letters())
        other = LeaseKeeper(target.catalog, RUN, name, writer, copy_of=source.id)
        others.append(other)
        (shared,) = directory.glob(f"{TEMPORARY_PREFIX}*")
        shared.rename(directory / f"{TEMPORARY_PREFIX}theirs")

    result = mirror(source, hooked(target, "finish", "w.bin", renamed_aside))
    assert result.ok, result
    assert [c.step for c in target.list(RUN)] == [2, 3]
    assert result.behind.checkpoints == 1
    others[0].abandon()
    assert mirror(source, target).ok
    assert [c.step for c in target.list(RUN)] == [1, 2, 3]


def killed_copy(source: Store, target: Store, step: int) -> LeaseKeeper:
    """The lease of a mirror that has begun a checkpoint and was killed; its directory is there."""
    name = source.get(RUN, step=step).name
    lease = LeaseKeeper(target.catalog, RUN, name, writer_here(random_letters()), copy_of=source.id)
    target.backend.make_directory(f"{RUN}/{name}")
    return lease


def test_gc_never_gives_up_a_copy_that_was_begun_while_it_looked(
    source: Store, target: Store
) -> None:
    """It would see the lease, but have listed the directories before that one was made."""
    mirror(source, target)
    with source.save(RUN, 4) as files:
        files.add_bytes("actor/w.bin", b"new")

    def begun_and_killed() -> None:
        killed_copy(source, target, 4).abandon()

    gc(hooked(target, "list", f"{RUN}/leases", begun_and_killed), grace=0)
    gc(target, grace=0)
    assert len(mirror(source, target).copied) == 1
    assert [c.step for c in target.list(RUN)] == [1, 2, 3, 4]


def test_gc_removes_what_a_killed_mirror_left_beside_the_copy_of_another(
    source: Store, target: Store
) -> None:
    mirror(source, target)
    lease = killed_copy(source, target, 1)
    left = Path(target.uri) / RUN / str(source.get(RUN, step=1).name) / f"{TEMPORARY_PREFIX}x"
    left.write_bytes(b"half")
    gc(target, grace=0)
    assert left.exists(), "it may still be at work"
    lease.abandon()
    assert left.name in str(gc(target, grace=0).removed)
    assert not left.exists()
    assert target.catalog.leases(RUN) == []
    assert [c.step for c in target.list(RUN)] == [1, 2, 3]


def test_what_the_source_has_removed_is_not_taken_for_spoilt_in_the_mirror(
    source: Store, target: Store
) -> None:
    """Nor when what the mirror holds was never noted, or another mirror noted less."""
    mirror(source, target)
    remove(source, 1)
    for noted in (Path(source.uri) / "mirrors").glob("*/*.json"):
        noted.unlink()
    result = mirror(source, target)
    assert result.ok, result
    assert [c.step for c in target.list(RUN)] == [1, 2, 3]
