"""Mirrors on servers: SIGKILL at every storage operation, and what the server does meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ckptstore
from ckptstore.maintenance import gc
from ckptstore.maintenance.mirror import Follower, How, Outcome, mirror
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from tests.conftest import FULL
from tests.crash.helpers import check_store, make_tree
from tests.remote.places import Place
from tests.servers.hadoop import Hadoop
from tests.servers.s3 import Bucket
from tests.servers.seaweed import SeaweedFS

ROOT = Path(__file__).parents[2]
RUN = "r"
SAMPLE = 3
HOW = How(threads=1)


def _killed_mirror(source: str, target: str, count: int) -> int:
    """A mirror in a process of its own, killed at an operation on the target; its exit code."""
    command = [sys.executable, "-m", "tests.remote.mortal_mirror", source, target, str(count)]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


def _operations(source: str, target: str) -> int:
    counted: list[str] = []
    backend = HookedBackend(
        ckptstore.open_store(target).backend,
        lambda operation, key, phase: counted.append(operation),
    )
    mirror(ckptstore.open_store(source), Store(backend), HOW)
    return len(counted)


@pytest.fixture(params=["s3", "hdfs"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "s3":
        seaweed = request.getfixturevalue("seaweed")
        return Place("s3", lambda number: Bucket.make(seaweed, monkeypatch).uri())
    hadoop: Hadoop = request.getfixturevalue("hadoop")
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    unique = f"{os.getpid()}-{time.monotonic_ns()}"
    return Place("hdfs", lambda number: f"hdfs://{hadoop.authority}/mirrors/{unique}/{number}")


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
        assert _killed_mirror(source.uri, target, point) == -signal.SIGKILL, f"point {point}"
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


@pytest.mark.timeout(300)
def test_a_mirror_that_follows_outlives_restarts_of_its_server(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    seaweed: SeaweedFS,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = type(seaweed)(tmp_path_factory.mktemp("own-server"))
    server.start()
    source = ckptstore.open_store(str(tmp_path / "source"))
    for step in (1, 2, 3):
        source.push(make_tree(tmp_path / f"t{step}", step, {"w.bin": 9_000_000}), RUN, step)
    killed, failed, in_step = (threading.Event() for _ in range(3))
    moved: list[int] = []

    def progress(count: int) -> None:
        moved.append(count)
        if sum(moved) > 12_000_000 and not killed.is_set():
            server.kill()
            killed.set()

    def told(outcome: Outcome) -> None:
        if outcome.failure is not None:
            failed.set()
        elif outcome.ok and outcome.result is not None and not outcome.result.behind.checkpoints:
            in_step.set()

    how = How(threads=1, progress=progress)
    try:
        uri = Bucket.make(server, monkeypatch).uri(timeout="1")
        follower = Follower(
            uri,
            lambda: ckptstore.open_store(source.uri),
            lambda: ckptstore.open_store(uri),
            how,
            interval=0.2,
            told=told,
        )
        thread = threading.Thread(target=follower.run)
        thread.start()
        assert failed.wait(120)
        server.start()
        assert in_step.wait(120)
        follower.finish()
        thread.join()
        assert check_store(uri) == [f"{RUN}@{step}" for step in (1, 2, 3)]
    finally:
        how.cancel.set()
        how.stop.set()
        server.kill()
