"""Retention on real stores: what stays, what goes, and that its space is free."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from ckptstore import marks, mirrors
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.errors import ConflictError, IntegrityError, NoSpaceError, NotFoundError, UsageError
from ckptstore.layout import Name, RunKeys
from ckptstore.maintenance import Policy, carry_out, gc, plan_prune, prune, verify
from ckptstore.maintenance.deciding import Candidate, decide
from ckptstore.reading import Checkpoint
from ckptstore.records import BestRule
from ckptstore.room import RETENTION, make_room
from ckptstore.store import Store
from ckptstore.uri import Ref
from tests.unit.support import (
    RUN,
    Clock,
    content,
    file_store,
    flip,
    killed_save,
    memory_store,
    objects,
    rewrite_record,
    save,
    stored_path,
    write_tree,
)

BEST = BestRule("r", "max")
LAST_2 = Policy(keep_last=2)


def steps(store: Store, run: str = RUN) -> list[int]:
    return [c.step for c in store.list(run)]


def saved(store: Store, *numbers: int, **how: Any) -> list[Checkpoint]:
    return [save(store, step, **how) for step in numbers]


def damage(checkpoint: Checkpoint) -> None:
    flip(stored_path(checkpoint, "a.txt"))
    verify(checkpoint, deep=True)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return memory_store() if request.param == "memory" else file_store(tmp_path / "store")


def test_what_no_rule_keeps_is_gone_and_its_space_is_free(store: Store) -> None:
    old = saved(store, 1, 2, 3, 4)
    before = sum(map(len, objects(store).values()))
    result = prune(store, RUN, LAST_2)
    assert steps(store) == [3, 4]
    assert [(d.name.step, d.keep) for d in result.decisions] == [
        *((1, False), (2, False)),
        *((3, True), (4, True)),
    ]
    assert result.freed >= old[0].size + old[1].size
    assert sum(map(len, objects(store).values())) < before
    for gone in old[:2]:
        keys = RunKeys(RUN)
        assert not store.backend.list(keys.directory(gone.name), recursive=True)
        found = store.catalog.find(RUN, gone.name)
        assert found is not None
        assert found.is_void, "mirrors must not bring it back"
    for kept in old[2:]:
        assert content(store.get(RUN, step=kept.step))


def test_a_second_time_changes_nothing(store: Store) -> None:
    saved(store, 1, 2, 3)
    prune(store, RUN, LAST_2)
    before = objects(store)
    again = prune(store, RUN, LAST_2)
    assert again.deleted == ()
    assert again.freed == 0
    assert objects(store) == before


def test_a_dry_run_says_the_same_and_does_nothing(store: Store) -> None:
    saved(store, 1, 2, 3)
    before = objects(store)
    said = prune(store, RUN, LAST_2, dry_run=True)
    assert objects(store) == before
    assert said.decisions == prune(store, RUN, LAST_2).decisions


def test_the_newest_is_what_was_saved_last_and_not_the_highest_step(store: Store) -> None:
    """After a rollback from 1000 to 500 the new steps are the newest."""
    saved(store, 500, 1000, 600, 700)
    prune(store, RUN, LAST_2)
    assert steps(store) == [600, 700]


def test_other_runs_are_not_touched(store: Store) -> None:
    """Also not the one that was resumed from, whatever stands in its trash."""
    saved(store, 1, 2, 3, run="parent")
    store.delete(store.get("parent", step=1), grace=0)
    saved(store, 1, 2, 3)
    before = {k: v for k, v in objects(store).items() if k.startswith("parent/")}
    prune(store, RUN, Policy(keep_last=1, max_size=1))
    assert steps(store) == [3]
    assert {k: v for k, v in objects(store).items() if k.startswith("parent/")} == before


def test_the_best_of_an_earlier_life_stays(store: Store) -> None:
    """Best 0.9, a restart, then 0.1."""
    save(store, 1, metrics={"r": 0.9}, best=BEST)
    again = Store(store.backend)
    save(again, 2, metrics={"r": 0.1}, best=BEST)
    save(again, 3, metrics={"r": 0.2}, best=BEST)
    result = prune(again, RUN, Policy(keep_last=1))
    assert steps(again) == [1, 3]
    assert result.kept[0].reasons == ("the best of its run",)


def test_the_best_by_late_metrics(store: Store) -> None:
    one, two, three = (save(store, n, metrics={"r": 0.1}, best=BEST) for n in (1, 2, 3))
    store.add_metrics(one, {"r": 0.7})
    store.add_metrics(two, {"r": 0.5})
    prune(store, RUN, Policy(keep_best=2))
    assert steps(store) == [1, 2, 3], "the third is the newest"
    store.add_metrics(three, {"r": 0.6})
    prune(store, RUN, Policy(keep_best=2))
    assert steps(store) == [1, 3]


def test_keep_best_without_a_rule_deletes_nothing(store: Store) -> None:
    saved(store, 1, 2)
    with pytest.raises(UsageError, match="says what best is"):
        prune(store, RUN, Policy(keep_best=1))
    assert steps(store) == [1, 2]


def test_pinned_and_verified_ones_stay(store: Store) -> None:
    one, two, *_ = saved(store, 1, 2, 3, 4)
    store.pin(one)
    verify(two, deep=True)
    result = prune(store, RUN, Policy(keep_last=1))
    assert steps(store) == [1, 2, 4]
    assert [d.reasons for d in result.kept[:2]] == [
        ("pinned",),
        ("the last one that was verified",),
    ]


def test_tags_as_they_are_now(store: Store) -> None:
    _, two, *_ = saved(store, 1, 2, 3, 4, tags=["rel-1"])
    store.untag(two, "rel-1")
    store.untag(store.get(RUN, step=3), "rel-1")
    store.tag(two, "gold")
    prune(store, RUN, Policy(keep_tag=("rel-*", "g?ld")))
    assert steps(store) == [1, 2, 4]


def test_a_pin_that_comes_after_the_plan_holds(store: Store) -> None:
    one, *_ = saved(store, 1, 2, 3)
    plan = plan_prune(store, RUN, Policy(keep_last=1))
    store.pin(one)
    result = carry_out(store, plan)
    assert steps(store) == [1, 3]
    assert "pinned" in result.kept[0].reasons[0]
    assert "pinned" in result.warnings[0]


def test_one_that_someone_else_has_deleted(store: Store) -> None:
    one, *_ = saved(store, 1, 2, 3)
    plan = plan_prune(store, RUN, Policy(keep_last=1))
    store.delete(one)
    result = carry_out(store, plan)
    assert [d.name.step for d in result.deleted] == [2]
    assert steps(store) == [3]
    store.undelete(Ref(None, RUN, "1"))  # a delete by hand keeps its own grace period


def test_max_delete(store: Store) -> None:
    saved(store, 1, 2, 3)
    with pytest.raises(ConflictError, match="it would be 2, and at most 1"):
        prune(store, RUN, Policy(keep_last=1), max_delete=1)
    assert steps(store) == [1, 2, 3]
    prune(store, RUN, Policy(keep_last=1), max_delete=2)
    assert steps(store) == [3]


def test_a_run_that_is_not_there(store: Store) -> None:
    save(store, 1)
    with pytest.raises(NotFoundError):
        prune(store, "nope", LAST_2)


def test_grace(store: Store) -> None:
    saved(store, 1, 2, 3)
    result = prune(store, RUN, Policy(keep_last=1, grace=3600))
    assert result.freed == 0
    assert steps(store) == [3]
    trash, _ = store.catalog.find_trash(RUN, store.catalog.trash_names(RUN)[0])
    assert trash is not None
    assert trash.reason == f"{RETENTION}no rule keeps it (keep_last 1)"
    store.undelete(Ref(None, RUN, "1"))
    assert steps(store) == [1, 3]


# Damage


def test_damaged_ones_count_for_nothing_and_are_left_alone(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    checkpoints = saved(store, 1, 2, 3, 4, 5, metrics={"r": 1.0}, best=BEST)
    damage(checkpoints[2])
    damage(checkpoints[4])
    prune(store, RUN, Policy(keep_last=2))
    assert steps(store) == [2, 3, 4, 5]
    prune(store, RUN, Policy(keep_last=2), damaged=True)
    assert steps(store) == [2, 4]


def test_a_retention_that_would_delete_everything(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    for checkpoint in saved(store, 1, 2):
        damage(checkpoint)
    with pytest.raises(ConflictError, match="no intact checkpoint of it would be left"):
        prune(store, RUN, Policy(keep_last=2), damaged=True)
    assert steps(store) == [1, 2]
    assert prune(store, RUN, Policy(keep_last=1)).deleted == ()


def test_a_record_that_cannot_be_read_protects(store: Store) -> None:
    one, *_ = saved(store, 1, 2, 3)
    key = RunKeys(RUN).record(one.name)
    store.backend.put(key, store.backend.read(key, 2**20)[:-9])
    result = prune(store, RUN, Policy(keep_last=1), damaged=True)
    assert result.kept[0].reasons == ("its record cannot be read",)
    assert store.backend.list(RunKeys(RUN).directory(one.name))
    with pytest.raises(IntegrityError):
        store.get(RUN, name=str(one.name))


# Times


@pytest.mark.parametrize("created", ["", "yesterday", "0001-01-01T00:00:00Z", "9999-12-31T00:00Z"])
def test_a_strange_time_never_deletes_the_newest(store: Store, created: str) -> None:
    for checkpoint in saved(store, 1, 2):
        rewrite_record(checkpoint, created=created)
    for rules in ({"keep_within": 60.0}, {"keep_daily": 1}, {"keep_hourly": 3, "keep_monthly": 1}):
        prune(store, RUN, Policy(**rules))
        assert steps(store)[-1] == 2


def test_keep_within_goes_by_the_clock_of_the_store() -> None:
    clock = Clock()
    store = memory_store(clock)
    for step, hours in ((1, 5), (2, 2), (3, 1)):
        time = f"2027-01-15T{8 - hours:02d}:00:00Z"  # the clock stands at 08:00
        rewrite_record(save(store, step), created=time)
    clock.now += 60
    prune(store, RUN, Policy(keep_within=2.5 * 3600))
    assert steps(store) == [2, 3]


def test_a_week_belongs_to_one_year_alone() -> None:
    stamps = ["2024-12-31", "2025-01-02", "2025-12-30", "2026-01-02", "2026-12-30"]
    history = [Candidate(Name(n, "abcdefgh", n), created=s) for n, s in enumerate(stamps, 1)]
    kept = [d.name.step for d in decide(history, Policy(keep_weekly=9), best=None) if d.keep]
    assert kept == [2, 4, 5]


# Mirrors


def test_what_a_mirror_lacks_is_held_back_until_the_limit_and_then_loudly(store: Store) -> None:
    checkpoints = saved(store, *range(1, 8))
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/mirror")
    mirrors.acknowledge(store.catalog, mirror, RUN, [checkpoints[0].name])
    result = prune(store, RUN, Policy(keep_last=1, owed_limit=3))
    assert steps(store) == [4, 5, 6, 7]
    assert result.kept[0].reasons == ("owed to s3://bucket/mirror",)
    assert [text.partition(" goes")[0] for text in result.warnings] == [
        f"step {c.step} ({c.name})" for c in checkpoints[1:3]
    ]
    assert all("s3://bucket/mirror" in text for text in result.warnings)
    mirrors.acknowledge(store.catalog, mirror, RUN, [c.name for c in checkpoints])
    assert prune(store, RUN, Policy(keep_last=1)).warnings == ()
    assert steps(store) == [7]


def test_a_mirror_that_is_down_for_ever_does_not_fill_the_disk(store: Store) -> None:
    save(store, 1)
    mirrors.expect_mirror(store.catalog, "s3://gone/mirror")
    for step in range(2, 12):
        save(store, step)
        prune(store, RUN, Policy(keep_last=2, owed_limit=2))
        assert len(store.backend.list(RUN)) < 12
    assert steps(store) == [8, 9, 10, 11]
    assert len(store.catalog.directories(RUN)) == 4


def test_a_delete_by_hand_of_what_a_mirror_lacks_needs_force(store: Store) -> None:
    one, *_ = saved(store, 1, 2)
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/mirror")
    with pytest.raises(ConflictError, match="owed to s3://bucket/mirror, which lacks it"):
        store.delete(one)
    assert store.catalog.trash_names(RUN) == []
    store.delete(one, force=True)
    store.undelete(Ref(None, RUN, "1"))
    mirrors.acknowledge(store.catalog, mirror, RUN, [one.name])
    store.delete(one)


# Sizes


def sized(store: Store, step: int, size: int = 1000) -> Checkpoint:
    return save(store, step, {"w": bytes([step]) * size})


def test_max_size_lets_the_oldest_go(store: Store) -> None:
    for step in range(1, 6):
        sized(store, step)
    result = prune(store, RUN, Policy(max_size=3000))
    assert steps(store) == [3, 4, 5]
    assert [d.reasons for d in result.deleted] == [("over max_size",)] * 2
    result = prune(store, RUN, Policy(keep_last=3, max_size=2500))
    assert steps(store) == [4, 5]
    assert result.deleted[0].reasons == ("over max_size, though keep_last would keep it",)


def test_guards_are_stronger_than_max_size_and_that_is_said(store: Store) -> None:
    store.pin(sized(store, 1))
    for step in (2, 3):
        sized(store, step)
    result = prune(store, RUN, Policy(keep_last=3, max_size=500))
    assert steps(store) == [1, 3]
    assert result.warnings[0].startswith("run run takes 2,000 bytes, and max_size is 500")


def test_max_size_counts_trash_and_what_dead_saves_left(store: Store) -> None:
    killed_save(store, 9, {"w": b"x" * 1500})
    for step in range(1, 6):
        sized(store, step)
    store.delete(store.get(RUN, step=5), force=True)  # by hand: it keeps its grace period
    prune(store, RUN, Policy(max_size=4500))
    assert steps(store) == [3, 4]
    store.undelete(Ref(None, RUN, "5"))


def test_max_size_empties_the_trash_of_retention_first(store: Store) -> None:
    for step in range(1, 6):
        sized(store, step)
    prune(store, RUN, Policy(keep_last=3, grace=3600))
    assert len(store.catalog.trash_names(RUN)) == 2
    result = prune(store, RUN, Policy(keep_last=3, max_size=4000, grace=3600))
    assert [n.step for n in store.catalog.trash_names(RUN)] == [2], "the older one went"
    assert result.freed >= 1000
    assert steps(store) == [3, 4, 5]
    prune(store, RUN, Policy(max_size=2000, grace=3600))
    assert steps(store) == [4, 5]
    assert store.catalog.trash_names(RUN) == []


def test_a_storage_without_exclusive_creation_says_what_is_left_to_do() -> None:
    backend = MemoryBackend(Space())
    store = Store(backend)
    saved(store, 1, 2, 3)
    backend.capabilities = dataclasses.replace(backend.capabilities, exclusive_create=False)
    result = prune(store, RUN, Policy(keep_last=1))
    assert steps(store) == [3]
    assert result.freed == 0
    assert "ckpt gc memory://anonymous run --force" in result.warnings[0]
    assert gc(store, RUN, force=True).freed > 0


# Room


class Small(MemoryBackend):
    """A storage that has room for so many bytes of files."""

    room = 5000

    def free_space(self) -> int | None:
        used = sum(len(data) for data, _ in self.space.objects.values() if len(data) >= 1000)
        return max(0, self.room - used)


def test_the_trash_of_retention_makes_room_for_a_save_and_no_more_than_needed() -> None:
    store = Store(Small(Space()))
    for step in (1, 2, 3, 4):
        sized(store, step)
    prune(store, RUN, Policy(keep_last=1, grace=9999))
    assert make_room(store.catalog, RUN, 1000) == 0
    assert len(store.catalog.trash_names(RUN)) == 3
    assert make_room(store.catalog, RUN, 3000) == 0
    assert [n.step for n in store.catalog.trash_names(RUN)] == [3]
    assert make_room(store.catalog, RUN, 4500) == 500
    assert store.catalog.trash_names(RUN) == []


def test_what_a_person_deleted_or_pinned_makes_no_room() -> None:
    store = Store(Small(Space()))
    one, two, _ = (sized(store, step) for step in (1, 2, 3))
    store.delete(one)
    prune(store, RUN, Policy(keep_last=1, grace=9999))
    with pytest.raises(ConflictError):
        marks.pin(store.catalog, RUN, two.name)
    assert make_room(store.catalog, RUN, 4000) == 2000
    assert len(store.catalog.trash_names(RUN)) == 2


def test_a_push_that_cannot_fit_is_refused_before_it_writes(tmp_path: Path) -> None:
    backend = Small(Space())
    store = Store(backend)
    sized(store, 1)
    source = write_tree(tmp_path / "in", {"w": b"w" * 4500})
    before = sum(len(d) for d, _ in backend.space.objects.values())
    with pytest.raises(NoSpaceError, match="room for 4,000 bytes, and 4,500 are to be stored"):
        store.push(source, RUN, 2)
    assert sum(len(d) for d, _ in backend.space.objects.values()) - before < 1000
    assert steps(store) == [1]
    assert store.push(write_tree(tmp_path / "fits", {"w": b"w" * 4000}), RUN, 2).created


def test_holes_in_a_source_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = file_store(tmp_path / "store")
    save(store, 1)
    free = store.backend.free_space()
    assert free is not None
    source = tmp_path / "in"
    source.mkdir()
    (source / "sparse").touch()
    os.truncate(source / "sparse", 64 * 2**20)
    monkeypatch.setattr(store.backend, "free_space", lambda: 2**20)
    assert store.push(source, RUN, 2).created


# Policies


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({}, "would delete everything"),
        ({"grace": 5.0}, "would delete everything"),
        ({"keep_last": 0}, "keep_last must be"),
        ({"keep_every": True}, "keep_every must be"),
        ({"keep_last": 1, "owed_limit": -1}, "owed_limit must be"),
        ({"keep_within": float("nan")}, "keep_within must be"),
        ({"max_size": 0}, "max_size must be"),
        ({"keep_tag": ("",)}, "keep_tag must be"),
    ],
)
def test_policies_that_cannot_be(rules: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Policy(**rules)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"keep_lst": 3}, "unknown key 'keep_lst'"),
        ({"keep_last": "3"}, "keep_last: it must be a whole number"),
        ({"keep_within": 7}, "keep_within: it must be a duration"),
        ({"keep_within": "soon"}, "keep_within: 'soon' is no duration"),
        ({"max_size": 500}, "max_size: it must be an amount"),
        ({"keep_tag": [1]}, "keep_tag: it must be a pattern"),
        ({"grace": "1d"}, "would delete everything"),
    ],
)
def test_tables_that_cannot_be(table: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Policy.of(table, "ckpt.toml")
    assert str(caught.value).startswith("ckpt.toml: ")


def test_a_table() -> None:
    table = {"keep_last": 3, "keep_within": "7d", "keep_tag": "rel-*", "max_size": "1GiB"}
    assert Policy.of(table, "x") == Policy(
        keep_last=3, keep_within=7 * 86400.0, keep_tag=("rel-*",), max_size=2**30
    )
