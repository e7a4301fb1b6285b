"""How a store and its mirrors stand."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from ckptstore import document, mirrors, open_store
from ckptstore.errors import Damage, NotFoundError
from ckptstore.layout import RunKeys
from ckptstore.maintenance import verify
from ckptstore.maintenance.mirror import How, mirror
from ckptstore.maintenance.status import RunStatus, growth_of, status
from ckptstore.marks import note_damage
from ckptstore.records import Commit, ManifestPin
from ckptstore.store import Store
from ckptstore.voiding import ensure_void
from tests.cli.support import WRITER
from tests.unit.support import failed_save, killed_save, save

RUN = "run"

BAD = [Damage("a.txt", 0, 5, "content differs")]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "store"))
    for step in (1, 2, 3):
        save(made, step)
    return made


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "mirror"))


def one(store: Store, **how: float) -> RunStatus:
    (found,) = status(store, RUN, **how).runs  # type: ignore[arg-type]
    return found


def aged(store: Store, step: int, seconds: float) -> None:
    """Have a checkpoint saved so long ago, by its own record."""
    checkpoint = store.get(RUN, step=step)
    path = Path(store.uri) / RunKeys(RUN).record(checkpoint.name)
    then = datetime.fromtimestamp(time.time() - seconds, UTC).isoformat()
    path.chmod(0o644)
    path.unlink()
    path.write_bytes(document.encode(msgspec.structs.replace(checkpoint.commit, created=then)))


def commit(seq: int, at: float, size: int = 1000) -> Commit:
    return Commit(
        format=1,
        name=f"{seq:05d}-step-{seq:08d}-abcdefgh",
        run=RUN,
        step=seq,
        seq=seq,
        store="s",
        manifest=ManifestPin(size=1, digest="0" * 64),
        content="0" * 64,
        size=size,
        files=1,
        created=datetime.fromtimestamp(at, UTC).isoformat(),
        writer=WRITER,
    )


# A run


def test_a_run_is_summed_up(store: Store) -> None:
    found = one(store)
    newest = store.get(RUN, step=3)
    assert found.newest is not None
    assert (found.newest.ref, found.newest.name) == (f"{RUN}@3", newest.name)
    assert found.newest.age is not None
    assert 0 <= found.newest.age < 60
    assert (found.checkpoints, found.bytes) == (3, 3 * newest.size)
    assert (found.damaged, found.verified, found.mirrors) == ((), None, ())


def test_the_newest_is_intact_and_the_damaged_are_named(store: Store) -> None:
    newest = store.get(RUN, step=3)
    note_damage(store.catalog, RUN, newest.name, BAD, deep=True)
    lost = store.get(RUN, step=1)
    (Path(store.uri) / RunKeys(RUN).record(lost.name)).unlink()
    unreadable = save(store, 4)
    path = Path(store.uri) / RunKeys(RUN).record(unreadable.name)
    path.unlink()
    path.write_bytes(b"{")
    found = one(store)
    assert found.newest is not None
    assert found.newest.ref == f"{RUN}@2"
    assert found.checkpoints == 4
    assert found.damaged == (f"{RUN}@{lost.name}", f"{RUN}@3", f"{RUN}@4")


def test_the_last_verification_is_of_any_checkpoint(store: Store) -> None:
    assert verify(store.get(RUN, step=3), deep=True).ok
    assert verify(store.get(RUN, step=2), deep=True).ok
    found = one(store).verified
    assert found is not None
    assert found.ref == f"{RUN}@2"
    assert found.at == store.get(RUN, step=2).standing.verified


def test_trash_dead_saves_and_live_ones_are_told_apart(store: Store) -> None:
    size = store.get(RUN, step=1).size
    store.delete(store.get(RUN, step=1))
    dead = killed_save(store, 8)
    live = store.save(RUN, 9)
    live.add_bytes("half.bin", b"half")
    found = one(store)
    assert found.checkpoints == 2
    assert (found.trash.count, found.trash.bytes) == (1, size)
    assert (found.unfinished.count, found.unfinished.bytes) == (1, 4)
    assert found.orphans.count == 1
    there = Path(store.uri) / RUN / str(dead)
    assert found.orphans.bytes == sum(p.stat().st_size for p in there.rglob("*") if p.is_file())
    live.abort(RuntimeError("enough"))
    failed_save(store)
    assert one(store).unfinished.count == 0


def test_a_save_that_was_given_up_is_dead_whatever_its_lease_says(store: Store) -> None:
    live = store.save(RUN, 9)
    live.add_bytes("half.bin", b"half")
    ensure_void(store.catalog, RUN, live.name, "taken over")
    found = one(store)
    assert (found.unfinished.count, found.orphans.count) == (0, 1)
    live.abort(RuntimeError("enough"))


def test_a_checkpoint_that_is_being_deleted_counts_once(store: Store) -> None:
    """A delete writes its trash record before it removes the record."""
    name = store.get(RUN, step=1).name
    record = Path(store.uri) / RunKeys(RUN).record(name)
    kept = record.read_bytes()
    store.delete(store.get(RUN, step=1))
    record.write_bytes(kept)
    found = one(store)
    assert (found.checkpoints, found.trash.count, found.orphans.count) == (3, 0, 0)


def test_what_is_not_there_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        status(store, "other")
    with pytest.raises(NotFoundError):
        status(open_store(str(tmp_path / "nothing")))


# Growth


def test_growth_is_the_size_of_a_save_over_the_time_between_two() -> None:
    now = 1_800_000_000.0
    steady = [commit(i, now - 100 * (10 - i)) for i in range(1, 11)]
    assert growth_of(steady, now) == pytest.approx(10.0)
    assert growth_of(steady[:1], now) is None
    assert growth_of([], now) is None


def test_neither_a_jumping_clock_nor_a_pause_changes_growth() -> None:
    now = 1_800_000_000.0
    times = [now - 100 * (20 - i) for i in range(20)]
    times[5] += 10_000_000
    times[10] -= 10_000_000
    times[:3] = [t - 86400 for t in times[:3]]
    skewed = [commit(i + 1, t) for i, t in enumerate(times)]
    assert growth_of(skewed, now) == pytest.approx(10.0)


def test_clocks_that_only_go_back_tell_nothing() -> None:
    now = 1_800_000_000.0
    assert growth_of([commit(1, now), commit(2, now - 5), commit(3, now - 5)], now) is None


def test_what_was_pruned_in_between_counts_as_saved() -> None:
    now = 1_800_000_000.0
    kept = [commit(seq, now - 100 * (50 - seq)) for seq in (10, 20, 30, 40, 50)]
    assert growth_of(kept, now) == pytest.approx(10.0)


def test_a_run_that_has_stopped_does_not_grow() -> None:
    now = 1_800_000_000.0
    steady = [commit(i, now - 100 * (10 - i)) for i in range(1, 11)]
    assert growth_of(steady, now + 900) == pytest.approx(10.0)
    assert growth_of(steady, now + 1100) == 0.0


def test_the_disk_is_full_when_the_growth_has_filled_it(store: Store) -> None:
    for step in (1, 2, 3):
        aged(store, step, 100.0 * (3 - step))
    found = status(store)
    size = store.get(RUN, step=1).size
    assert found.growth == pytest.approx(size / 100, rel=0.1)
    assert found.free is not None
    assert found.free == pytest.approx(shutil.disk_usage(store.uri).free, rel=0.1)
    assert found.full_in == pytest.approx(found.free / (size / 100), rel=0.1)


# Mirrors


def test_without_a_mirror_everything_would_be_lost(store: Store) -> None:
    loss = one(store).loss
    assert (loss.everything, loss.checkpoints, loss.steps) == (True, 3, 3)


@pytest.mark.parametrize("ask", [True, False])
def test_a_mirror_that_holds_all_loses_nothing(store: Store, target: Store, ask: bool) -> None:
    mirror(store, target)
    found = status(store, RUN, ask=ask)
    (run,) = found.runs
    (reached,) = run.mirrors
    assert (reached.live, reached.behind.checkpoints) == (ask, 0)
    assert reached.newest == store.get(RUN, step=3).name
    assert (run.loss.everything, run.loss.checkpoints, run.loss.steps) == (False, 0, 0)
    (there,) = found.mirrors
    assert (there.asked, there.answered, there.problem) == (ask, ask, None)
    assert there.reached is not None


@pytest.mark.parametrize("ask", [True, False])
def test_what_a_mirror_lacks_would_be_lost(store: Store, target: Store, ask: bool) -> None:
    aged(store, 3, 3600)
    mirror(store, target)
    save(store, 10)
    aged(store, 10, 1200)
    save(store, 15)
    aged(store, 15, 600)
    run = one(store, ask=ask)
    (reached,) = run.mirrors
    behind = reached.behind
    assert behind.checkpoints == 2
    assert behind.bytes == store.get(RUN, step=10).size + store.get(RUN, step=15).size
    assert behind.seconds == pytest.approx(1200, abs=60)
    assert (run.loss.everything, run.loss.checkpoints, run.loss.steps) == (False, 2, 12)
    assert run.loss.seconds == pytest.approx(3000, abs=60)


def test_the_best_of_several_mirrors_counts(store: Store, target: Store, tmp_path: Path) -> None:
    mirror(store, target)
    save(store, 4)
    other = open_store(str(tmp_path / "other"))
    mirror(store, other)
    run = one(store)
    assert sorted(m.behind.checkpoints for m in run.mirrors) == [0, 1]
    assert run.loss.checkpoints == 0


def test_a_mirror_is_asked_and_not_believed(store: Store, target: Store) -> None:
    """What a mirror has lost since the last pass, only the mirror itself tells."""
    mirror(store, target)
    newest = target.get(RUN, step=3).name
    (Path(target.uri) / RunKeys(RUN).record(newest)).unlink()
    assert one(store, ask=False).loss.checkpoints == 0
    run = one(store)
    assert run.mirrors[0].behind.checkpoints == 1
    assert (run.loss.checkpoints, run.loss.steps) == (1, 1)


def test_a_damaged_copy_saves_nothing(store: Store, target: Store) -> None:
    mirror(store, target)
    newest = target.get(RUN, step=3).name
    note_damage(target.catalog, RUN, newest, BAD, deep=True)
    run = one(store)
    assert run.mirrors[0].newest == store.get(RUN, step=2).name
    assert (run.loss.checkpoints, run.loss.steps) == (1, 1)


def test_what_the_source_has_pruned_and_the_mirror_kept_counts(store: Store, target: Store) -> None:
    mirror(store, target)
    save(store, 9)
    for step in (1, 2, 3):
        store.delete(store.get(RUN, step=step), force=True)
    for ask in (True, False):
        loss = one(store, ask=ask).loss
        assert (loss.everything, loss.checkpoints, loss.steps) == (False, 1, 6)


def test_what_is_damaged_here_is_no_lag(store: Store, target: Store) -> None:
    mirror(store, target)
    bad = save(store, 4)
    note_damage(store.catalog, RUN, bad.name, BAD, deep=True)
    run = one(store)
    assert run.damaged == (f"{RUN}@4",)
    assert run.mirrors[0].behind.checkpoints == 0
    assert run.loss.checkpoints == 0


def test_a_run_that_a_mirror_shall_not_hold_is_not_behind(store: Store, target: Store) -> None:
    save(store, 1, run="other")
    mirror(store, target, How(runs=("other",)))
    found = status(store)
    assert {r.run: len(r.mirrors) for r in found.runs} == {"other": 1, RUN: 0}
    assert {r.run: r.loss.everything for r in found.runs} == {"other": False, RUN: True}


def test_a_mirror_that_was_never_reached_is_owed_everything(store: Store, tmp_path: Path) -> None:
    mirrors.expect_mirror(store.catalog, str(tmp_path / "unmounted"))
    found = status(store)
    (there,) = found.mirrors
    assert not there.answered
    assert there.problem is not None
    assert "there is no store" in there.problem
    assert found.runs[0].mirrors[0].behind.checkpoints == 3
    assert found.runs[0].loss.everything


def test_a_mirror_that_is_gone_is_told_by_the_notes(store: Store, target: Store) -> None:
    mirror(store, target)
    save(store, 4)
    os.rename(target.uri, f"{target.uri}-away")
    found = status(store)
    assert not found.mirrors[0].answered
    (reached,) = found.runs[0].mirrors
    assert (reached.live, reached.behind.checkpoints) == (False, 1)
    assert (found.runs[0].loss.everything, found.runs[0].loss.checkpoints) == (False, 1)


def test_another_store_in_the_mirror_s_place_does_not_count(store: Store, target: Store) -> None:
    mirror(store, target)
    os.rename(target.uri, f"{target.uri}-away")
    save(open_store(target.uri), 3)
    (there,) = status(store).mirrors
    assert not there.answered
    assert "another store" in str(there.problem)


@pytest.fixture
def silent() -> Iterator[int]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(listening.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()
        thread.join()


def test_a_mirror_that_does_not_answer_holds_nothing_up(store: Store, silent: int) -> None:
    mirrors.expect_mirror(store.catalog, f"webhdfs://127.0.0.1:{silent}/ckpts")
    began = time.monotonic()
    found = status(store, seconds=0.5)
    assert time.monotonic() - began < 5
    (there,) = found.mirrors
    assert (there.asked, there.answered) == (True, False)
    assert "did not answer within 0.5 s" in str(there.problem)


def test_a_note_that_cannot_be_read_is_owed_everything(store: Store, target: Store) -> None:
    mirror(store, target)
    (known,) = mirrors.known_mirrors(store.catalog)
    (Path(store.uri) / "mirrors" / f"{known.id}.json").write_bytes(b"{")
    found = status(store)
    assert not found.mirrors[0].asked
    assert "cannot be read" in str(found.mirrors[0].problem)
