"""Many processes at one run at once."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import ConflictError, NotFoundError
from ckptstore.maintenance import gc
from ckptstore.store import Store
from ckptstore.testing.kills import start_child
from ckptstore.uri import parse_ref
from tests.conftest import FULL
from tests.crash.helpers import check_clean, check_store, collect, make_tree

RUN = "r"
WRITERS = 16
PUSHES = 3


def push_some(uri: Path, trees: Path, writer: int) -> None:
    """Step 0 is pushed by everybody with other bytes, step 1 by everybody with the same bytes, the
    third belongs to this writer."""
    store = ckptstore.open_store(str(uri))
    store.push(trees / str(writer), RUN, 0)
    store.push(trees / "same", RUN, 1)
    store.push(trees / str(writer), RUN, 100 + writer)


@pytest.mark.timeout(300)
def test_sixteen_processes_push_to_one_run_while_others_delete_and_collect(
    tmp_path: Path,
) -> None:
    uri, trees = tmp_path / "store", tmp_path / "trees"
    for writer in range(WRITERS):
        make_tree(trees / str(writer), writer)
    make_tree(trees / "same", 99)
    store = ckptstore.open_store(str(uri))
    victims = [
        store.push(make_tree(tmp_path / f"v{i}", 1000 + i), RUN, 9000 + i).checkpoint
        for i in range(6)
    ]
    writers = [start_child(lambda w=w: push_some(uri, trees, w)) for w in range(WRITERS)]  # type: ignore[misc]
    alive = set(writers)
    failed = []
    while alive:
        if victims:
            victim = victims.pop()
            try:
                store.delete(victim, grace=0)
            except ConflictError:
                victims.insert(0, victim)  # still the newest of the run
        gc(store)
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            alive.discard(done)
            if status:
                failed.append(status)
    assert not failed
    while victims:
        store.delete(victims.pop(), grace=0)
    collect(uri)

    check_store(uri)
    check_clean(uri)
    checkpoints = store.list(RUN)
    order = [(c.seq, c.name.id) for c in checkpoints]
    assert order == sorted(order)
    assert len(set(order)) == len(order), "the order is unambiguous"
    by_step: dict[int, list[str]] = {}
    for checkpoint in checkpoints:
        by_step.setdefault(checkpoint.step, []).append(checkpoint.commit.content)
    assert len(by_step[0]) == WRITERS, "different bytes: all of them are kept"
    assert 1 <= len(by_step[1]) <= WRITERS
    assert len(set(by_step[1])) == 1
    assert all(len(by_step[100 + w]) == 1 for w in range(WRITERS))
    for writer in range(WRITERS):
        names = [c.name for c in checkpoints if c.step in (0, 100 + writer)]
        assert names == sorted(names), "what was saved later sorts later"
    newest = store.latest(RUN)
    assert newest is not None
    assert newest.name == checkpoints[-1].name


def do_something(store: Store, rng: random.Random, trees: Path) -> None:
    what = rng.choice(("push", "push", "delete", "undelete", "gc", "pin"))
    if what == "push":
        store.push(trees / str(rng.randrange(8)), RUN, rng.randrange(20))
        return
    if what == "gc":
        gc(store)
        return
    ref = parse_ref(f"{RUN}@{rng.choice(store.rows(RUN, everything=True)).name}")
    if what == "delete":
        store.delete(store.resolve(ref), grace=rng.choice((0, 100)), force=True)
    elif what == "undelete":
        store.undelete(ref)
    else:
        store.pin(store.resolve(ref))
        store.unpin(store.resolve(ref))


@pytest.mark.timeout(900)
def test_processes_that_save_delete_undelete_and_collect_at_random(tmp_path: Path) -> None:
    """Whatever they do to each other: every commit is whole at the end and on the way."""
    uri, trees = tmp_path / "store", tmp_path / "trees"
    for i in range(8):
        make_tree(trees / str(i), i, {"a": 20_000, "b/c": 10})
    ckptstore.open_store(str(uri)).push(trees / "0", RUN, 0)
    end = time.monotonic() + (120 if FULL else 8)

    def act(seed: int) -> None:
        rng = random.Random(seed)
        store = ckptstore.open_store(str(uri))
        while time.monotonic() < end:
            try:
                do_something(store, rng, trees)
            except (ConflictError, NotFoundError):
                continue  # someone else was first

    children = [start_child(lambda s=s: act(s)) for s in range(6)]  # type: ignore[misc]
    while time.monotonic() < end:
        rows = ckptstore.open_store(str(uri)).rows(RUN)
        assert all(row.state == "ok" for row in rows)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    check_store(uri)
    collect(uri)
    check_store(uri)
