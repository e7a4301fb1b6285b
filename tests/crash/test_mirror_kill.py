"""SIGKILL of a mirror at every storage operation, and mirrors at once, in real processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.local import LocalBackend
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.maintenance import gc
from ckptstore.maintenance.mirror import How, mirror
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.testing.kills import Countdown, run_in_child, start_child
from tests.conftest import FULL
from tests.crash.helpers import check_clean, check_store, collect, make_tree

RUN = "r"
STEPS = (1, 2)
REFS = [f"{RUN}@{step}" for step in STEPS]
HOW = How(threads=1)


def mirror_counting_operations(source: Path, target: Path, count: int) -> None:
    """Operations of both stores count: what the mirror notes in the source, too."""
    count_down = Countdown(count).hook
    one = Store(HookedBackend(LocalBackend(str(source)), count_down))
    mirror(one, Store(HookedBackend(LocalBackend(str(target)), count_down)), HOW)


def mirror_counting_system_calls(source: Path, target: Path, count: int) -> None:
    Countdown(count).install()
    mirror(ckptstore.open_store(str(source)), ckptstore.open_store(str(target)), HOW)


Mirror = Callable[[Path, Path, int], None]


def killed_at(work: Mirror, source: Path, target: Path, point: int) -> bool:
    status = run_in_child(lambda: work(source, target, point))
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mirror")
    store = ckptstore.open_store(str(root / "source"))
    for step in STEPS:
        store.push(make_tree(root / f"t{step}", step), RUN, step)
    store.pin(store.get(RUN, step=1))
    return root / "source"


@pytest.mark.parametrize(
    "work",
    [mirror_counting_operations, mirror_counting_system_calls],
    ids=["backend-operations", "system-calls"],
)
@pytest.mark.timeout(900)
def test_a_mirror_killed_anywhere_goes_on(tmp_path: Path, source: Path, work: Mirror) -> None:
    total = sum(c.size for c in ckptstore.open_store(str(source)).list(RUN))
    point = 0
    while True:
        here, there = tmp_path / "source", tmp_path / "target"
        shutil.rmtree(there, ignore_errors=True)
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(source, here, symlinks=True)
        if not killed_at(work, here, there, point):
            break
        refs = check_store(there)
        assert refs == REFS[: len(refs)]
        if there.joinpath("CKPTSTORE.json").exists():
            gc(ckptstore.open_store(str(there)), grace=0)  # leaves what the mirror has begun
        arrived = _arrived(there, source)
        opened = ckptstore.open_store(str(there))
        result = mirror(ckptstore.open_store(str(here)), opened, HOW)
        assert result.ok, f"killed at {point}: {result}"
        assert result.sent_bytes <= total - arrived, f"killed at {point}"
        assert check_store(there) == REFS
        assert opened.get(RUN, step=1).standing.pinned
        collect(there)
        check_clean(there)
        assert check_store(there) == REFS
        point += 1 if FULL else 7
    print(f"{point} kill points")
    assert point > 30


def _arrived(target: Path, source: Path) -> int:
    """Bytes of the files that are whole in the target."""
    count = 0
    for path in source.rglob("*"):
        copy = target / path.relative_to(source)
        if path.is_file() and len(path.relative_to(source).parts) > 2:
            is_data = path.name != "MANIFEST.json" and path.suffix != ".json"
            is_data = is_data or path.name == "cfg.json"
            if is_data and copy.is_file() and copy.read_bytes() == path.read_bytes():
                count += path.stat().st_size
    return count


@pytest.mark.timeout(300)
def test_a_mirror_killed_inside_a_large_file_sends_one_block_again_at_most(
    tmp_path: Path,
) -> None:
    blocks = 4
    tree = make_tree(tmp_path / "tree", 1, {"w.bin": blocks * BLOCK_SIZE - 5})
    ckptstore.open_store(str(tmp_path / "source")).push(tree, RUN, 1)
    source = tmp_path / "source"
    writes = _count_writes(source, tmp_path / "whole")
    assert writes >= blocks
    for kept in (1, 3):
        target = tmp_path / f"target{kept}"

        def work(kept: int = kept, target: Path = target) -> None:
            left = Countdown(kept)

            def hook(operation: str, key: str, phase: str) -> None:
                if operation == "write" and key.endswith("w.bin") and phase == "after":
                    left.tick()

            backend = HookedBackend(LocalBackend(str(target)), hook)
            mirror(ckptstore.open_store(str(source)), Store(backend), HOW)

        assert os.WIFSIGNALED(run_in_child(work))
        opened = ckptstore.open_store(str(target))
        result = mirror(ckptstore.open_store(str(source)), opened, HOW)
        assert result.sent_bytes <= (blocks - kept) * BLOCK_SIZE
        assert check_store(target) == [f"{RUN}@1"]


def _count_writes(source: Path, target: Path) -> int:
    count = 0

    def hook(operation: str, key: str, phase: str) -> None:
        nonlocal count
        count += operation == "write" and phase == "after" and key.endswith("w.bin")

    backend = HookedBackend(LocalBackend(str(target)), hook)
    mirror(ckptstore.open_store(str(source)), Store(backend), HOW)
    return count


@pytest.mark.timeout(300)
def test_mirrors_of_one_pair_at_once_do_no_harm(tmp_path: Path) -> None:
    """They even share files when none sees the others' leases in time."""
    source = ckptstore.open_store(str(tmp_path / "source"))
    for step in range(6):
        tree = make_tree(tmp_path / f"t{step}", step, {"w.bin": BLOCK_SIZE + 99, "cfg.json": 40})
        source.push(tree, RUN, step)
    rng = random.Random(3)
    for life in range(6 if FULL else 2):
        target = tmp_path / f"target{life}"

        def work(newest_first: bool, target: Path = target) -> None:
            how = How(newest_first=newest_first)
            mirror(ckptstore.open_store(source.uri), ckptstore.open_store(str(target)), how)

        children = [start_child(lambda n=n: work(n)) for n in (True, False, rng.random() < 0.5)]  # type: ignore[misc]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert codes == [0, 0, 0]
        opened = ckptstore.open_store(str(target))
        assert mirror(source, opened).ok
        assert check_store(target) == [f"{RUN}@{step}" for step in range(6)]
        collect(target)
        check_clean(target)
