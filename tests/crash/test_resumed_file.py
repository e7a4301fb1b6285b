"""A process that is killed in a large file costs the next one a block of it, not the file."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.backends import open_backend
from ckptstore.backends.localfile import LocalReader
from ckptstore.backends.s3 import checksums
from ckptstore.hashing import BLOCK_SIZE, block_digest
from ckptstore.layout import is_temporary
from ckptstore.manifest import FileEntry
from ckptstore.testing.kills import run_in_child
from ckptstore.transfer.mover import Moved, Mover, Transfer
from ckptstore.uri import StoreURI
from tests.servers.s3 import Bucket
from tests.servers.seaweed import SeaweedFS

SIZE = 4 * BLOCK_SIZE + 5
KEY = "run/00001-step-00000001-abcdefgh/w.bin"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


def copy(source: Path, uri: str) -> Moved:
    data = source.read_bytes()
    blocks = [block_digest(data[i : i + BLOCK_SIZE]) for i in range(0, SIZE, BLOCK_SIZE)]
    backend = open_backend(StoreURI.parse(uri))
    transfer = Transfer(
        "w.bin",
        SIZE,
        open_reader=lambda: LocalReader(str(source)),
        open_writer=lambda: backend.open_writer(KEY, size=SIZE, resume=True),
        expected=FileEntry.build("w.bin", SIZE, blocks),
    )
    (moved,) = Mover(threads=1).run([transfer])
    backend.close()
    return moved


def killed_in_the_third_block(source: Path, uri: str, arrange: Callable[[], None]) -> None:
    def work() -> None:
        arrange()
        copy(source, uri)

    status = run_in_child(work)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_on_a_disk(source: Path, tmp_path: Path) -> None:
    write = os.pwrite

    def half(fd: int, data: memoryview, offset: int) -> int:
        if offset == 2 * BLOCK_SIZE:
            write(fd, data[: BLOCK_SIZE // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, data, offset)

    def arrange() -> None:
        os.pwrite = half  # type: ignore[assignment]

    store = tmp_path / "store"
    killed_in_the_third_block(source, str(store), arrange)
    (left,) = (p for p in store.rglob("*") if p.is_file())
    assert is_temporary(left.name)
    assert copy(source, str(store)).written == SIZE - 2 * BLOCK_SIZE
    assert [p for p in store.rglob("*") if p.is_file()] == [store / KEY]
    assert (store / KEY).read_bytes() == source.read_bytes()


def test_in_a_bucket(source: Path, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket.make(seaweed, monkeypatch)

    class Broken(checksums.Body):
        """The third block, of which a half is sent."""

        blocks = 0

        def __init__(self, data: memoryview | bytes) -> None:
            super().__init__(data)
            Broken.blocks += len(data) == BLOCK_SIZE

        def read(self, size: int | None = -1) -> memoryview:
            if Broken.blocks == 3 and self.tell() >= BLOCK_SIZE // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(size)

    def arrange() -> None:
        checksums.Body = Broken  # type: ignore[misc]

    killed_in_the_third_block(source, bucket.uri(), arrange)
    backend = open_backend(StoreURI.parse(bucket.uri()))
    assert [u.key for u in backend.unfinished("run")] == [KEY]  # what gc looks for
    assert copy(source, bucket.uri()).written == SIZE - 2 * BLOCK_SIZE
    assert bucket.read(KEY) == source.read_bytes()
    assert not list(backend.unfinished("run"))
    backend.delete([KEY])

    killed_in_the_third_block(source, bucket.uri(), arrange)
    backend.discard_unfinished(backend.unfinished("run"))
    assert copy(source, bucket.uri()).written == SIZE
    assert bucket.read(KEY) == source.read_bytes()
    backend.close()
