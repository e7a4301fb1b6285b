"""Crashes with a store on a real HDFS: of the writer, of the DataNode, of the NameNode."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.backends.hadoop import HadoopBackend
from ckptstore.backends.hadoopclient import HadoopClient, HadoopOptions, Sink, Source, Status
from ckptstore.layout import is_temporary
from ckptstore.maintenance import verify
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.testing.kills import Countdown, run_in_child
from tests.cli.support import ckpt_process, start
from tests.conftest import FULL
from tests.crash.helpers import check_pull, make_tree
from tests.servers.hadoop import Hadoop
from tests.servers.shared import require

RUN = "r"
OPTIONS = SaveOptions(threads=1, keep_partial=True)
_places = itertools.count()

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    for name in ("CKPT_STORE", "CKPT_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hadoop]:
    """A Hadoop that may be killed: nobody else uses it."""
    require(Hadoop)
    server = Hadoop(tmp_path_factory.mktemp("hadoop"))
    server.start()
    yield server
    server.kill()


class _Mortal(HadoopClient):
    """A client whose process is killed before or after any call that changes something."""

    def __init__(self, inner: HadoopClient, countdown: Countdown) -> None:
        self._inner = inner
        self._tick = countdown.tick
        self.address = inner.address

    def status(self, path: str) -> Status | None:
        return self._inner.status(path)

    def list(self, path: str) -> list[Status] | None:
        return self._inner.list(path)

    def read(self, path: str, limit: int) -> bytes:
        return self._inner.read(path, limit)

    def open(self, path: str) -> Source:
        return self._inner.open(path)

    def create(self, path: str, *, executable: bool = False) -> Sink:
        self._tick()
        return _MortalSink(self._inner.create(path, executable=executable), self._tick)

    def make_directories(self, path: str) -> None:
        self._tick()
        self._inner.make_directories(path)

    def rename(self, source: str, target: str, *, replace: bool = False) -> bool:
        self._tick()
        done = self._inner.rename(source, target, replace=replace)
        self._tick()
        return done

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self._tick()
        self._inner.delete(path, recursive=recursive)


class _MortalSink(Sink):
    def __init__(self, inner: Sink, tick: Any) -> None:
        self._inner = inner
        self._tick = tick

    def write(self, data: memoryview) -> None:
        self._tick()
        self._inner.write(data)
        self._tick()

    def close(self) -> None:
        self._inner.close()
        self._tick()

    def abort(self) -> None:
        self._inner.abort()


def _client(scheme: str, server: Hadoop) -> HadoopClient:
    if scheme == "hdfs":
        from ckptstore.backends.hdfsnative import NativeClient

        return NativeClient(server.authority, HadoopOptions())
    from ckptstore.backends.webhdfs import WebClient

    return WebClient("webhdfs", server.web_authority, HadoopOptions())


def _check(store: Store) -> list[str]:
    """Every commit is whole, to the last byte. Returns their refs."""
    if not store.exists:
        return []
    rows = [row for row in store.rows() if row.state != "unfinished"]
    assert all(row.state == "ok" for row in rows), rows
    assert all(verify(store.get(row.run, name=row.name), deep=True).ok for row in rows)
    return [row.ref for row in rows]


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs"])
def test_a_push_killed_anywhere_is_absent_or_whole_and_goes_on(
    hadoop: Hadoop, scheme: str, tmp_path: Path, worker_id: str
) -> None:
    """A seeded sample of the points; the parent looks over HTTP, which shares nothing with it."""
    tree = make_tree(tmp_path / "tree", 1)
    base = f"/kill/{worker_id}/{next(_places)}"

    def push(root: str, count: int) -> None:
        client = _Mortal(_client(scheme, hadoop), Countdown(count))
        Store(HadoopBackend(client, root)).push(tree, RUN, 1, OPTIONS)

    def killed(root: str, count: int) -> bool:
        status = run_in_child(lambda: push(root, count))
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)

    rng = random.Random(5)
    points = range(200) if FULL else sorted(rng.sample(range(60), 5))
    seen, taken = [], []
    for point in points:
        root = f"{base}/{point}"
        died = killed(root, point)
        store = Store(HadoopBackend(_client("webhdfs", hadoop), root))
        refs = _check(store)
        seen.append(len(refs))
        assert died or refs == [f"{RUN}@1"]
        listed = store.catalog.backend.list("", recursive=True)
        not_yet = sum(p.stat().st_size for p in tree.rglob("*") if p.is_file())
        for entry in listed:  # what has its name is whole
            if not is_temporary(entry.key) and entry.key.endswith("w.bin"):
                assert entry.size == (tree / "actor/w.bin").stat().st_size
                not_yet -= entry.size
        result = store.push(tree, RUN, 1, OPTIONS)
        assert result.sent <= not_yet, "what had arrived was sent again"
        taken.append(not_yet < 1000)
        assert result.created is not bool(refs)
        assert _check(store) == [f"{RUN}@1"]
        check_pull(store, RUN, 1, tree, tmp_path / "pulled")
        if FULL and not died:
            break
    assert 0 in seen
    assert any(done and not refs for done, refs in zip(taken, seen, strict=True)), "none taken over"


def test_a_datanode_that_dies_in_a_push_leaves_nothing_half_committed(
    own: Hadoop, tmp_path: Path
) -> None:
    """The push ends with "try again"; once the DataNode is back the same push succeeds."""
    tree = make_tree(tmp_path / "tree", 3, {"a.bin": 1000, "big.bin": 100_000_000})
    uris = [f"hdfs://{own.authority}/dn", f"webhdfs://{own.web_authority}/dnw"]
    pushes = [start("push", tree, f"{uri}/{RUN}@1?timeout=2", "--quiet") for uri in uris]
    for uri in uris:
        _until_data_flows(ckptstore.open_store(uri))
    own.kill("datanode")
    for push in pushes:
        _, err = push.communicate(timeout=120)
        assert push.returncode in (0, 8), err  # 0: on a fast machine it was done before
        assert push.returncode == 0 or "error: " in err
        assert "Proto" not in err
    own.start()
    for push, uri in zip(pushes, uris, strict=True):
        assert _check(ckptstore.open_store(uri)) == ([] if push.returncode else [f"{RUN}@1"])
        ckpt_process("push", tree, f"{uri}/{RUN}@1", "--quiet").ok()
        assert _check(ckptstore.open_store(uri)) == [f"{RUN}@1"]


def _until_data_flows(store: Store) -> None:
    backend = store.catalog.backend
    end = time.monotonic() + 60
    while time.monotonic() < end:
        directories = [e.key for e in backend.list(RUN) if "-step-" in e.key]
        if any(is_temporary(e.key) for key in directories for e in backend.list(key)):
            return
        time.sleep(0.02)
    raise AssertionError("the push did not begin")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL] if FULL else [signal.SIGSTOP])
def test_without_a_namenode_the_exit_code_says_try_again(
    own: Hadoop, number: signal.Signals, tmp_path: Path
) -> None:
    """Silent or gone: no command hangs, and none believes that the store is empty."""
    tree = make_tree(tmp_path / "tree", 4)
    uris = [f"hdfs://{own.authority}/nn{number}", f"webhdfs://{own.web_authority}/nnw{number}"]
    for uri in uris:
        ckpt_process("push", tree, f"{uri}/{RUN}@1").ok()
    if number == signal.SIGKILL:
        own.kill("namenode")
    else:
        os.kill(own.pid("namenode"), number)
    try:
        for uri in uris:
            ckpt_process("list", f"{uri}?timeout=1").failed(8, "127.0.0.1")
            ckpt_process("push", tree, f"{uri}/{RUN}@2?timeout=1").failed(8, "127.0.0.1")
    finally:
        if number == signal.SIGSTOP:
            os.kill(own.pid("namenode"), signal.SIGCONT)
        own.start()
    for uri in uris:
        assert _check(ckptstore.open_store(uri)) == [f"{RUN}@1"]
