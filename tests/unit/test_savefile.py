from __future__ import annotations

import array
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import NoSpaceError, UsageError
from ckptstore.hashing import BLOCK_SIZE, block_digest
from ckptstore.manifest import FileEntry
from ckptstore.savefile import SaveFile
from tests.unit.support import (
    RUN,
    attempt,
    content,
    examples,
    file_store,
    memory_store,
    read_tree,
)
from tests.unit.test_mover import Target

FILLER = random.Random(5).randbytes(1 << 20) * 34


def opened(target: Target) -> tuple[SaveFile, list[tuple[FileEntry, int]]]:
    completed: list[tuple[FileEntry, int]] = []
    return (
        SaveFile(
            target,
            "f",
            executable=False,
            complete=lambda e, n: completed.append((e, n)),
            given_up=lambda path: None,
        ),
        completed,
    )


@examples(100)
@given(st.lists(st.binary(max_size=30), max_size=10))
def test_what_was_written_in_pieces_arrives_whole(pieces: list[bytes]) -> None:
    target = Target()
    f, completed = opened(target)
    for piece in pieces:
        before = f.tell()
        assert f.write(piece) == len(piece)
        assert f.tell() == before + len(piece)
    f.close()
    whole = b"".join(pieces)
    assert target.data == whole
    blocks = [block_digest(whole)] if whole else []
    assert completed == [(FileEntry.build("f", len(whole), blocks), len(whole))]


@pytest.mark.parametrize("piece", [1 << 20, 7_000_001, BLOCK_SIZE, len(FILLER)])
def test_blocks_are_cut_at_16_mib_however_the_pieces_fall(piece: int) -> None:
    target = Target()
    f, completed = opened(target)
    for start in range(0, len(FILLER), piece):
        f.write(FILLER[start : start + piece])
    f.close()
    assert target.order == [0, BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert target.data == FILLER
    expected = [block_digest(FILLER[i : i + BLOCK_SIZE]) for i in range(0, len(FILLER), BLOCK_SIZE)]
    assert list(completed[0][0].blocks) == expected


def test_a_file_of_exactly_one_block_has_one_block() -> None:
    f, completed = opened(Target())
    f.write(bytes(BLOCK_SIZE))
    f.close()
    assert len(completed[0][0].blocks) == 1


def test_any_buffer_counts_in_bytes() -> None:
    target = Target()
    f, _ = opened(target)
    numbers = array.array("d", [1.0, 2.0])
    assert f.write(numbers) == 16
    assert f.write(bytearray(b"xy")) == 2
    assert f.write(memoryview(b"z")) == 1
    f.close()
    assert target.data == numbers.tobytes() + b"xyz"


def test_a_buffer_that_is_reused_after_the_write_does_not_change_what_was_written() -> None:
    target = Target()
    f, _ = opened(target)
    buffer = bytearray(b"first")
    f.write(buffer)
    buffer[:] = b"later"
    f.close()
    assert target.data == b"first"


def test_it_is_a_file_object_for_writing_only() -> None:
    f, _ = opened(Target())
    assert f.writable()
    assert not f.readable()
    assert not f.seekable()
    f.close()


def test_closing_twice_completes_once_and_writing_afterwards_is_refused() -> None:
    f, completed = opened(Target())
    f.close()
    f.close()
    assert len(completed) == 1
    with pytest.raises(ValueError, match="closed"):
        f.write(b"x")


def half_written(f: SaveFile) -> None:
    with f:
        f.write(b"half")
        raise RuntimeError("mine")


def test_leaving_the_block_by_an_exception_gives_the_file_up() -> None:
    target = Target()
    f, completed = opened(target)
    with pytest.raises(RuntimeError, match="mine"):
        half_written(f)
    assert completed == []
    assert target.aborted
    assert target.finished is None
    assert f.closed


def test_forgetting_the_file_gives_it_up() -> None:
    target = Target()
    f, completed = opened(target)
    f.write(b"half")
    del f
    assert completed == []
    assert target.aborted


def test_an_error_of_the_storage_on_closing_gives_the_file_up() -> None:
    class Full(Target):
        def finish(self, size: int) -> None:
            raise NoSpaceError("full")

    target = Full()
    f, completed = opened(target)
    f.write(b"x")
    with pytest.raises(NoSpaceError):
        f.close()
    assert completed == []
    assert target.aborted
    assert f.closed


def test_an_exception_while_a_file_is_written_makes_the_save_leave_nothing(
    tmp_path: Path,
) -> None:
    store = file_store(tmp_path)
    with pytest.raises(RuntimeError, match="mine"):
        attempt(store.save(RUN, 1), lambda one: half_written(one.open("f")))
    assert store.list(RUN) == []
    assert [k for k in read_tree(tmp_path) if "/f" in k or ".ckpt-tmp" in k] == []


def test_a_file_that_was_given_up_can_be_written_again_in_the_same_save(tmp_path: Path) -> None:
    for store in (memory_store(), file_store(tmp_path)):
        with store.save(RUN, 1) as one:
            with pytest.raises(RuntimeError, match="mine"):
                half_written(one.open("f"))
            with one.open("f") as f:
                f.write(b"whole")
        assert content(store.get(RUN, step=1)) == {"f": b"whole"}


def test_a_save_with_a_file_that_is_still_open_is_not_committed() -> None:
    store = memory_store()
    files: list[SaveFile] = []
    with pytest.raises(UsageError, match="open"):
        attempt(store.save(RUN, 1), lambda one: files.append(one.open("f")))
    files[0].give_up()
    assert store.list(RUN) == []


def test_files_can_be_written_side_by_side() -> None:
    store = memory_store()
    with store.save(RUN, 1) as one, one.open("a") as a, one.open("b") as b:
        for i in range(5):
            a.write(b"a%d" % i)
            b.write(b"b%d" % i)
    assert content(store.get(RUN, step=1)) == {"a": b"a0a1a2a3a4", "b": b"b0b1b2b3b4"}


def test_a_client_that_still_holds_a_view_of_what_it_has_sent_is_no_error() -> None:
    class Holding(Target):
        def write(self, offset: int, data: memoryview) -> None:
            super().write(offset, data)
            self.held = data[:10]

    target = Holding()
    f, completed = opened(target)
    f.write(FILLER)
    f.close()
    assert target.data == FILLER
    assert len(completed) == 1
