"""The backend for NFS on a local disk: what the server answers is made up here.

On a real server it is tested by ``tests/conformance/test_nfs.py``.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends import localfile, open_backend
from ckptstore.backends.local import LocalBackend
from ckptstore.backends.nfs import NfsBackend
from ckptstore.errors import NotFoundError, TemporaryError, UsageError
from ckptstore.layout import check_new_path
from ckptstore.scanning import scan
from ckptstore.testing.conformance import BackendConformance
from ckptstore.uri import StoreURI

SILLY = ".nfs0000000000a1b2c300000001"


class TestNfsCodeOnALocalDisk(BackendConformance):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = tmp_path
        monkeypatch.setattr("ckptstore.backends.nfs._TICK_SECONDS", 0.0)

    def make(self) -> NfsBackend:
        return NfsBackend(str(self.root))

    def raw_write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_read(self, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.exists() else None


def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, error: int, times: int, where: str = ""
) -> Callable[[], int]:
    """``os.<name>`` fails some times; returns how often it still will."""
    real = getattr(os, name)
    left = [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0] > 0 and (not where or where in str(args[0])):
            left[0] -= 1
            raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return lambda: left[0]


def test_a_local_disk_is_not_taken_for_nfs(tmp_path: Path) -> None:
    place = StoreURI.parse(str(tmp_path / "not/made/yet"))
    assert type(open_backend(place)) is LocalBackend


def test_what_does_not_answer_counts_as_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        @staticmethod
        def statfs(*_: object) -> int:
            ctypes.set_errno(errno.ESTALE)
            return -1

    monkeypatch.setattr(localfile, "_libc", Libc)
    assert type(open_backend(StoreURI.parse(str(tmp_path)))) is NfsBackend


def test_every_way_to_read_survives_a_stale_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = NfsBackend(str(tmp_path))
    client.put("d/x", b"abc")
    left = failing(monkeypatch, "open", errno.ESTALE, 2, where="d/x")
    assert client.read("d/x", 10) == b"abc"
    assert left() == 0
    left = failing(monkeypatch, "fstat", errno.ESTALE, 2)
    assert client.stat("d/x") is not None
    assert left() == 0
    left = failing(monkeypatch, "scandir", errno.ESTALE, 2)
    assert [e.key for e in client.list("d")] == ["d/x"]
    assert left() == 0
    reader = client.open_reader("d/x")
    left = failing(monkeypatch, "preadv", errno.ESTALE, 2)
    buffer = bytearray(3)
    assert reader.read_into(0, memoryview(buffer)) == 3
    assert buffer == b"abc"
    assert left() == 0
    reader.close()


def test_a_handle_that_stays_stale_is_an_error_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = NfsBackend(str(tmp_path))
    client.put("d/x", b"abc")
    reader = client.open_reader("d/x")
    failing(monkeypatch, "preadv", errno.ESTALE, 1000)
    with pytest.raises(TemporaryError):
        reader.read_into(0, memoryview(bytearray(3)))
    reader.close()
    failing(monkeypatch, "open", errno.ESTALE, 1000, where="d/x")
    with pytest.raises(TemporaryError):
        client.read("d/x", 10)


def test_a_file_that_another_replaced_by_a_longer_one_is_not_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = NfsBackend(str(tmp_path))
    client.put("d/x", b"abc")
    reader = client.open_reader("d/x")
    client.put("d/x", b"longer")
    failing(monkeypatch, "preadv", errno.ESTALE, 1)
    with pytest.raises(TemporaryError, match="replaced"):
        reader.read_into(0, memoryview(bytearray(3)))
    client.delete(["d/x"])
    failing(monkeypatch, "preadv", errno.ESTALE, 1)
    with pytest.raises(NotFoundError):
        reader.read_into(0, memoryview(bytearray(3)))
    reader.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT])
def test_a_server_that_a_soft_mount_gave_up_on_is_no_damage_and_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    client = NfsBackend(str(tmp_path))
    client.put("d/x", b"abc")
    reader = client.open_reader("d/x")
    failing(monkeypatch, "preadv", error, 1000)
    with pytest.raises(TemporaryError):
        reader.read_into(0, memoryview(bytearray(3)))
    reader.close()
    failing(monkeypatch, "scandir", error, 1000)
    with pytest.raises(TemporaryError):
        client.list("d")
    failing(monkeypatch, "lstat", error, 1000)
    with pytest.raises(TemporaryError):
        client.stat("d/x")


def test_a_removal_whose_answer_was_lost_is_carried_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again, and the server does not find what it has just renamed."""
    client = NfsBackend(str(tmp_path))
    client.put("commits/x", b"record")
    real = os.rename

    def rename(source: str, target: str) -> None:
        real(source, target)
        if "commits/x" in source:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "rename", rename)
    assert client.remove_if("commits/x", b"record") is True
    assert os.listdir(tmp_path / "commits") == []


def test_a_disk_that_is_full_on_closing_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says so when data goes to the server: at fsync, and again at close."""
    client = NfsBackend(str(tmp_path))
    writer = client.open_writer("d/x")
    writer.write(0, memoryview(b"abc"))
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close)
    writer.abort()
    monkeypatch.undo()
    assert os.listdir(tmp_path / "d") == []


def test_space_that_is_free_a_moment_later_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = NfsBackend(str(tmp_path))
    left = failing(monkeypatch, "fsync", errno.ENOSPC, 2)
    assert client.create_exclusive("commits/x", b"void") is True
    assert left() == 0
    assert os.listdir(tmp_path / "commits") == ["x"]


def test_what_nfs_keeps_of_an_open_file_is_no_part_of_a_listing_or_a_push(tmp_path: Path) -> None:
    for place in ("d", "only"):
        (tmp_path / place).mkdir()
        (tmp_path / place / SILLY).write_bytes(b"x")
    (tmp_path / "d/x").write_bytes(b"x")
    (tmp_path / "d/.nfs-notes").write_bytes(b"a name of the user's own")
    client = NfsBackend(str(tmp_path))
    assert sorted(e.key for e in client.list("d")) == ["d/.nfs-notes", "d/x"]
    found = scan(tmp_path)
    assert [f.path for f in found.files] == ["d/.nfs-notes", "d/x"]
    assert found.empty_directories == ["only"]
    with pytest.raises(UsageError, match="NFS"):
        check_new_path(f"d/{SILLY}")
    client.remove_tree("d")
    assert not (tmp_path / "d").exists()
