"""The conformance suite on a real disk, and what only a file system can do wrong."""

from __future__ import annotations

import errno
import os
import stat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends.base import Backend
from ckptstore.backends.local import LocalBackend
from ckptstore.errors import CkptError, IntegrityError, TemporaryError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.testing.conformance import RACERS, BackendConformance


class TestFile(BackendConformance):
    """A directory on a disk."""

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> Backend:
        return LocalBackend(str(self.root))

    def raw_write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_read(self, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.exists() else None

    def test_processes_race_for_a_key(self) -> None:
        context = get_context("fork")
        with context.Pool(RACERS) as pool:
            won = pool.map(_create, [(str(self.root), i) for i in range(RACERS)], chunksize=1)
        assert won.count(True) == 1
        assert self.raw_read("commits/x.json") == str(won.index(True)).encode()

    def test_a_sparse_file_over_4_gib_stays_sparse(self) -> None:
        size = 4 * 1024**3 + BLOCK_SIZE + 7
        backend = self.make()
        writer = backend.open_writer("d/big")
        writer.write(size - 7, memoryview(b"the end"))
        assert writer.skip_zeros(0, BLOCK_SIZE)
        writer.finish(size)
        reader = backend.open_reader("d/big")
        assert reader.size == size
        buffer = bytearray(20)
        assert reader.read_into(size - 10, memoryview(buffer)) == 10
        assert buffer[:10] == b"\0\0\0the end"
        reader.close()
        assert (self.root / "d/big").stat().st_blocks * 512 < BLOCK_SIZE
        entry = backend.stat("d/big")
        assert entry is not None
        assert entry.size == size

    def test_stored_files_are_read_only_and_a_link_shares_them(self) -> None:
        backend = self.make()
        for key, executable in (("d/x", False), ("d/run", True)):
            writer = backend.open_writer(key, executable=executable)
            writer.write(0, memoryview(b"x"))
            writer.finish(1)
            mode = stat.S_IMODE((self.root / key).stat().st_mode)
            assert mode & 0o222 == 0
            assert bool(mode & 0o100) is executable
        how = backend.copy("d/x", "e/x")
        assert how in ("link", "reflink")
        same = (self.root / "d/x").stat().st_ino == (self.root / "e/x").stat().st_ino
        assert same is (how == "link")

    def test_what_is_replaced_lives_on_under_its_other_name(self) -> None:
        backend = LocalBackend(str(self.root), dedupe="link")
        writer = backend.open_writer("d/x")
        writer.write(0, memoryview(b"old"))
        writer.finish(3)
        assert backend.copy("d/x", "e/x") == "link"
        for key, resume in (("d/x", False), ("d/x", True)):
            writer = backend.open_writer(key, size=3, replace=True, resume=resume)
            writer.write(0, memoryview(b"new"))
            writer.finish(3)
            assert self.raw_read("d/x") == b"new"
            assert self.raw_read("e/x") == b"old"
            assert stat.S_IMODE((self.root / "d/x").stat().st_mode) & 0o222 == 0

    def test_a_stored_file_is_never_taken_up(self) -> None:
        """Its name may be left under a temporary one, as by a restored backup of the directory."""
        backend = self.make()
        writer = backend.open_writer("d/x", size=4, resume=True)
        writer.write(0, memoryview(b"good"))
        writer.abort()
        (temporary,) = (self.root / "d").iterdir()
        os.link(temporary, self.root / "stored")
        writer = backend.open_writer("d/x", size=4, resume=True)
        writer.write(0, memoryview(b"evil"))
        writer.finish(4)
        assert self.raw_read("d/x") == b"evil"
        assert self.raw_read("stored") == b"good"
        os.unlink(temporary)
        temporary.symlink_to(self.root / "stored")
        backend.open_writer("d/x", size=4, resume=True).write(0, memoryview(b"evil"))
        assert self.raw_read("stored") == b"good"

    def test_a_half_file_that_took_the_name_of_a_whole_one_is_not_shown(self) -> None:
        backend = self.make()
        one = backend.open_writer("d/x", size=4, resume=True)
        one.write(0, memoryview(b"good"))
        (temporary,) = (self.root / "d").iterdir()
        temporary.unlink()  # as gc does with what is old
        two = backend.open_writer("d/x", size=4, resume=True)
        two.write(0, memoryview(b"go"))
        with pytest.raises(TemporaryError):
            one.finish(4)
        one.abort()
        assert self.raw_read("d/x") is None
        two.write(2, memoryview(b"od"))
        two.finish(4)
        assert self.raw_read("d/x") == b"good"

    def test_what_the_disk_refused_is_not_taken_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory may still hold it, and then it reads well until the power is cut."""

        def refuse(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        writer = self.make().open_writer("d/x", size=4, resume=True)
        writer.write(0, memoryview(b"good"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            with pytest.raises(CkptError):
                writer.finish(4)
        writer.abort()
        writer = self.make().open_writer("d/x", size=4, resume=True)
        assert not writer.kept(0, memoryview(b"good"))
        writer.abort()

    def test_holes_stay_holes_in_a_resumed_file(self) -> None:
        size = 3 * BLOCK_SIZE
        zeros = memoryview(bytes(BLOCK_SIZE))
        writer = self.make().open_writer("d/x", size=size, resume=True)
        assert writer.skip_zeros(0, BLOCK_SIZE)
        writer.write(BLOCK_SIZE, memoryview(b"a" * BLOCK_SIZE))
        writer.abort()
        writer = self.make().open_writer("d/x", size=size, resume=True)
        assert writer.kept(0, zeros)
        assert not writer.kept(BLOCK_SIZE, zeros)
        assert not writer.skip_zeros(BLOCK_SIZE, BLOCK_SIZE)  # something else lies there
        assert not writer.kept(2 * BLOCK_SIZE, zeros)
        assert writer.skip_zeros(2 * BLOCK_SIZE, BLOCK_SIZE)
        writer.write(BLOCK_SIZE, zeros)
        writer.finish(size)
        assert self.raw_read("d/x") == bytes(size)
        assert (self.root / "d/x").stat().st_blocks * 512 < 2 * BLOCK_SIZE

    def test_without_links_the_exec_bit_decides(self) -> None:
        backend = LocalBackend(str(self.root), dedupe="link")
        writer = backend.open_writer("d/x")
        writer.finish(0)
        assert backend.copy("d/x", "e/x", executable=True) is None
        assert not (self.root / "e/x").exists()
        assert LocalBackend(str(self.root), dedupe="none").copy("d/x", "e/x") is None

    def test_a_file_system_without_links_gets_an_exclusive_copy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_link(*_: object, **__: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_link)
        backend = self.make()
        assert backend.create_exclusive("commits/x", b"one") is True
        assert backend.create_exclusive("commits/x", b"two") is False
        assert self.raw_read("commits/x") == b"one"
        writer = backend.open_writer("d/x")
        writer.write(0, memoryview(b"data"))
        writer.finish(4)
        assert self.raw_read("d/x") == b"data"
        assert [e.key for e in backend.list("d")] == ["d/x"]
        assert backend.copy("d/x", "e/x") is None

    def test_symbolic_links_are_not_followed(self, tmp_path: Path) -> None:
        secret = tmp_path / "outside"
        secret.write_bytes(b"secret")
        root = tmp_path / "store"
        (root / "d").mkdir(parents=True)
        (root / "d/x").symlink_to(secret)
        backend = LocalBackend(str(root))
        assert backend.stat("d/x") is None
        assert [(e.key, e.size) for e in backend.list("d")] == [("d/x", -1)]
        with pytest.raises(IntegrityError):
            backend.read("d/x", 100)
        with pytest.raises(IntegrityError):
            backend.open_reader("d/x")
        backend.remove_tree("d")
        assert secret.read_bytes() == b"secret"


def _create(args: tuple[str, int]) -> Any:
    root, index = args
    return LocalBackend(root).create_exclusive("commits/x.json", str(index).encode())
