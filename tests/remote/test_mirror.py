"""Mirrors on servers: SIGKILL at every storage operation, and what the server does meanwhile."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import ckptstore
from ckptstore.maintenance import gc
from ckptstore.maintenance.mirror import How, mirror
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.testing.kills import Countdown, run_in_child
from tests.conftest import FULL
from tests.crash.helpers import check_store, make_tree
from tests.remote.places import Place

RUN = "r"
SAMPLE = 4
HOW = How(threads=1)


def _mirror(source: str, target: str, count: int = -1) -> None:
    backend = HookedBackend(ckptstore.open_store(target).backend, Countdown(count).hook)
    mirror(ckptstore.open_store(source), Store(backend), HOW)


def _operations(source: str, target: str) -> int:
    counted: list[str] = []
    backend = HookedBackend(
        ckptstore.open_store(target).backend,
        lambda operation, key, phase: counted.append(operation),
    )
    mirror(ckptstore.open_store(source), Store(backend), HOW)
    return len(counted)


@pytest.mark.timeout(1800)
def test_a_mirror_killed_anywhere_goes_on(tmp_path: Path, place: Place) -> None:
    source = ckptstore.open_store(str(tmp_path / "source"))
    sizes = {"actor/w.bin": 5_000_000, "cfg.json": 40, "empty": 0}
    for step in (1, 2):
        source.push(make_tree(tmp_path / f"t{step}", step, sizes), RUN, step)
    source.pin(source.get(RUN, step=1))
    refs = [f"{RUN}@1", f"{RUN}@2"]
    points = range(_operations(source.uri, place.uri()))
    assert len(points) > 40
    for point in points if FULL else sorted(random.Random(7).sample(points, SAMPLE)):
        target = place.uri()
        status = run_in_child(
            lambda target=target, point=point: _mirror(source.uri, target, point)  # type: ignore[misc]
        )
        assert os.WIFSIGNALED(status), f"point {point}: {status}"
        there = check_store(target)
        assert there == refs[: len(there)]

        opened = ckptstore.open_store(target)
        result = mirror(source, opened, HOW)
        assert result.ok, f"point {point}: {result}"
        assert check_store(target) == refs
        assert opened.get(RUN, step=1).standing.pinned
        gc(opened, grace=0, force=True)
        assert check_store(target) == refs
        assert opened.catalog.leases(RUN) == []
        assert mirror(source, opened, HOW).sent_bytes == 0


def test_a_run_goes_from_server_to_server_and_back(tmp_path: Path, place: Place) -> None:
    source = ckptstore.open_store(str(tmp_path / "source"))
    source.push(make_tree(tmp_path / "tree", 1, {"a b[1]*?.bin": 40_000_000, "ä/é": 3}), RUN, 1)
    there = ckptstore.open_store(place.uri())
    beyond = ckptstore.open_store(place.uri())
    back = ckptstore.open_store(str(tmp_path / "back"))
    for one, other in ((source, there), (there, beyond), (beyond, back)):
        assert mirror(one, other).ok
    assert check_store(back.uri) == [f"{RUN}@1"]
    assert back.get(RUN, step=1).commit == source.get(RUN, step=1).commit
