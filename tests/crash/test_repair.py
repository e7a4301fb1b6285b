"""Repairs that are killed at every operation, and repairs that run side by side."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.local import LocalBackend
from ckptstore.layout import RunKeys, is_temporary
from ckptstore.maintenance import repair_run, restore_marker, verify_run
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.testing.kills import Countdown, run_in_child, start_child
from tests.conftest import FULL
from tests.crash.helpers import check_clean, check_pull, check_store, collect, make_tree
from tests.unit.support import flip, flipped, stored_path

RUN = "r"
KEYS = RunKeys(RUN)
OPTIONS = SaveOptions(threads=1)
SIZES = {"actor/w.bin": 300_000, "cfg.json": 40, "empty": 0}


def make_damaged(tmp_path: Path) -> tuple[Path, Path]:
    """A store with damage of every kind, and its mirror.

    Step 1 and 2 share a damaged file; 2 has lost its manifest, 3 a file and its record; the record
    of 4 and a mark of 5 cannot be read.
    """
    root = tmp_path / "damaged"
    store = Store(LocalBackend(str(root), dedupe="link"))
    for step in range(1, 6):
        tree = make_tree(tmp_path / f"tree{step}", step if step > 2 else 1, SIZES)
        (tree / "step").write_bytes(b"%d" % step)
        store.push(tree, RUN, step, OPTIONS)
    store.pin(store.get(RUN, step=5))
    mirror = tmp_path / "mirror"
    shutil.copytree(root, mirror, symlinks=True)
    checkpoints = {c.step: c for c in store.list(RUN)}
    flip(stored_path(checkpoints[1], "actor/w.bin"), 70_000)
    (root / KEYS.manifest(checkpoints[2].name)).unlink()
    stored_path(checkpoints[3], "cfg.json").unlink()
    (root / KEYS.record(checkpoints[3].name)).unlink()
    spoil(root / KEYS.record(checkpoints[4].name))
    (mark,) = (root / KEYS.marks_of(checkpoints[5].name)).iterdir()
    spoil(mark)
    return root, mirror


def spoil(path: Path) -> None:
    """Change two bytes: what it was can only come from a mirror."""
    data = flipped(flipped(path.read_bytes(), 8 * 120), 8 * 130)
    path.unlink()
    path.write_bytes(data)


def copy_of(root: Path, into: Path) -> Path:
    """A copy in which files are still shared."""
    shutil.rmtree(into, ignore_errors=True)
    subprocess.run(["cp", "-a", str(root), str(into)], check=True)
    return into


def repair_counting(backend_operations: bool, root: Path, mirror: Path, count: int) -> None:
    backend = LocalBackend(str(root), dedupe="link")
    if backend_operations:
        store = Store(HookedBackend(backend, Countdown(count).hook))
    else:
        store = Store(backend)
        Countdown(count).install()
    repair_all(store, mirror)


def repair_all(store: Store, mirror: Path) -> None:
    sources = [ckptstore.open_store(str(mirror))]
    for result in repair_run(store, RUN, sources, threads=1):
        assert result.ok, result


def whole_again(root: Path, tmp_path: Path) -> None:
    assert check_store(root) == [f"{RUN}@{step}" for step in range(1, 6)]
    store = ckptstore.open_store(str(root))
    assert store.get(RUN, step=5).standing.pinned
    for step in (1, 2, 3):
        check_pull(store, RUN, step, tmp_path / f"tree{step}", tmp_path / "pulled")
    collect(root)
    check_clean(root)
    assert check_store(root) == [f"{RUN}@{step}" for step in range(1, 6)]


@pytest.mark.parametrize("operations", [True, False], ids=["backend-operations", "system-calls"])
@pytest.mark.timeout(1800)
def test_a_repair_killed_anywhere_leaves_each_thing_as_it_was_or_whole(
    tmp_path: Path, operations: bool, record_property: Callable[[str, object], None]
) -> None:
    damaged, mirror = make_damaged(tmp_path)
    before = {p.relative_to(damaged): p.read_bytes() for p in files_of(damaged)}
    good = {p.relative_to(mirror): p.read_bytes() for p in files_of(mirror)}
    rng = random.Random(3)
    point = killed = 0
    while True:
        root = copy_of(damaged, tmp_path / "store")
        status = run_in_child(
            lambda root=root, point=point: repair_counting(operations, root, mirror, point)  # type: ignore[misc]
        )
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            whole_again(root, tmp_path)
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        killed += 1
        for path in files_of(root):
            relative = path.relative_to(root)
            if is_temporary(path.name) or (relative not in before and relative not in good):
                assert is_temporary(path.name) or "marks" in relative.parts, relative
                continue
            data = path.read_bytes()
            assert data in (before.get(relative), good.get(relative)), f"{relative} at {point}"
        for relative in before:
            assert (root / relative).exists(), f"{relative} is gone at {point}"
        repair_all(Store(LocalBackend(str(root), dedupe="link")), mirror)
        whole_again(root, tmp_path)
        point += 1 if FULL else rng.randrange(1, 90 if operations else 30)
    record_property("kill points", killed)
    print(f"{killed} kill points, the last before {point}")
    assert point > 60


def files_of(root: Path) -> list[Path]:
    """The stored files, without the hint."""
    found = (p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    return [p for p in found if "latest" not in p.parts]


def test_repairs_at_the_same_time_do_no_harm(tmp_path: Path) -> None:
    damaged, mirror = make_damaged(tmp_path)
    for _ in range(10 if FULL else 3):
        root = copy_of(damaged, tmp_path / "store")

        def work(root: Path = root) -> None:
            store = Store(LocalBackend(str(root), dedupe="link"))
            list(repair_run(store, RUN, [ckptstore.open_store(str(mirror))], threads=2))

        children = [start_child(work) for _ in range(4)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert codes == [0, 0, 0, 0]
        whole_again(root, tmp_path)


@pytest.mark.timeout(600)
def test_a_marker_whose_repair_is_killed_is_damaged_or_good(tmp_path: Path) -> None:
    store = ckptstore.open_store(str(tmp_path / "store"))
    store.push(make_tree(tmp_path / "tree", 1), RUN, 1, OPTIONS)
    marker = tmp_path / "store" / "CKPTSTORE.json"
    good = marker.read_bytes()
    bad = flipped(good, 900)
    point = 0
    while True:
        marker.unlink()
        marker.write_bytes(bad)

        def work(point: int = point) -> None:
            Countdown(point).install()
            restore_marker(LocalBackend(str(tmp_path / "store")))

        killed = os.WIFSIGNALED(run_in_child(work))
        assert marker.read_bytes() in ((good, bad) if killed else (good,))
        if not killed:
            break
        point += 1
    assert point > 3
    assert all(r.ok for r in verify_run(ckptstore.open_store(str(tmp_path / "store")), RUN))
