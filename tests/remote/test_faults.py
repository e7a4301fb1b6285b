"""A network that fails between a store and an S3 server: nothing is lost or half there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import TemporaryError
from ckptstore.maintenance import verify
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from tests.cli.support import ckpt
from tests.crash.helpers import check_pull, check_store, make_tree
from tests.servers.proxy import Fault, FaultyProxy
from tests.servers.s3 import Bucket, S3Server

SIZES = {"actor/w.bin": 17_000_000, "cfg.json": 40}
OPTIONS = SaveOptions(threads=2, keep_partial=True)


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket.make(s3_server, monkeypatch)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server.port("s3")) as proxy:
        yield proxy


def through(bucket: Bucket, proxy: FaultyProxy) -> str:
    return bucket.uri(endpoint_url=proxy.endpoint, timeout="2")


def part(method: str, target: str) -> bool:
    return method == "PUT" and "partNumber=" in target


def record(method: str, target: str) -> bool:
    return method == "PUT" and "/commits/" in target


def join(method: str, target: str) -> bool:
    return method == "POST" and "uploadId=" in target


def begin(method: str, target: str) -> bool:
    return method == "POST" and "uploads" in target


def small(method: str, target: str) -> bool:
    return method == "PUT" and target.partition("?")[0].endswith("cfg.json")


@pytest.mark.parametrize("chosen", [begin, part, join, small, record], ids=lambda f: f.__name__)
@pytest.mark.parametrize("fault", ["refuse", "reset", "lose-reply"])
def test_one_request_fails_and_the_save_goes_on(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, fault: Fault, chosen: object
) -> None:
    tree = make_tree(tmp_path / "tree", 1, SIZES)
    proxy.once(fault, chosen)  # type: ignore[arg-type]
    store = ckptstore.open_store(through(bucket, proxy))
    assert store.push(tree, "r", 1, OPTIONS).created
    assert proxy.faults == [fault]
    assert check_store(bucket.uri()) == ["r@1"]
    check_pull(ckptstore.open_store(bucket.uri()), "r", 1, tree, tmp_path / "pulled")


@pytest.mark.parametrize("fault", ["refuse", "reset", "lose-reply", "cut"])
def test_one_read_fails_and_the_pull_goes_on(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, fault: Fault
) -> None:
    tree = make_tree(tmp_path / "tree", 1, SIZES)
    ckptstore.open_store(bucket.uri()).push(tree, "r", 1, OPTIONS)
    proxy.once(fault, lambda method, target: method == "GET" and target.endswith("w.bin"), 2)
    store = ckptstore.open_store(through(bucket, proxy))
    check_pull(store, "r", 1, tree, tmp_path / "pulled")
    assert proxy.faults == [fault, fault]
    assert verify(store.get("r", step=1), deep=True).ok


def test_a_record_whose_every_answer_is_lost_is_settled(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy
) -> None:
    """What was told and what is stored agree, whichever of the two it is."""
    tree = make_tree(tmp_path / "tree", 1, {"x": 10})
    proxy.once("lose-reply", record, times=100)
    store = ckptstore.open_store(through(bucket, proxy))
    try:
        store.push(tree, "r", 1, OPTIONS)
    except TemporaryError:
        assert check_store(bucket.uri()) == []
    else:
        assert check_store(bucket.uri()) == ["r@1"]


def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy
) -> None:
    tree = make_tree(tmp_path / "tree", 1, {"x": 10})
    ckptstore.open_store(bucket.uri()).push(tree, "r", 1, OPTIONS)
    proxy.plan = lambda method, target: "hang"
    uri = bucket.uri(endpoint_url=proxy.endpoint, timeout="0.5")
    begun = time.monotonic()
    for command in (["list", uri], ["push", str(tree), _ref(uri, "r@2")]):
        ckpt(*command).failed(8, "did not answer in time")
    assert time.monotonic() - begun < 60
    proxy.plan = lambda method, target: None
    assert [c.ref for c in ckptstore.open_store(uri).list("r")] == ["r@1"]


def test_no_connection_is_never_taken_for_an_empty_store(tmp_path: Path, bucket: Bucket) -> None:
    tree = make_tree(tmp_path / "tree", 1, {"x": 10})
    uri = bucket.uri(endpoint_url="http://127.0.0.1:1", timeout="1")
    for command in (
        ["list", uri],
        ["resume-info", _ref(uri, "r@latest")],
        ["verify", uri],
        ["push", str(tree), _ref(uri, "r@1")],
    ):
        ckpt(*command).failed(8, "no connection to the server")


def test_a_server_that_refuses_everything_ends_the_save_and_leaves_the_old_one(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy
) -> None:
    ckptstore.open_store(bucket.uri()).push(make_tree(tmp_path / "a", 1), "r", 1, OPTIONS)
    proxy.plan = lambda method, target: "refuse" if method in ("PUT", "POST") else None
    store = Store(ckptstore.open_store(through(bucket, proxy)).backend)
    with pytest.raises(TemporaryError, match="SlowDown"):
        store.push(make_tree(tmp_path / "b", 2), "r", 2, OPTIONS)
    assert check_store(bucket.uri()) == ["r@1"]


@pytest.mark.timeout(300)
def test_the_server_is_stopped_in_the_middle_of_an_upload(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The save fails, or waits for it; after its restart the next push completes."""
    server = type(s3_server)(tmp_path_factory.mktemp("own-server"))
    server.start()
    try:
        bucket = Bucket.make(server, monkeypatch)
        tree = make_tree(tmp_path / "tree", 1, {f"s{i}": 9_000_000 for i in range(4)})
        ckptstore.open_store(bucket.uri()).push(make_tree(tmp_path / "a", 2), "r", 1, OPTIONS)
        done = []

        def stop_in_the_middle(count: int) -> None:
            done.append(count)
            if len(done) == 2:
                server.kill()

        store = ckptstore.open_store(bucket.uri(timeout="1"))
        options = SaveOptions(threads=1, keep_partial=True, progress=stop_in_the_middle)
        with pytest.raises(TemporaryError):
            store.push(tree, "r", 2, options)
        server.start()
        _until_it_reads(bucket.uri())
        assert check_store(bucket.uri()) == ["r@1"]
        assert ckptstore.open_store(bucket.uri()).push(tree, "r", 2, OPTIONS).created
        assert check_store(bucket.uri()) == ["r@1", "r@2"]
    finally:
        server.kill()


def _until_it_reads(uri: str) -> None:
    """A server that was killed answers before it has found all of its data again."""
    patience = time.monotonic() + 90
    while True:
        try:
            for checkpoint in ckptstore.open_store(uri).list("r"):
                checkpoint.read_bytes("actor/w.bin")
            ckptstore.open_store(uri).backend.put("probe", b"")  # and it takes data again
            ckptstore.open_store(uri).backend.delete(["probe"])
            return
        except TemporaryError:
            if time.monotonic() > patience:
                raise
            time.sleep(0.5)


def _ref(uri: str, ref: str) -> str:
    head, _, query = uri.partition("?")
    return f"{head}/{ref}?{query}"
