"""Verification by plan: which checkpoints are read, in which order, and what is left out."""

from __future__ import annotations

import itertools
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from ckptstore import document
from ckptstore.errors import CancelledError, NotFoundError, UsageError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import RunKeys
from ckptstore.maintenance import verify, verify_plan, verify_run
from ckptstore.reading import Checkpoint
from ckptstore.store import Store
from tests.unit.support import RUN, file_store, flip, memory_store, save, stored_path

KEYS = RunKeys(RUN)
KIB = 1024


def stored(store: Store, step: int, size: int = KIB, run: str = RUN) -> Checkpoint:
    return save(store, step, {"data": bytes([step]) * size}, run=run)


def verified(store: Store, checkpoint: Checkpoint, days_ago: float) -> None:
    """It was read whole, so many days ago."""
    assert verify(checkpoint, deep=True).ok
    checkpoint = store.get(checkpoint.run, name=str(checkpoint.name))
    (mark_id,) = checkpoint.standing.of_kind("verified")
    then = datetime.now(UTC) - timedelta(days=days_ago)
    mark = msgspec.structs.replace(checkpoint.standing.marks[mark_id], created=then.isoformat())
    key = f"{RunKeys(checkpoint.run).marks_of(checkpoint.name)}/{mark_id}.json"
    store.backend.put(key, document.encode(mark))


def steps(results: object) -> list[int]:
    return [int(r.name.split("-")[2]) for r in results]  # type: ignore[attr-defined]


def test_what_was_never_verified_comes_first_and_then_the_least_recent() -> None:
    store = memory_store()
    one, two, three, four = (stored(store, step) for step in (1, 2, 3, 4))
    verified(store, one, 1)
    verified(store, three, 9)
    verified(store, four, 5)
    assert steps(verify_plan(store)) == [2, 3, 4, 1]
    assert store.get(RUN, name=str(two.name)).standing.verified is not None


def test_passes_of_a_sample_cover_everything_and_then_begin_again() -> None:
    store = memory_store()
    for step in range(1, 11):
        stored(store, step)
    seen = [steps(verify_plan(store, sample=0.25)) for _ in range(4)]
    assert [len(s) for s in seen] == [3, 3, 3, 3]
    assert list(itertools.chain(*seen))[:10] == list(range(1, 11))
    assert seen[3] == [10, 1, 2]


def test_a_sample_is_a_share_of_the_bytes_and_one_at_least() -> None:
    store = memory_store()
    stored(store, 1, 60 * KIB)
    for step in range(2, 6):
        stored(store, step, 10 * KIB)
    assert steps(verify_plan(store, sample=0.001)) == [1]
    assert steps(verify_plan(store, sample=0.25)) == [2, 3, 4]


def test_what_was_verified_recently_is_left_out() -> None:
    store = memory_store()
    for step, days in ((1, 8.0), (2, 6.0), (3, -0.01), (4, -30.0)):
        verified(store, stored(store, step), days)
    stored(store, 5)
    # The mark of step 4 is from the future: it would count for ever.
    assert steps(verify_plan(store, max_age=7 * 86400)) == [5, 1, 4]


def test_time_that_is_over_marks_nothing_and_leaves_the_rest_for_next_time() -> None:
    store = memory_store()
    for step in (1, 2):
        stored(store, step)
    plan = verify_plan(store, max_duration=0)
    assert list(plan) == []
    assert [c.step for c in plan.unread] == [1, 2]
    assert all(c.standing.verified is None for c in store.list(RUN))
    assert steps(verify_plan(store, max_duration=3600)) == [1, 2]


def test_the_one_that_is_cut_short_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    for step in (1, 2, 3):
        save(store, step, {"a": b"a" * BLOCK_SIZE, "b": b"b" * BLOCK_SIZE})
    now = 0.0
    monkeypatch.setattr("ckptstore.maintenance.plan.time.monotonic", lambda: now)

    def block_done(count: int) -> None:
        nonlocal now
        now += 10.0  # each block takes ten seconds

    plan = verify_plan(store, max_duration=25, threads=1, progress=block_done)
    assert steps(plan) == [1]
    assert [c.step for c in plan.unread] == [2, 3]
    assert [c.standing.verified is not None for c in store.list(RUN)] == [True, False, False]


def test_the_callers_cancel_is_no_end_of_time() -> None:
    store = memory_store()
    stored(store, 1)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        list(verify_plan(store, cancel=cancel, max_duration=3600))


def test_known_damage_is_in_every_result_and_read_last(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    bad = stored(store, 1)
    for step in (2, 3, 4):
        stored(store, step)
    flip(stored_path(bad, "data"), 5)
    assert not verify(bad, deep=True).ok
    told = list(verify_plan(store, sample=0.5))
    assert steps(told) == [1, 2, 3]
    assert [(d.path, d.reason) for d in told[0].damage] == [("data", "content differs")]
    assert told[0].checked_bytes == 0
    assert steps(verify_plan(store)) == [4, 2, 3, 1]


def test_lost_and_unreadable_records_and_marks_are_in_every_result() -> None:
    store = memory_store()
    lost, unreadable, marked, fine = (stored(store, step) for step in (1, 2, 3, 4))
    verified(store, marked, 1)
    verified(store, fine, 1)
    store.backend.delete([KEYS.record(lost.name)])
    store.backend.put(KEYS.record(unreadable.name), b"x")
    store.backend.put(f"{KEYS.marks_of(marked.name)}/0000000000000-abcdefgh.json", b"x")
    for found in (verify_plan(store, max_age=86400 * 7), verify_run(store, RUN)):
        bad = {int(r.name.split("-")[2]): r.damage[-1].path for r in found if not r.ok}
        assert bad == {
            1: f"commits/{lost.name}.json",
            2: f"commits/{unreadable.name}.json",
            3: f"marks/{marked.name}/0000000000000-abcdefgh.json",
        }


def test_a_plan_of_some_runs() -> None:
    store = memory_store()
    stored(store, 1)
    stored(store, 2, run="other")
    assert steps(verify_plan(store, ["other"])) == [2]
    assert sorted(steps(verify_plan(store))) == [1, 2]
    with pytest.raises(NotFoundError):
        verify_plan(store, ["third"])


@pytest.mark.parametrize("sample", [0.0, -0.1, 1.1])
def test_a_share_that_cannot_be(sample: float) -> None:
    store = memory_store()
    stored(store, 1)
    with pytest.raises(UsageError):
        verify_plan(store, sample=sample)
