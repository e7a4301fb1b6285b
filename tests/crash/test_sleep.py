"""A writer put to sleep for longer than its lease and the grace period."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends.local import LocalBackend
from ckptstore.errors import ConflictError
from ckptstore.layout import Name
from ckptstore.maintenance import gc
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend, Phase
from ckptstore.testing.kills import Countdown, start_child
from tests.crash.helpers import check_clean, check_store, collect, make_tree

RUN = "r"
LONG_AGO = 3 * 86400.0


def sleeping_push(uri: Path, tree: Path, hook: Callable[[str, str, Phase], None]) -> int:
    """A push in a child that stops itself; returns the child's pid once it sleeps."""
    backend = HookedBackend(LocalBackend(str(uri)), hook)
    options = SaveOptions(threads=1, keep_partial=True)
    pid = start_child(lambda: Store(backend).push(tree, RUN, 2, options))
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return pid


def wake(pid: int) -> int:
    """Wake the writer and wait for its end; returns its exit code."""
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert os.WIFEXITED(status)
    return os.WEXITSTATUS(status)


def age_everything(uri: Path) -> None:
    """Three days pass by the store's clock, which is the time of its files."""
    then = time.time() - LONG_AGO
    for path in sorted(uri.rglob("*"), reverse=True):
        os.utime(path, (then, then), follow_symlinks=False)


def before_the_record() -> Callable[[str, str, Phase], None]:
    """A hook that stops the process once, before its record is created."""
    slept: list[str] = []

    def hook(operation: str, key: str, phase: Phase) -> None:
        at_record = operation == "create_exclusive" and "/commits/" in key and phase == "before"
        if at_record and not slept:
            slept.append(key)
            os.kill(os.getpid(), signal.SIGSTOP)

    return hook


def test_a_writer_that_slept_through_lease_and_grace_fails_cleanly(tmp_path: Path) -> None:
    uri, tree = tmp_path / "store", make_tree(tmp_path / "tree", 1)
    store = ckptstore.open_store(str(uri))
    store.push(make_tree(tmp_path / "old", 2), RUN, 1)
    pid = sleeping_push(uri, tree, before_the_record())

    kept = gc(store)
    assert not kept.removed, "a live lease protects"
    age_everything(uri)
    removed = gc(store)
    assert next(a.reason for a in removed.removed).startswith(
        "an unfinished save that ended 3 d ago"
    )

    assert wake(pid) == ConflictError.exit_code
    assert check_store(uri) == [f"{RUN}@1"]
    collect(uri)
    check_clean(uri)
    assert store.push(tree, RUN, 2).created
    assert check_store(uri) == [f"{RUN}@1", f"{RUN}@2"]


@pytest.mark.timeout(600)
def test_a_writer_that_sleeps_at_any_operation_while_gc_runs(tmp_path: Path) -> None:
    """Wherever it slept: afterwards there is a whole commit or none, and it says which."""
    tree = make_tree(tmp_path / "tree", 1)
    old = make_tree(tmp_path / "old", 2)
    outcomes = set()
    for point in range(0, 200, 3):
        uri = tmp_path / f"store-{point}"
        store = ckptstore.open_store(str(uri))
        store.push(old, RUN, 1)
        try:
            pid = sleeping_push(uri, tree, Countdown(point, signal.SIGSTOP).hook)
        except AssertionError:  # it came to its end before that many operations
            break
        age_everything(uri)
        gc(store)
        code = wake(pid)
        committed = code == 0
        outcomes.add(code)
        assert check_store(uri) == [f"{RUN}@1"] + ([f"{RUN}@2"] if committed else [])
        collect(uri)
        check_clean(uri)
    assert 0 in outcomes
    assert ConflictError.exit_code in outcomes


def test_a_push_takes_over_from_a_writer_that_sleeps_past_its_lease(tmp_path: Path) -> None:
    """The sleeper cannot commit any more, and loses nothing that the other one links to."""
    uri, tree = tmp_path / "store", make_tree(tmp_path / "tree", 1)
    store = ckptstore.open_store(str(uri))
    pid = sleeping_push(uri, tree, before_the_record())
    age_everything(uri)
    result = store.push(tree, RUN, 2)
    assert result.created
    assert result.sent == 0
    assert wake(pid) == ConflictError.exit_code
    assert check_store(uri) == [f"{RUN}@2"]
    names = [d.name for d in (uri / RUN).iterdir() if Name.parse(d.name)]
    assert names == [str(result.checkpoint.name)]
