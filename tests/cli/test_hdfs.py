"""The command line with a store on a real HDFS."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore.backends
from tests.cli.support import ckpt, ckpt_process, fill
from tests.servers.hadoop import Hadoop

_places = itertools.count()


@pytest.fixture(params=["hdfs", "webhdfs"])
def uri(
    request: pytest.FixtureRequest, hadoop: Hadoop, monkeypatch: pytest.MonkeyPatch, worker_id: str
) -> str:
    """A new place on the run's Hadoop."""
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    authority = hadoop.authority if request.param == "hdfs" else hadoop.web_authority
    return f"{request.param}://{authority}/cli/{worker_id}/{next(_places)}"


def contents(root: Path) -> dict[str, bytes]:
    """The files below a directory."""
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def test_what_was_pushed_comes_back(uri: str, source: Path, place: Path) -> None:
    pushed = ckpt_process("push", source, f"{uri}/gsm8k@500?replication=1", "--json").ok().json
    assert pushed["sent_bytes"] > 100_000
    again = ckpt("push", source, f"{uri}/gsm8k@500", "--json").ok().json
    assert (again["name"], again["sent_bytes"]) == (pushed["name"], 0)
    (row,) = ckpt("list", uri, "--json").ok().json
    assert (row["ref"], row["state"], row["digest"]) == ("gsm8k@500", "ok", pushed["digest"])
    ckpt("pull", f"{uri}/gsm8k@latest", place / "back").ok()
    assert contents(place / "back") == contents(source)
    assert (place / "back/run.sh").stat().st_mode & 0o100
    assert (place / "back/cache").is_dir()
    assert ckpt("verify", f"{uri}/gsm8k@500", "--deep", "--json").ok().json["ok"] is True
    (source / "config.json").write_bytes(b'{"layers": 3}\n')
    ckpt("push", source, f"{uri}/gsm8k@600").ok()
    ckpt("delete", f"{uri}/gsm8k@500", "--yes", "--force").ok()
    (row,) = ckpt("list", uri, "--json").ok().json
    assert row["ref"] == "gsm8k@600"
    ckpt("undelete", f"{uri}/gsm8k@{pushed['name']}").ok()
    assert len(ckpt("list", uri, "--json").ok().json) == 2
    ckpt("gc", uri).ok()
    ckpt("verify", uri, "--deep").ok()


def test_a_user_who_may_not_write_is_told(
    uri: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt("push", source, f"{uri}/gsm8k@500").ok()
    monkeypatch.setenv("HADOOP_USER_NAME", "mallory")
    ckpt("push", source, f"{uri}/gsm8k@600").failed(7, "user=mallory", "HADOOP_USER_NAME")
    ckpt("list", uri).ok()


def test_a_name_that_hdfs_cannot_hold_is_refused_before_a_file_is_sent(
    uri: str, source: Path
) -> None:
    fill(source, {"z/12:30.log": b"x"})
    ckpt("push", source, f"{uri}/gsm8k@500").failed(2, "'z/12:30.log' cannot be stored", ":")
    assert ckpt("list", uri, "--all", "--json").ok().json == []


def test_no_store_is_said_only_by_a_namenode(uri: str, source: Path) -> None:
    """A closed port, and one that accepts and never answers, are no empty place."""
    scheme = uri.partition(":")[0]
    ckpt("list", uri).failed(4, "there is no store")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        for command in (("list",), ("push", source)):
            where = f"{scheme}://127.0.0.1:{port}/x"
            ref = f"{where}/r@1" if "push" in command else where
            ckpt(*command, f"{ref}?timeout=20").failed(8, f"127.0.0.1:{port}", "refused")
        silent.listen()
        ckpt("list", f"{scheme}://127.0.0.1:{port}/x?timeout=1").failed(
            8, "not answered", str(port)
        )


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither hdfs-native nor hdfs nor pyarrow."""
    for name in list(sys.modules):
        if name.startswith(("ckptstore.backends.hdfs", "ckptstore.backends.webhdfs")):
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(ckptstore.backends, name.rpartition(".")[2], raising=False)
    for name in ("hdfs_native", "hdfs", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    yield
    for name in list(sys.modules):
        if name.startswith(("ckptstore.backends.hdfs", "ckptstore.backends.webhdfs")):
            del sys.modules[name]


@pytest.mark.usefixtures("place", "nothing_installed")
@pytest.mark.parametrize(
    ("uri", "package"),
    [
        ("hdfs://nn:8020/x", "hdfs-native"),
        ("hdfs://nn:8020/x?client=pyarrow", "pyarrow"),
        ("webhdfs://nn:9870/x", "hdfs"),
    ],
)
def test_a_package_that_is_missing_is_named(uri: str, package: str) -> None:
    ckpt("list", uri).failed(2, f"needs the package {package}", "ckptstore[hdfs]")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("hdfs://nn:8020/x?replication=0", "replication=0"),
        ("hdfs://nn:8020/x?block_size=1000", "block_size=1000"),
        ("hdfs://nn:8020/x?color=red", "known: replication, block_size, timeout, client"),
        ("hdfs://nn:8020/x?client=java", "known: native, pyarrow"),
        ("webhdfs://nn:9870/x?auth=yes", "known: simple, kerberos"),
        ("hdfs:///x", "names no NameNode"),
        ("hdfs://me@nn:8020/x", "HADOOP_USER_NAME"),
        ("hdfs://nn:8020/a:b", "'a:b' cannot be in a path"),
        ("hdfs://no-such-service/x", "add the NameNode's port"),
    ],
)
def test_a_location_that_cannot_be_is_refused(uri: str, says: str) -> None:
    pytest.importorskip("hdfs_native")
    ckpt("list", uri).failed(2, says)
