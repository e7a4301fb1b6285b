"""Memory does not grow with a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import ckptstore
from benchmarks.harness import peak_megabytes
from ckptstore.hashing import BLOCK_SIZE

CKPT = Path(sys.executable).parent / "ckpt"
LIMIT_MB = 300
SIZE = 8 * 1024**3


@pytest.mark.timeout(600)
def test_one_file_of_8_gib_is_pushed_verified_and_pulled_in_little_memory(tmp_path: Path) -> None:
    """Sparse, with data at its ends; it stays sparse in the store and in what is pulled."""
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "big").open("wb") as f:
        f.write(os.urandom(1000))
        f.truncate(SIZE - 1000)
        f.seek(0, os.SEEK_END)
        f.write(os.urandom(1000))
    ref, pulled = f"{tmp_path}/store/r@1", tmp_path / "pulled"
    assert peak_megabytes([CKPT, "push", tree, ref]) < LIMIT_MB
    assert peak_megabytes([CKPT, "pull", ref, pulled]) < LIMIT_MB
    status = (pulled / "big").stat()
    assert status.st_size == SIZE
    assert status.st_blocks * 512 <= 3 * BLOCK_SIZE
    for offset in (0, SIZE - 1000):
        with (tree / "big").open("rb") as a, (pulled / "big").open("rb") as b:
            a.seek(offset)
            b.seek(offset)
            assert a.read(1000) == b.read(1000)


@pytest.mark.timeout(600)
def test_reading_a_part_of_a_large_file_reads_only_its_blocks(tmp_path: Path) -> None:
    size = 4 * 1024**3 + 17
    with (tmp_path / "big").open("wb") as f:
        f.truncate(size)
        f.seek(size - 5)
        f.write(b"hello")
    store = ckptstore.open_store(str(tmp_path / "store"))
    with store.save("r", 1) as save:
        save.add_file("big", tmp_path / "big")
    checkpoint = store.get("r", step=1)
    with checkpoint.open("big") as f:
        f.seek(-5, os.SEEK_END)
        assert f.read() == b"hello"
        f.seek(2 * 1024**3)
        assert f.read(3) == b"\0\0\0"
