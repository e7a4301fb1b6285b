"""SIGKILL of a push at every storage operation, on servers."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

import ckptstore
from ckptstore.maintenance import gc
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.testing.kills import Countdown, run_in_child
from tests.conftest import FULL
from tests.crash.helpers import check_pull, check_store, make_tree
from tests.remote.places import Place

RUN = "r"
OPTIONS = SaveOptions(threads=1, keep_partial=True)
SAMPLE = 8


def _push(uri: str, tree: Path, count: int = -1) -> None:
    backend = HookedBackend(ckptstore.open_store(uri).backend, Countdown(count).hook)
    Store(backend).push(tree, RUN, 2, OPTIONS)


def _operations(uri: str, tree: Path) -> int:
    counted: list[str] = []
    backend = HookedBackend(
        ckptstore.open_store(uri).backend, lambda operation, key, phase: counted.append(operation)
    )
    Store(backend).push(tree, RUN, 2, OPTIONS)
    return len(counted)


@pytest.mark.timeout(1800)
def test_a_push_killed_anywhere_is_absent_or_whole_and_goes_on(
    tmp_path: Path, place: Place
) -> None:
    sizes = {"actor/w.bin": 5_000_000, "cfg.json": 40, "empty": 0}
    tree = make_tree(tmp_path / "tree", 1, sizes)
    old = make_tree(tmp_path / "old", 2, sizes)
    shutil.copy(tree / "cfg.json", old / "cfg.json")

    def fresh() -> str:
        uri = place.uri()
        ckptstore.open_store(uri).push(old, RUN, 1, OPTIONS)
        return uri

    total = _operations(fresh(), tree)
    assert total > 30
    points = range(total)
    for point in points if FULL else sorted(random.Random(5).sample(points, SAMPLE)):
        uri = fresh()
        status = run_in_child(lambda uri=uri, point=point: _push(uri, tree, point))  # type: ignore[misc]
        assert os.WIFSIGNALED(status), f"point {point}: {status}"
        refs = check_store(uri)
        assert refs in ([f"{RUN}@1"], [f"{RUN}@1", f"{RUN}@2"])

        store = ckptstore.open_store(uri)
        result = store.push(tree, RUN, 2, OPTIONS)
        assert result.created is (f"{RUN}@2" not in refs)
        gc(store, grace=0, force=True)
        assert check_store(uri) == [f"{RUN}@1", f"{RUN}@2"]
        _check_clean(store)
        check_pull(store, RUN, 2, tree, tmp_path / "pulled")


def _check_clean(store: Store) -> None:
    committed = {row.name for row in store.rows(RUN)}
    assert {str(name) for name in store.catalog.directories(RUN)} == committed
    assert store.catalog.leases(RUN) == []
    assert list(store.backend.unfinished(RUN)) == []
