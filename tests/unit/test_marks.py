from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import marks
from ckptstore.errors import Damage, UsageError
from ckptstore.layout import RunKeys
from ckptstore.marks import DAMAGE_NOTES, Standing, note_damage, note_verified, standing
from ckptstore.reading import Checkpoint
from ckptstore.records import Mark, writer_here
from ckptstore.store import Store
from tests.unit.support import RUN, examples, file_store, flipped, memory_store, objects, save

DAMAGE = (Damage("a.txt", 0, 5, "content differs"),)


def now(checkpoint: Checkpoint) -> Standing:
    return standing(checkpoint.catalog, RUN, checkpoint.name)


def tags(checkpoint: Checkpoint) -> list[str]:
    return now(checkpoint).tags(checkpoint.commit)


def test_a_pin_holds_until_it_is_ended_and_can_be_made_again() -> None:
    store = memory_store()
    checkpoint = save(store)
    for _ in range(2):
        assert not now(checkpoint).pinned
        assert store.pin(checkpoint)
        assert now(checkpoint).pinned
        assert not store.pin(checkpoint)
        assert store.unpin(checkpoint)
        assert not now(checkpoint).pinned
        assert not store.unpin(checkpoint)


def test_saying_the_same_twice_adds_nothing_to_the_store() -> None:
    store = memory_store()
    checkpoint = save(store, tags=["born"])
    store.pin(checkpoint)
    store.tag(checkpoint, "good")
    before = objects(store)
    store.pin(checkpoint)
    store.tag(checkpoint, "good")
    store.tag(checkpoint, "born")
    store.untag(checkpoint, "other")
    assert objects(store) == before


def test_marks_are_only_ever_added() -> None:
    store = memory_store()
    checkpoint = save(store, tags=["born"])
    before = objects(store)
    for change in (
        lambda: store.pin(checkpoint),
        lambda: store.unpin(checkpoint),
        lambda: store.tag(checkpoint, "x"),
        lambda: store.untag(checkpoint, "x"),
        lambda: store.untag(checkpoint, "born"),
        lambda: store.add_metrics(checkpoint, {"m": 1.0}),
    ):
        change()
        after = objects(store)
        assert before.items() <= after.items()
        assert len(after) == len(before) + 1
        before = after


@examples(30)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", "born"])), max_size=8))
def test_tags_are_those_given_and_not_taken_away_since(changes: list[tuple[bool, str]]) -> None:
    store = memory_store()
    checkpoint = save(store, tags=["born"])
    expected = {"born"}
    for add, tag in changes:
        changed = store.tag(checkpoint, tag) if add else store.untag(checkpoint, tag)
        assert changed is ((tag not in expected) if add else (tag in expected))
        expected = expected | {tag} if add else expected - {tag}
        assert tags(checkpoint) == sorted(expected)


@pytest.mark.parametrize("tag", ["latest", "best", "step-5", "Bad", ""])
def test_a_tag_that_cannot_be_is_refused_before_anything_is_written(tag: str) -> None:
    store = memory_store()
    checkpoint = save(store)
    before = objects(store)
    for call in (store.tag, store.untag):
        with pytest.raises(UsageError):
            call(checkpoint, tag)
    assert objects(store) == before


def test_two_checkpoints_can_have_one_tag_and_the_newer_is_meant() -> None:
    store = memory_store()
    first, second = save(store, 1, tags=["good"]), save(store, 2)
    assert _tagged(store, "good") == first.name
    store.tag(second, "good")
    assert _tagged(store, "good") == second.name
    store.untag(second, "good")
    assert _tagged(store, "good") == first.name


def _tagged(store: Store, tag: str) -> object:
    from ckptstore.uri import Ref

    return store.resolve(Ref(None, RUN, tag)).name


def mark(kind: str, *removes: str) -> Mark:
    return Mark(
        name="x",
        run=RUN,
        kind=kind,  # type: ignore[arg-type]
        created="2026-01-01T00:00:00.000Z",
        writer=writer_here("w"),
        removes=removes,
    )


def test_of_a_pin_and_an_unpin_made_without_knowing_of_each_other_the_pin_wins() -> None:
    made = {"1": mark("pin"), "2": mark("unpin", "1"), "3": mark("pin")}
    for order in itertools.permutations(made):
        ordered = {i: made[i] for i in order}
        removed = frozenset(r for m in ordered.values() for r in m.removes)
        assert Standing(ordered, removed).pinned


def test_later_metrics_lie_over_those_of_the_save() -> None:
    store = memory_store()
    checkpoint = save(store, metrics={"a": 1.0, "b": 2.0})
    store.add_metrics(checkpoint, {"b": 3.0, "c": math.nan})
    store.add_metrics(checkpoint, {"d": 4.0})
    assert now(checkpoint).metrics(checkpoint.commit) == {"a": 1.0, "b": 3.0, "d": 4.0}
    assert store.get(RUN, step=1).metrics == {"a": 1.0, "b": 3.0, "d": 4.0}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_of_which_none_is_finite_are_refused(value: float) -> None:
    store = memory_store()
    checkpoint = save(store)
    before = objects(store)
    with pytest.raises(UsageError):
        store.add_metrics(checkpoint, {"x": value})
    assert objects(store) == before


def test_damage_stays_noted_until_every_byte_was_found_right() -> None:
    checkpoint = save(memory_store())
    catalog, name = checkpoint.catalog, checkpoint.name
    note_damage(catalog, RUN, name, DAMAGE, deep=True)
    assert now(checkpoint).damaged
    assert [n.path for n in now(checkpoint).damage] == ["a.txt"]
    note_verified(catalog, RUN, name, 0, deep=False)
    assert now(checkpoint).damaged
    assert now(checkpoint).verified is None
    note_verified(catalog, RUN, name, 405, deep=True)
    assert not now(checkpoint).damaged
    assert now(checkpoint).verified is not None


def test_damage_that_a_quick_look_found_ends_when_a_quick_look_finds_it_no_more() -> None:
    checkpoint = save(memory_store())
    note_damage(checkpoint.catalog, RUN, checkpoint.name, DAMAGE, deep=False)
    assert now(checkpoint).damaged
    note_verified(checkpoint.catalog, RUN, checkpoint.name, 0, deep=False)
    assert not now(checkpoint).damaged


def test_a_quick_look_that_finds_nothing_wrong_leaves_no_mark() -> None:
    store = memory_store()
    checkpoint = save(store)
    before = objects(store)
    note_verified(checkpoint.catalog, RUN, checkpoint.name, 0, deep=False)
    assert objects(store) == before


def test_noting_the_same_damage_again_adds_nothing_and_new_damage_does() -> None:
    store = memory_store()
    checkpoint = save(store)
    note_damage(checkpoint.catalog, RUN, checkpoint.name, DAMAGE, deep=True)
    before = objects(store)
    note_damage(checkpoint.catalog, RUN, checkpoint.name, DAMAGE, deep=True)
    assert objects(store) == before
    more = (Damage("b", 0, 0, "missing"),)
    note_damage(checkpoint.catalog, RUN, checkpoint.name, more, deep=False)
    assert {n.path for n in now(checkpoint).damage} == {"a.txt", "b"}


def test_a_mark_of_great_damage_stays_small_enough_to_be_read() -> None:
    checkpoint = save(memory_store())
    damage = [Damage(f"f{i}", 0, 0, "missing") for i in range(DAMAGE_NOTES + 500)]
    note_damage(checkpoint.catalog, RUN, checkpoint.name, damage, deep=True)
    assert len(now(checkpoint).damage) == DAMAGE_NOTES


def test_a_damaged_mark_is_named_and_protects_and_hides_no_other() -> None:
    store = memory_store()
    checkpoint, newer = save(store, 1), save(store, 2)
    store.tag(checkpoint, "good")
    store.pin(checkpoint)
    pin_key = next(
        e.key
        for e in store.backend.list(RunKeys(RUN).marks_of(checkpoint.name))
        if b'"pin"' in store.backend.read(e.key, 2**20)
    )
    store.backend.put(pin_key, flipped(store.backend.read(pin_key, 2**20), 900))
    assert now(checkpoint).unreadable == (pin_key,)
    assert tags(checkpoint) == ["good"]
    assert newer.name is not None
    with pytest.raises(Exception, match="cannot be read"):
        store.delete(checkpoint)


@pytest.mark.parametrize("file_name", ["notes.txt", ".hidden.json", ".ckpt-tmp-abcdefgh"])
def test_other_files_among_the_marks_are_passed_over(file_name: str, tmp_path: Path) -> None:
    for store in (memory_store(), file_store(tmp_path)):
        checkpoint = save(store)
        store.backend.put(f"{RunKeys(RUN).marks_of(checkpoint.name)}/{file_name}", b"x")
        assert now(checkpoint) == Standing()


def test_standings_are_those_of_each_marked_checkpoint() -> None:
    store = memory_store()
    one, two, three = (save(store, step) for step in (1, 2, 3))
    store.pin(one)
    store.tag(three, "x")
    found = marks.standings(store.catalog, RUN)
    assert set(found) == {one.name, three.name}
    assert found[one.name] == now(one)
    assert found[one.name].pinned
    assert two.name not in found


def test_marks_go_with_a_checkpoint_to_every_store_that_opens_it() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.pin(checkpoint)
    assert Store(store.backend).list(RUN)[0].standing.pinned
