from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import document
from ckptstore.errors import NotFoundError, UsageError
from ckptstore.layout import Name, RunKeys
from ckptstore.listing import ref_of
from ckptstore.maintenance import verify
from ckptstore.records import Trash
from ckptstore.uri import Ref
from tests.unit.support import (
    ABC,
    RUN,
    Clock,
    examples,
    failed_save,
    killed_save,
    memory_store,
    save,
    stop,
)

KEYS = RunKeys(RUN)


def test_a_row_says_all_there_is_to_say() -> None:
    store = memory_store()
    checkpoint = save(store, 500, tags=["b", "a"], metrics={"r": 0.5})
    store.pin(checkpoint)
    (row,) = store.rows(RUN)
    assert (row.ref, row.run, row.step, row.seq) == (f"{RUN}@500", RUN, 500, 1)
    assert row.name == str(checkpoint.name)
    assert (row.size, row.files) == (sum(map(len, ABC.values())), 3)
    assert row.digest == checkpoint.commit.content
    assert row.created == checkpoint.commit.created
    assert (row.tags, row.metrics, row.pinned) == (("a", "b"), {"r": 0.5}, True)
    assert (row.state, row.note) == ("ok", None)


def test_rows_come_in_the_order_of_saving_and_not_of_steps() -> None:
    store = memory_store()
    for step in (500, 1000, 600):
        save(store, step)
    assert [r.step for r in store.rows(RUN)] == [500, 1000, 600]


def test_an_older_commit_of_a_step_is_named_in_full() -> None:
    store = memory_store()
    old, new = save(store, 5), save(store, 5)
    assert [r.ref for r in store.rows(RUN)] == [f"{RUN}@{old.name}", f"{RUN}@5"]
    assert [c.ref for c in store.list(RUN)] == [f"{RUN}@{old.name}", f"{RUN}@5"]
    assert store.get(RUN, name=str(old.name)).ref == f"{RUN}@{old.name}"
    assert store.get(RUN, name=str(new.name)).ref == f"{RUN}@5"


def test_a_save_of_the_step_that_failed_later_does_not_change_how_a_commit_is_named() -> None:
    store = memory_store()
    save(store, 5)
    failed_save(store, 5)
    assert [r.ref for r in store.rows(RUN)] == [f"{RUN}@5"]
    assert store.get(RUN, step=5).ref == f"{RUN}@5"


@examples(50)
@given(st.lists(st.integers(0, 3), max_size=8))
def test_every_ref_of_a_listing_names_its_own_row(steps: list[int]) -> None:
    names = [Name(i + 1, "aaaaaaaa", step) for i, step in enumerate(steps)]
    newest = {name.step: name for name in names}
    refs = [ref_of(RUN, name, newest) for name in names]
    assert len(set(refs)) == len(refs)
    for name, ref in zip(names, refs, strict=True):
        same = [n for n in names if n.step == name.step]
        assert ref == (f"{RUN}@{name.step}" if name == same[-1] else f"{RUN}@{name}")


def test_runs_are_listed_by_name_and_nothing_else_is_taken_for_one() -> None:
    store = memory_store()
    for run in ("b", "a", "C"):
        save(store, run=run)
    store.backend.put("mirrors/x.json", b"")
    store.backend.put(".hidden/x", b"")
    store.backend.put("file", b"")
    assert store.runs() == ["C", "a", "b"]
    assert [r.run for r in store.rows()] == ["C", "a", "b"]


def test_a_run_or_store_that_is_not_there_is_not_found() -> None:
    store = memory_store()
    for call in (lambda: store.rows(RUN), store.rows, lambda: store.list(RUN)):
        with pytest.raises(NotFoundError, match="no store"):
            call()
    save(store, run="other")
    with pytest.raises(NotFoundError) as caught:
        store.rows(RUN)
    assert "other" in (caught.value.hint or "")
    with pytest.raises(UsageError):
        store.rows("../x")


def test_an_empty_store_lists_nothing() -> None:
    store = memory_store()
    store.create()
    assert store.rows() == []


def test_unfinished_and_trashed_ones_are_shown_only_when_asked_for() -> None:
    store = memory_store()
    trashed = save(store, 1)
    save(store, 2)
    dead = killed_save(store, 3)
    store.delete(trashed)
    assert [r.step for r in store.rows(RUN)] == [2]
    rows = store.rows(RUN, everything=True)
    assert [(r.step, r.state) for r in rows] == [(1, "trashed"), (2, "ok"), (3, "unfinished")]
    assert rows[2].name == str(dead)
    assert (rows[2].files, rows[2].size) == (3, sum(map(len, ABC.values())))


def test_the_note_of_an_unfinished_save_says_whether_it_is_still_written() -> None:
    clock = Clock()
    store = memory_store(clock)
    save(store, 1)
    one = store.save(RUN, 2)
    one.add_bytes("a", b"a")
    stop(one)
    assert re.search("being written", store.rows(RUN, everything=True)[1].note or "")
    clock.advance(3600)
    assert store.rows(RUN, everything=True)[1].note == "its writer is gone"
    killed_save(store, 3)
    assert store.rows(RUN, everything=True)[2].note == "its writer is gone"


def test_a_save_that_was_given_up_and_left_files_is_unfinished_and_one_without_is_nothing() -> None:
    store = memory_store()
    save(store, 1)
    name = failed_save(store, 2)
    assert len(store.rows(RUN, everything=True)) == 1
    store.backend.put(KEYS.file(name, "late"), b"x")
    assert [r.note for r in store.rows(RUN, everything=True)] == [None, "given up"]


def test_the_row_of_a_trashed_one_says_what_its_record_said() -> None:
    store = memory_store()
    old = save(store, 1, tags=["good"], metrics={"r": 1.0})
    save(store, 2)
    store.delete(old, grace=7200)
    row = store.rows(RUN, everything=True)[0]
    assert (row.digest, row.size, row.files) == (old.commit.content, old.size, 3)
    assert (row.tags, row.metrics) == (("good",), {"r": 1.0})
    assert "2 h" in (row.note or "")
    assert store.undelete(Ref(None, RUN, row.name)).name == old.name


def test_damage_that_was_found_is_shown_with_its_place() -> None:
    store = memory_store()
    checkpoint = save(store, 1)
    save(store, 2)
    store.backend.put(checkpoint.key("a.txt"), b"alphA")
    verify(checkpoint, deep=True)
    first, second = store.rows(RUN)
    assert (first.state, first.note) == ("damaged", "a.txt: content differs")
    assert second.state == "ok"
    store.backend.put(checkpoint.key("a.txt"), b"alpha")
    verify(store.get(RUN, step=1), deep=True)
    assert [r.state for r in store.rows(RUN)] == ["ok", "ok"]


def test_other_things_in_a_run_do_not_disturb_its_listing() -> None:
    store = memory_store()
    save(store, 1)
    for key in (
        "run/notes.txt",
        "run/backup/x",
        "run/commits/notes.json",
        "run/commits/.ckpt-tmp-abcdefgh",
        "run/trash/x.json",
        "run/leases/x.json",
        "run/marks/x/y.json",
    ):
        store.backend.put(key, b"x")
    assert [r.step for r in store.rows(RUN, everything=True)] == [1]


# What a review found


@pytest.mark.parametrize("everything", [False, True])
def test_a_complete_directory_that_lost_its_record_is_shown_as_damaged(everything: bool) -> None:
    store = memory_store()
    for step in (1, 2, 3):
        save(store, step)
    killed_save(store, 4)
    lost = store.get(RUN, step=2)
    store.backend.delete([KEYS.record(lost.name)])
    shown = store.rows(RUN, everything=everything)
    expected = [(1, "ok"), (2, "damaged"), (3, "ok")] + [(4, "unfinished")] * everything
    assert [(r.step, r.state) for r in shown] == expected
    assert (shown[1].note, shown[1].ref) == ("its record is missing", f"{RUN}@{lost.name}")


def test_what_has_a_lease_or_a_trash_record_has_not_lost_its_record() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    dead = killed_save(store, 3)
    store.backend.put(KEYS.manifest(dead), b"{}")
    assert [(r.step, r.state) for r in store.rows(RUN)] == [(2, "ok")]


def test_a_void_in_a_trash_record_does_not_hinder_a_listing() -> None:
    store = memory_store()
    old = save(store, 1)
    save(store, 2)
    store.delete(old)
    name = failed_save(store, 3)
    trash, _ = store.catalog.find_trash(RUN, old.name)
    assert isinstance(trash, Trash)
    void = store.backend.read(KEYS.record(name), 2**20)
    body = msgspec.structs.replace(trash, name=str(name), record=void.decode())
    store.backend.put(KEYS.trash_record(name), document.encode(body))
    rows = store.rows(RUN, everything=True)
    assert [(r.step, r.state) for r in rows] == [(1, "trashed"), (2, "ok"), (3, "trashed")]
    assert "holds no commit" in (rows[2].note or "")


def test_an_older_commit_of_a_step_is_named_in_full_when_the_newest_record_of_it_is_damaged() -> (
    None
):
    store = memory_store()
    old, new = save(store, 5), save(store, 5)
    store.backend.put(KEYS.record(new.name), b"x")
    assert [(r.ref, r.state) for r in store.rows(RUN)] == [
        (f"{RUN}@{old.name}", "ok"),
        (f"{RUN}@{new.name}", "damaged"),
    ]
    assert [c.ref for c in store.list(RUN)] == [f"{RUN}@{old.name}"]
    assert store.get(RUN, name=str(old.name)).ref == f"{RUN}@{old.name}"
