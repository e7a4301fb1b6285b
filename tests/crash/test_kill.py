"""SIGKILL of a push at every storage operation, in a real process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.local import LocalBackend
from ckptstore.maintenance import Policy, gc, prune
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.testing.kills import Countdown, run_in_child
from ckptstore.uri import parse_ref
from tests.conftest import FULL
from tests.crash.helpers import (
    arrived_whole,
    check_clean,
    check_pull,
    check_store,
    collect,
    make_tree,
)

RUN = "r"
OPTIONS = SaveOptions(threads=1, keep_partial=True)


def push_counting_operations(uri: Path, tree: Path, count: int) -> None:
    backend = HookedBackend(LocalBackend(str(uri)), Countdown(count).hook)
    Store(backend).push(tree, RUN, 2, OPTIONS)


def push_counting_system_calls(uri: Path, tree: Path, count: int) -> None:
    Countdown(count).install()
    ckptstore.open_store(str(uri)).push(tree, RUN, 2, OPTIONS)


Push = Callable[[Path, Path, int], None]


def killed_at(push: Push, uri: Path, tree: Path, point: int) -> bool:
    """Push in a child that is killed at its ``point``-th operation; whether it was."""
    status = run_in_child(lambda: push(uri, tree, point))
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.parametrize("scenario", ["first-commit", "second-commit", "take-over"])
@pytest.mark.parametrize(
    "push",
    [push_counting_operations, push_counting_system_calls],
    ids=["backend-operations", "system-calls"],
)
@pytest.mark.timeout(900)
def test_a_push_killed_anywhere_is_absent_or_whole_and_goes_on(
    tmp_path: Path, push: Push, scenario: str, record_property: Callable[[str, object], None]
) -> None:
    tree = make_tree(tmp_path / "tree", 1)
    before = tmp_path / "before"
    first = scenario == "first-commit"
    if not first:
        # The step before shares one file, so links are among the operations.
        make_tree(tmp_path / "old", 2)
        shutil.copy(tree / "cfg.json", tmp_path / "old" / "cfg.json")
        ckptstore.open_store(str(before)).push(tmp_path / "old", RUN, 1, OPTIONS)
    else:
        before.mkdir()
    if scenario == "take-over":
        # A push of the same step died when two of its files were complete.
        assert killed_at(push_counting_system_calls, before, tree, 30)
        assert len(arrived_whole(before, RUN, tree)) >= 2
    total = sum(p.stat().st_size for p in tree.rglob("*") if p.is_file())
    point = 0
    while True:
        uri = tmp_path / "store"
        shutil.rmtree(uri, ignore_errors=True)
        shutil.copytree(before, uri, symlinks=True)
        if not killed_at(push, uri, tree, point):
            break
        refs = check_store(uri)
        assert [r for r in refs if r != f"{RUN}@2"] == ([] if first else [f"{RUN}@1"])

        arrived = arrived_whole(uri, RUN, tree)
        store = ckptstore.open_store(str(uri))
        result = store.push(tree, RUN, 2, OPTIONS)
        not_yet = total - sum((tree / path).stat().st_size for path in arrived)
        assert result.sent <= not_yet, f"killed at {point}: sent {result.sent}, of {not_yet}"
        assert result.created is (f"{RUN}@2" not in refs)

        collect(uri)
        assert f"{RUN}@2" in check_store(uri)
        check_clean(uri)
        check_pull(store, RUN, 2, tree, tmp_path / "pulled")
        point += 1
    record_property("kill points", point)
    print(f"{point} kill points")
    assert point > 30


@pytest.mark.timeout(900)
def test_gc_killed_anywhere_leaves_every_commit_whole(tmp_path: Path) -> None:
    """There is a trashed checkpoint, a dead save and stray temporaries to collect."""
    before = tmp_path / "before"
    store = ckptstore.open_store(str(before))
    for step in (1, 2, 3):
        store.push(make_tree(tmp_path / f"t{step}", step), RUN, step, OPTIONS)
    store.delete(store.get(RUN, step=1), grace=0)
    killed_at(push_counting_system_calls, before, make_tree(tmp_path / "t4", 4), 30)
    assert check_store(before) == [f"{RUN}@2", f"{RUN}@3"]
    point = 0
    while True:
        uri = tmp_path / "store"
        shutil.rmtree(uri, ignore_errors=True)
        shutil.copytree(before, uri, symlinks=True)

        def collect_until(uri: Path = uri, point: int = point) -> None:
            Countdown(point).install()
            gc(ckptstore.open_store(str(uri)), grace=0)

        killed = os.WIFSIGNALED(run_in_child(collect_until))
        assert check_store(uri) == [f"{RUN}@2", f"{RUN}@3"]
        collect(uri)
        check_clean(uri)
        assert check_store(uri) == [f"{RUN}@2", f"{RUN}@3"]
        if not killed:
            break
        point += 1
    assert point > 10


@pytest.mark.timeout(900)
def test_a_prune_killed_anywhere_goes_on_and_deletes_nothing_else(tmp_path: Path) -> None:
    before = tmp_path / "before"
    store = ckptstore.open_store(str(before))
    for step in (1, 2, 3, 4, 5):
        tree = make_tree(tmp_path / f"t{step}", step, {"actor/w.bin": 900, "cfg.json": 40})
        store.push(tree, RUN, step, OPTIONS)
    store.pin(store.get(RUN, step=1))
    kept = [f"{RUN}@{step}" for step in (1, 4, 5)]
    policy = Policy(keep_last=2)
    point = 0
    while True:
        uri = tmp_path / "store"
        shutil.rmtree(uri, ignore_errors=True)
        shutil.copytree(before, uri, symlinks=True)

        def prune_until(uri: Path = uri, point: int = point) -> None:
            Countdown(point).install()
            prune(ckptstore.open_store(str(uri)), RUN, policy)

        killed = os.WIFSIGNALED(run_in_child(prune_until))
        refs = check_store(uri)
        assert [ref for ref in refs if ref in kept] == kept, f"killed at {point}: {refs}"
        opened = ckptstore.open_store(str(uri))
        prune(opened, RUN, policy)
        assert check_store(uri) == kept, f"killed at {point}"
        collect(uri)
        check_clean(uri)
        assert check_store(uri) == kept
        if not killed:
            break
        point += 1 if FULL else 5
    print(f"{point} kill points")
    assert point > 20


@pytest.mark.timeout(900)
def test_a_delete_or_undelete_killed_anywhere_keeps_the_checkpoint_somewhere(
    tmp_path: Path,
) -> None:
    before = tmp_path / "before"
    store = ckptstore.open_store(str(before))
    for step in (1, 2):
        store.push(make_tree(tmp_path / f"t{step}", step), RUN, step, OPTIONS)
    name = str(store.get(RUN, step=1).name)
    trashed = tmp_path / "trashed"
    shutil.copytree(before, trashed, symlinks=True)
    store = ckptstore.open_store(str(trashed))
    store.delete(store.get(RUN, step=1))
    for start, back in ((before, False), (trashed, True)):
        point = 0
        while True:
            uri = tmp_path / "store"
            shutil.rmtree(uri, ignore_errors=True)
            shutil.copytree(start, uri, symlinks=True)

            def change(uri: Path = uri, point: int = point, back: bool = back) -> None:
                store = ckptstore.open_store(str(uri))
                ref = parse_ref(f"{RUN}@{name}")
                checkpoint = None if back else store.resolve(ref)
                Countdown(point).install()
                if checkpoint is not None:
                    store.delete(checkpoint)
                else:
                    store.undelete(ref)

            killed = os.WIFSIGNALED(run_in_child(change))
            store = ckptstore.open_store(str(uri))
            gc(store)
            states = {row.name: row.state for row in store.rows(everything=True)}
            assert states[name] in ("ok", "trashed"), f"killed at {point}: {states}"
            if states[name] == "trashed":
                store.undelete(parse_ref(f"{RUN}@{name}"))
            assert check_store(uri) == [f"{RUN}@1", f"{RUN}@2"]
            if not killed:
                break
            point += 1
        assert point >= 4


@pytest.mark.timeout(900)
def test_the_command_killed_at_random_moments(tmp_path: Path) -> None:
    """`ckpt push` itself, with all its threads, killed after a random time."""
    tree = make_tree(tmp_path / "tree", 7, {f"shard-{i}": 3_000_000 for i in range(10)})
    command = [str(Path(sys.executable).parent / "ckpt"), "push", str(tree)]
    rng = random.Random(11)
    uri = tmp_path / "store"
    for life in range(60 if FULL else 12):
        child = subprocess.Popen(
            [*command, f"{uri}/{RUN}@{life}", "--quiet"], stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(0.15, 0.7))
        child.kill()
        child.wait()
        check_store(uri)
    subprocess.run([*command, f"{uri}/{RUN}@1000"], check=True, capture_output=True)
    store = ckptstore.open_store(str(uri))
    collect(uri)
    check_clean(uri)
    check_pull(store, RUN, 1000, tree, tmp_path / "pulled")
