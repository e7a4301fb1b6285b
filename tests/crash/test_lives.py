"""An old life that goes on saving, and a new one that begins and decides what it resumes from."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.base import Backend
from ckptstore.backends.local import LocalBackend
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError, SupersededError
from ckptstore.ids import seeded_ids
from ckptstore.layout import Name
from ckptstore.lives import begin_life
from ckptstore.maintenance import gc
from ckptstore.records import Commit, decode_record
from ckptstore.resume import plan_resume
from ckptstore.saveoptions import SaveOptions
from ckptstore.saving import Save
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend, Phase
from ckptstore.testing.kills import Countdown, run_in_child, start_child
from ckptstore.testing.schedules import explore, sample
from tests.conftest import FULL
from tests.crash.helpers import check_clean, check_store, collect
from tests.crash.test_interleavings import committed_without_files
from tests.unit.support import stop

NOW = 1_000_000.0
RUN = "r"
DECIDED = "decided"
"""Where a new life notes, for the test, the step that its plan took."""


@pytest.fixture(autouse=True)
def _same_keys_in_every_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explorer knows a state by its keys, and by the operations that led to it."""
    monkeypatch.setattr("ckptstore.saving.random_letters", lambda: "written")
    monkeypatch.setattr("ckptstore.leases.JOURNAL_SECONDS", float("inf"))


def now() -> float:
    return NOW


def prepare(backend: Backend) -> None:
    """Life 1 has committed step 1."""
    store = Store(backend, ids=seeded_ids("world"))
    assert store.begin_life(RUN) == 1
    with store.save(RUN, 1, life=1) as save:
        save.add_bytes("a", b"a")


def world() -> Space:
    space = Space()
    prepare(MemoryBackend(space, clock=now))
    return space


def old_life(backend: Backend) -> str:
    """Life 1 saves step 2."""
    options = SaveOptions(life=1)
    with Save(Catalog(backend, seeded_ids("old")), RUN, 2, options) as save:
        save.add_bytes("a", b"late")
    return "committed"


def new_life(backend: Backend) -> str:
    """The next life begins and plans its resume."""
    return decided_by(backend, lambda store: plan_resume(store, RUN).require().step)


def hasty_life(backend: Backend) -> str:
    """The next life begins and takes the newest, without the many looks of a plan."""

    def newest(store: Store) -> int:
        found = store.catalog.newest(RUN)
        return found.name.step if found is not None else 0

    return decided_by(backend, newest)


def decided_by(backend: Backend, decide: Callable[[Store], int]) -> str:
    store = Store(backend)
    life = store.begin_life(RUN)
    step = decide(store)
    backend.put(f"{DECIDED}/{life}", str(step).encode())
    return f"life {life} takes {step}"


def beginner(backend: Backend) -> int:
    life = begin_life(Catalog(backend, seeded_ids("new")), RUN).life
    backend.put(f"{DECIDED}/{life}", b"1")
    return life


def collector(backend: Backend) -> str:
    gc(Store(backend), RUN, grace=0)
    return "collected"


def unknown_to_the_new_life(space: Space) -> str | None:
    """No life that has decided finds a commit of an older life afterwards that it did not see."""
    for key, (data, _) in space.objects.items():
        name = Name.parse(key.rpartition("/")[2].removesuffix(".json"))
        if name is None or not key.startswith(f"{RUN}/commits/"):
            continue
        record = decode_record(data, RUN, name, key)
        if not isinstance(record, Commit):
            continue
        for noted, (step, _) in space.objects.items():
            directory, _, life = noted.partition("/")
            if directory == DECIDED and int(life) > (record.life or 0) and record.step > int(step):
                return f"life {life} took step {int(step)}, and step {record.step} is committed"
    return committed_without_files(space)


# Every order


LONG = pytest.mark.skipif(not FULL, reason="4,000 states take half a minute: make test-full")


@pytest.mark.parametrize("newcomer", [hasty_life, pytest.param(new_life, marks=LONG)])
@pytest.mark.timeout(900)
def test_an_old_save_and_a_new_life_in_every_order_agree_on_what_is_committed(
    newcomer: Callable[[Backend], str],
) -> None:
    result = explore(world(), [old_life, newcomer], unknown_to_the_new_life, clock=now)
    assert result.states > 500
    assert result.outcomes == {
        ("returned 'committed'", "returned 'life 2 takes 2'"),
        ("ended with SupersededError", "returned 'life 2 takes 1'"),
    }


def test_two_lives_that_begin_at_once_in_every_order_have_two_numbers() -> None:
    space = world()
    save = Save(
        Catalog(MemoryBackend(space, clock=now), seeded_ids("x")), RUN, 2, SaveOptions(life=1)
    )
    save._forgotten.detach()
    stop(save)

    def open_after_a_decision(space: Space) -> str | None:
        decided = any(key.startswith(f"{DECIDED}/") for key in space.objects)
        data, _ = space.objects.get(f"{RUN}/commits/{save.name}.json", (b"", 0.0))
        return "the save of life 1 is still open" if decided and b"void" not in data else None

    result = explore(space, [beginner, beginner], open_after_a_decision, clock=now)
    assert result.outcomes == {("returned 2", "returned 3"), ("returned 3", "returned 2")}


@pytest.mark.timeout(900)
def test_old_saves_new_lives_and_a_gc_in_random_orders() -> None:
    """The lease is dead to gc: the old life's save was asleep for an hour."""
    space = world()
    slow = MemoryBackend(space, clock=lambda: NOW - 3600)
    save = Save(Catalog(slow, seeded_ids("slow")), RUN, 2, SaveOptions(life=1))
    save.add_bytes("a", b"late")

    def writer(backend: HookedBackend) -> str:
        save._backend = save._lease._backend = backend
        save._catalog = Catalog(backend, seeded_ids("slow"))
        save._ended = False
        with save:
            pass
        return "committed"

    try:
        result = sample(
            space,
            [writer, new_life, new_life, collector],
            unknown_to_the_new_life,
            clock=now,
            runs=3000 if FULL else 300,
            seed=4,
        )
    finally:
        save._forgotten.detach()
        stop(save)
    ends = {outcome[0] for outcome in result.outcomes}
    assert "returned 'committed'" in ends
    assert "ended with SupersededError" in ends
    assert ends <= {
        "returned 'committed'",
        "ended with SupersededError",
        "ended with VoidedError",  # by gc, before a new life began
    }


# The same where it is real: memory and disk


Place = Callable[[], Backend]


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Place]:
    """Makes a store for each number; each call of what it gives is another client of it."""

    def make(number: int) -> Place:
        if request.param == "memory":
            space = Space()
            return lambda: MemoryBackend(space)
        return lambda: LocalBackend(str(tmp_path / str(number)))

    return make


def end_of(act: Callable[[Backend], str], backend: Backend) -> str:
    try:
        return act(backend)
    except CkptError as error:
        return type(error).__name__


def with_another_at(
    point: int, client: Place, act: Callable[[Backend], str], other: Callable[[Backend], str]
) -> tuple[str, str] | None:
    """``act``, with ``other`` as a whole before its ``point``-th operation.

    Returns:
        How both ended; ``None`` when ``act`` has fewer operations.
    """
    operations = 0
    others: list[str] = []

    def hook(operation: str, key: str, phase: Phase) -> None:
        nonlocal operations
        if phase == "before":
            if operations == point:
                others.append(end_of(other, client()))
            operations += 1

    end = end_of(act, HookedBackend(client(), hook))
    return (end, others[0]) if others else None


def test_a_new_life_at_any_moment_of_an_old_save(place: Callable[[int], Place]) -> None:
    committed = []
    for point in range(1000):
        client = place(point)
        prepare(client())
        ends = with_another_at(point, client, old_life, new_life)
        if ends is None:
            break
        assert ends in (("committed", "life 2 takes 2"), ("SupersededError", "life 2 takes 1"))
        steps = [c.step for c in Store(client()).list(RUN)]
        assert steps == ([1, 2] if ends[0] == "committed" else [1])
        committed.append(ends[0] == "committed")
    first = committed.index(True)
    assert first > 10
    assert all(committed[first:]), "from the record on"


def test_an_old_save_at_any_moment_of_a_new_life(place: Callable[[int], Place]) -> None:
    found = set()
    for point in range(1000):
        client = place(point)
        prepare(client())
        ends = with_another_at(point, client, new_life, old_life)
        if ends is None:
            break
        found.add(ends)
    assert found == {("life 2 takes 2", "committed"), ("life 2 takes 1", "SupersededError")}


# Killed processes


def begin_counting_operations(uri: Path, count: int) -> None:
    Store(HookedBackend(LocalBackend(str(uri)), Countdown(count).hook)).begin_life(RUN)


def begin_counting_system_calls(uri: Path, count: int) -> None:
    Countdown(count).install()
    ckptstore.open_store(str(uri)).begin_life(RUN)


@pytest.mark.parametrize("first", [True, False], ids=["first-life", "later-life"])
@pytest.mark.parametrize(
    "begin",
    [begin_counting_operations, begin_counting_system_calls],
    ids=["backend-operations", "system-calls"],
)
@pytest.mark.timeout(600)
def test_a_beginning_killed_anywhere_is_made_up_for_by_the_next(
    tmp_path: Path,
    begin: Callable[[Path, int], None],
    first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = 0
    killed = True
    while killed:
        uri = tmp_path / str(point)
        uri.mkdir()
        store = ckptstore.open_store(str(uri))
        saves = []
        if not first:
            prepare(store.backend)
            monkeypatch.setattr("ckptstore.saving.random_letters", lambda p=point: f"live{p}")
            saves.append(store.save(RUN, 2, life=1))
            saves[0].add_bytes("a", b"late")
            status = run_in_child(partial(die_saving, store))
            assert os.WTERMSIG(status) == signal.SIGKILL
        status = run_in_child(partial(begin, uri, point))
        killed = os.WIFSIGNALED(status)
        assert killed or os.WEXITSTATUS(status) == 0

        life = ckptstore.open_store(str(uri)).begin_life(RUN)
        assert life in ((1, 2) if first else (2, 3))
        for save in saves:
            with pytest.raises(SupersededError), save:
                pass
        plan = plan_resume(store, RUN)
        assert (plan.chosen.step if plan.chosen else None) == (None if first else 1)
        assert check_store(uri) == ([] if first else [f"{RUN}@1"])
        collect(uri)
        check_clean(uri)
        assert check_store(uri) == ([] if first else [f"{RUN}@1"])
        shutil.rmtree(uri)
        point += 1
    print(f"{point} kill points")
    assert point > 15


def die_saving(store: Store) -> None:
    store.save(RUN, 2, life=1).add_bytes("a", b"half")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(300)
def test_processes_of_an_old_life_that_live_on_commit_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    uri = str(tmp_path / "store")
    for _ in range(20 if FULL else 5):
        store = ckptstore.open_store(uri)
        life = store.begin_life(RUN)
        base = len(store.list(RUN))
        workers = [start_child(partial(save_on, uri, life, worker)) for worker in range(3)]
        while len(store.list(RUN)) < base + 4:
            time.sleep(0.01)
        store.begin_life(RUN)
        known = [str(c.name) for c in store.list(RUN)]
        chosen = plan_resume(store, RUN).require().name
        assert str(chosen) == known[-1]
        codes = [os.WEXITSTATUS(os.waitpid(worker, 0)[1]) for worker in workers]
        assert codes == [SupersededError.exit_code] * 3
        assert [str(c.name) for c in store.list(RUN)] == known
    collect(Path(uri))
    check_clean(Path(uri))


def save_on(uri: str, life: int, worker: int) -> None:
    store = ckptstore.open_store(uri)
    for step in range(10_000):
        with store.save(RUN, step, life=life) as save:
            save.add_bytes("a", f"{worker} {step}".encode())
