"""A look at a run that follows another: what it costs, and that it misses nothing that guards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from ckptstore import deleting, marks
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.errors import ConflictError, Damage
from ckptstore.layout import RunKeys
from ckptstore.maintenance import Policy, gc, prune
from ckptstore.reading import Checkpoint
from ckptstore.records import BestRule
from ckptstore.runview import RunView
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend, Phase
from tests.unit.support import RUN, save

BEST = BestRule("r", "max")
GONE = [Damage("a.txt", 0, 0, "missing")]

Event = Callable[[Store, list[Checkpoint]], None]


def world(backend: MemoryBackend, count: int = 4, *, verified: bool = True) -> list[Checkpoint]:
    """Commits of which the last is the newest, and the one before it best and last verified."""
    store = Store(backend)
    found = [save(store, n, best=BEST, metrics={"r": float(n % count)}) for n in range(count)]
    if verified:
        for one in found[:-1]:
            marks.note_verified(store.catalog, RUN, one.name, 1, deep=True)
    marks.add_metrics(store.catalog, RUN, found[-1].name, {"r": -1.0})
    return found


def cost_of_a_deletion(count: int) -> Counter[str]:
    done: Counter[str] = Counter()

    def note(operation: str, key: str, phase: Phase) -> None:
        if phase == "before":
            done[operation] += 1

    backend = MemoryBackend(Space())
    one = world(backend, count)[0]
    catalog = Store(HookedBackend(backend, note)).catalog
    view = RunView.of(catalog, RUN)
    done.clear()
    deleting.delete(catalog, one, view=view)
    return done


def test_what_a_deletion_after_a_look_costs_does_not_grow_with_the_run() -> None:
    few = cost_of_a_deletion(4)
    assert few == cost_of_a_deletion(60)
    assert few["read"] + few["list"] <= 40


def test_a_prune_reads_each_record_a_constant_number_of_times() -> None:
    read: Counter[str] = Counter()
    backend = MemoryBackend(Space())
    found = world(backend, 60)

    def note(operation: str, key: str, phase: Phase) -> None:
        if operation == "read" and phase == "before":
            read[key] += 1

    prune(Store(HookedBackend(backend, note)), RUN, Policy(keep_last=1), collect=False)
    assert [c.step for c in Store(backend).list(RUN)] == [58, 59]
    costs = [read[RunKeys(RUN).record(c.name)] for c in found[:-2]]
    assert max(costs) <= 8
    assert sum(read.values()) < 40 * len(found)


def pin(store: Store, found: list[Checkpoint]) -> None:
    store.pin(found[0])


def better(store: Store, found: list[Checkpoint]) -> None:
    marks.add_metrics(store.catalog, RUN, found[0].name, {"r": 100.0})


def the_best_is_worse(store: Store, found: list[Checkpoint]) -> None:
    for one in found[1:]:
        marks.add_metrics(store.catalog, RUN, one.name, {"r": -100.0})


def verified_and_others_damaged(store: Store, found: list[Checkpoint]) -> None:
    marks.note_verified(store.catalog, RUN, found[0].name, 1, deep=True)
    for one in found[1:-1]:
        marks.note_damage(store.catalog, RUN, one.name, GONE, deep=True)


def all_newer_damaged(store: Store, found: list[Checkpoint]) -> None:
    for one in found[1:]:
        marks.note_damage(store.catalog, RUN, one.name, GONE, deep=True)


def all_newer_deleted(store: Store, found: list[Checkpoint]) -> None:
    for one in found[1:]:
        store.delete(one, grace=0, force=True)


def all_newer_purged(store: Store, found: list[Checkpoint]) -> None:
    all_newer_deleted(store, found)
    gc(store, RUN)
    assert len(store.catalog.record_names(RUN)) == len(found), "there are voids in their places"


def another_rule(store: Store, found: list[Checkpoint]) -> None:
    save(store, 9, best=BestRule("r", "min"), metrics={"r": 1.0})
    marks.add_metrics(store.catalog, RUN, found[0].name, {"r": -200.0})


EVENTS: dict[Event, str] = {
    pin: "pinned",
    better: "best",
    the_best_is_worse: "best",
    verified_and_others_damaged: "verified",
    all_newer_damaged: "newest",
    all_newer_deleted: "newest",
    all_newer_purged: "newest",
    another_rule: "best",
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_what_happens_between_two_looks_is_seen(event: Event, early: bool) -> None:
    """Before the first look of the deletion, or between its two looks."""
    backend = MemoryBackend(Space(), clock=lambda: 1000.0)  # times that tell nothing
    found = world(backend, verified=event is not verified_and_others_damaged)
    one = found[0]
    happened: list[bool] = []

    def happens(operation: str, key: str, phase: Phase) -> None:
        trash = (operation, key) == ("put", RunKeys(RUN).trash_record(one.name))
        if trash and phase == "after" and not happened:
            happened.append(True)
            event(Store(backend), found)

    catalog = Store(HookedBackend(backend, happens)).catalog
    view = RunView.of(catalog, RUN)
    assert view.guards(one.name) == []
    if early:
        happened.append(True)
        event(Store(backend), found)
    with pytest.raises(ConflictError, match=EVENTS[event]):
        deleting.delete(catalog, one, view=view, even_owed=True)
    assert happened
    assert one.name in {c.name for c in Store(backend).list(RUN)}
    assert one.name not in Store(backend).catalog.trash_names(RUN)


def test_looks_that_follow_each_other_never_guard_less_than_a_first_look() -> None:
    """Through a prune with events in between, from one view to the next."""
    backend = MemoryBackend(Space())
    found = world(backend, 12)
    store = Store(backend)
    view = RunView.of(store.catalog, RUN)
    happenings: list[Callable[[], object]] = [
        lambda: store.pin(found[3]),
        lambda: marks.add_metrics(store.catalog, RUN, found[4].name, {"r": 50.0}),
        lambda: store.delete(found[-1], force=True),
        lambda: marks.note_damage(store.catalog, RUN, found[4].name, GONE, deep=True),
        lambda: save(store, 99),
        lambda: marks.note_verified(store.catalog, RUN, found[4].name, 1, deep=True),
        lambda: store.delete(found[10], force=True),
    ]
    for happens in happenings:
        happens()
        for one in found:
            view = view.again(store.catalog, one.name)
            first = RunView.of(store.catalog, RUN)
            assert set(view.guards(one.name)) >= set(first.guards(one.name))
            assert view.found == first.found
