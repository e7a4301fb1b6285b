from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore import deleting
from ckptstore.errors import IntegrityError, NotFoundError
from ckptstore.layout import Name, RunKeys
from ckptstore.maintenance import verify
from ckptstore.resume import plan_from, plan_resume
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend, Phase
from ckptstore.uri import parse_ref
from tests.unit.support import (
    RUN,
    failed_save,
    file_store,
    flip,
    killed_save,
    memory_store,
    objects,
    save,
    stored_path,
)
from tests.unit.test_reading import read_only

KEYS = RunKeys(RUN)


def chosen(store: Store, *, deep: bool = False) -> int:
    return plan_resume(store, RUN, deep=deep).require().step


def test_the_newest_is_taken_and_nothing_is_passed_over() -> None:
    store = memory_store()
    for step in (1, 2, 3):
        save(store, step)
    plan = plan_resume(store, RUN)
    assert plan.require().step == 3
    assert plan.passed_over == ()
    assert plan.commits == 1  # it looked no further


def test_after_a_rollback_the_new_line_is_taken_and_not_the_highest_step() -> None:
    store = memory_store()
    for step in (500, 1000, 600):
        save(store, step)
    assert chosen(store) == 600


def test_damage_is_passed_over_for_the_next_older_and_named() -> None:
    store = memory_store()
    for step in (1, 2, 3):
        save(store, step)
    store.backend.delete([store.get(RUN, step=3).key("a.txt")])
    store.backend.put(store.get(RUN, step=2).key("sub/b.bin"), b"short")
    plan = plan_resume(store, RUN)
    assert plan.require().step == 1
    assert [p.name.step for p in plan.passed_over] == [3, 2]
    assert "a.txt: missing" in plan.passed_over[0].reason
    assert "sub/b.bin" in plan.passed_over[1].reason
    assert [c.state for c in store.list(RUN)] == ["ok", "damaged", "damaged"]


@pytest.mark.parametrize("what", ["manifest", "record"])
def test_a_damaged_manifest_or_record_is_passed_over(what: str) -> None:
    store = memory_store()
    save(store, 1)
    newest = save(store, 2)
    key = KEYS.manifest(newest.name) if what == "manifest" else KEYS.record(newest.name)
    data = store.backend.read(key, 2**20)
    store.backend.put(key, data[:-4])
    plan = plan_resume(store, RUN)
    assert plan.require().step == 1
    assert [p.name for p in plan.passed_over] == [newest.name]
    assert what in plan.passed_over[0].reason
    assert plan.commits == 2


def test_saves_that_were_never_committed_are_passed_over() -> None:
    store = memory_store()
    save(store, 1)
    dead = killed_save(store, 2)
    failed_save(store, 3)
    plan = plan_resume(store, RUN)
    assert plan.require().step == 1
    assert [(p.name, p.reason) for p in plan.passed_over] == [(dead, "was never committed")]
    assert plan.commits == 1


def test_what_is_older_than_the_chosen_is_not_passed_over() -> None:
    store = memory_store()
    killed_save(store, 1)
    save(store, 2)
    assert plan_resume(store, RUN).passed_over == ()


def test_what_was_deleted_is_not_taken_and_not_mentioned() -> None:
    store = memory_store()
    save(store, 1)
    store.delete(save(store, 2), force=True)
    plan = plan_resume(store, RUN)
    assert plan.require().step == 1
    assert plan.passed_over == ()


def test_content_that_changed_is_found_only_by_a_deep_look(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    save(store, 1)
    flip(stored_path(save(store, 2), "a.txt"))
    assert chosen(store) == 2
    plan = plan_resume(store, RUN, deep=True)
    assert plan.require().step == 1
    assert "content differs" in plan.passed_over[0].reason
    assert chosen(store) == 1


def test_what_was_noted_as_damaged_is_passed_over_until_a_deep_look_finds_it_whole() -> None:
    store = memory_store()
    save(store, 1)
    newest = save(store, 2)
    store.backend.put(newest.key("a.txt"), b"alphA")
    verify(newest, deep=True)
    store.backend.put(newest.key("a.txt"), b"alpha")
    assert chosen(store) == 1
    assert chosen(store, deep=True) == 2
    assert chosen(store) == 2


def test_a_run_without_a_commit_is_not_found() -> None:
    store = memory_store()
    failed_save(store)
    killed_save(store)
    plan = plan_resume(store, RUN)
    assert plan.chosen is None
    assert plan.commits == 0
    with pytest.raises(NotFoundError):
        plan.require()


def test_a_run_of_which_no_commit_is_intact_is_an_integrity_error_and_no_start_from_scratch() -> (
    None
):
    store = memory_store()
    for step in (1, 2):
        checkpoint = save(store, step)
        store.backend.delete([checkpoint.key("a.txt")])
    plan = plan_resume(store, RUN)
    assert plan.chosen is None
    assert plan.commits == 2
    with pytest.raises(IntegrityError, match="none is intact"):
        plan.require()


def test_a_run_whose_only_record_cannot_be_read_is_an_integrity_error() -> None:
    store = memory_store()
    store.backend.put(KEYS.record(save(store).name), b"")
    with pytest.raises(IntegrityError):
        plan_resume(store, RUN).require()


def test_a_run_or_store_that_is_not_there_is_not_found() -> None:
    store = memory_store()
    with pytest.raises(NotFoundError):
        plan_resume(store, RUN)
    save(store, run="other")
    with pytest.raises(NotFoundError):
        plan_resume(store, RUN)


def test_a_plan_for_a_healthy_run_changes_nothing_in_the_store() -> None:
    store = memory_store()
    save(store, 1)
    killed_save(store, 2)
    before = objects(store)
    plan_resume(store, RUN)
    assert objects(store) == before


@pytest.mark.parametrize("deep", [False, True])
def test_a_plan_can_be_made_in_a_store_that_cannot_be_written(deep: bool) -> None:
    store = memory_store()
    save(store, 1)
    store.backend.delete([save(store, 2).key("a.txt")])
    assert chosen(read_only(store), deep=deep) == 1


def test_a_ref_other_than_latest_names_just_one() -> None:
    store = memory_store()
    save(store, 1, tags=["good"])
    bad = save(store, 2)
    store.backend.delete([bad.key("a.txt")])
    assert plan_from(store, parse_ref(f"{RUN}@latest")).require().step == 1
    assert plan_from(store, parse_ref(f"{RUN}@good")).require().step == 1
    plan = plan_from(store, parse_ref(f"{RUN}@2"))
    assert plan.chosen is None
    with pytest.raises(IntegrityError):
        plan.require()
    with pytest.raises(NotFoundError):
        plan_from(store, parse_ref(f"{RUN}@7"))


def test_progress_is_told_of_every_byte_of_a_deep_look() -> None:
    store = memory_store()
    checkpoint = save(store)
    told: list[int] = []
    plan_resume(store, RUN, deep=True, progress=told.append)
    assert sum(told) == checkpoint.size


# What a review found


@pytest.mark.parametrize("deep", [False, True])
def test_a_complete_directory_that_lost_its_record_is_passed_over_and_counts(deep: bool) -> None:
    store = memory_store()
    save(store, 1)
    lost = save(store, 2)
    store.backend.delete([KEYS.record(lost.name)])
    plan = plan_resume(store, RUN, deep=deep)
    assert plan.require().step == 1
    assert [(p.name, p.reason) for p in plan.passed_over] == [(lost.name, "has lost its record")]


def test_a_run_whose_every_record_was_lost_is_no_start_from_scratch() -> None:
    store = memory_store()
    store.backend.delete([KEYS.record(save(store).name)])
    with pytest.raises(IntegrityError, match="lost its record"):
        plan_resume(store, RUN).require()


def purged(store: Store, name: Name) -> None:
    store.delete(store.get(RUN, name=str(name)), force=True)
    _, trash = store.catalog.find_trash(RUN, name)
    assert deleting.purge(store.catalog, RUN, name, trash, "over")


def deleted(store: Store, name: Name) -> None:
    store.delete(store.get(RUN, name=str(name)), force=True)


@pytest.mark.parametrize(
    ("what", "do"), [("record", deleted), ("record", purged), ("manifest", purged)]
)
@pytest.mark.parametrize("deep", [False, True])
def test_the_next_older_is_taken_when_the_newest_is_deleted_while_it_is_looked_at(
    what: str, do: Callable[[Store, Name], None], deep: bool
) -> None:
    store = memory_store()
    save(store, 1)
    newest = save(store, 2)
    key = KEYS.record(newest.name) if what == "record" else KEYS.manifest(newest.name)
    left = [newest.name]

    def hook(operation: str, at: str, phase: Phase) -> None:
        if (operation, at, phase) == ("read", key, "before") and left:
            do(store, left.pop())

    plan = plan_resume(Store(HookedBackend(store.backend, hook)), RUN, deep=deep)
    assert left == []
    assert plan.require().step == 1
    assert store.backend.list(KEYS.marks_of(newest.name)) == []
