from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.backends.base import Reader, Writer
from ckptstore.backends.localfile import LocalReader
from ckptstore.errors import (
    AccessDeniedError,
    CancelledError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    SourceChangedError,
    TemporaryError,
)
from ckptstore.hashing import BLOCK_SIZE, block_digest
from ckptstore.manifest import FileEntry
from ckptstore.transfer import Moved, Mover, OnMismatch, Transfer
from ckptstore.transfer.mover import default_threads
from tests.unit.support import examples

FILLER = random.Random(3).randbytes(1 << 20) * 16
BIG = b"a" + FILLER + b"b" + FILLER + b"tail"
"""Three blocks."""


class Source(Reader):
    """Bytes to read, that notes when it is closed."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data = data
        self.size = len(data) if size is None else size
        self.open = True

    def read_into(self, offset: int, buffer: memoryview) -> int:
        part = self.data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self.open = False


class Target(Writer):
    """Takes bytes, and notes how it ended."""

    def __init__(self, *, holes: bool = False) -> None:
        self.parts: dict[int, bytes] = {}
        self.order: list[int] = []
        self.holes = holes
        self.finished: int | None = None
        self.aborted = False
        self.lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        with self.lock:
            self.parts[offset] = bytes(data)
            self.order.append(offset)

    def skip_zeros(self, offset: int, length: int) -> bool:
        return self.holes

    def finish(self, size: int) -> None:
        assert self.finished is None
        self.finished = size

    def abort(self) -> None:
        if self.finished is None:
            self.aborted = True

    @property
    def data(self) -> bytes:
        joined = bytearray(self.finished or 0)
        for offset, part in self.parts.items():
            joined[offset : offset + len(part)] = part
        return bytes(joined)


def entry_of(data: bytes, path: str = "f") -> FileEntry:
    blocks = [block_digest(data[i : i + BLOCK_SIZE]) for i in range(0, len(data), BLOCK_SIZE)]
    return FileEntry.build(path, len(data), blocks)


def copy(data: bytes, target: Target, path: str = "f", *, expect: bytes | None = None) -> Transfer:
    return Transfer(
        path,
        len(data) if expect is None else len(expect),
        open_reader=lambda: Source(data),
        open_writer=lambda: target,
        expected=None if expect is None else entry_of(expect, path),
    )


def check(data: bytes, expect: bytes, path: str = "f") -> Transfer:
    return Transfer(
        path, len(expect), open_reader=lambda: Source(data), expected=entry_of(expect, path)
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, len(BIG)])
def test_a_file_arrives_whole_with_its_digests(threads: int, size: int) -> None:
    data, target = BIG[:size], Target()
    (moved,) = Mover(threads=threads).run([copy(data, target)])
    assert target.finished == size
    assert target.data == data
    assert moved == Moved("f", entry_of(data), (), size)


@examples(50)
@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(1, 4))
def test_outcomes_come_in_the_order_of_the_transfers(files: list[bytes], threads: int) -> None:
    targets = [Target() for _ in files]
    transfers = [copy(d, t, str(i)) for i, (d, t) in enumerate(zip(files, targets, strict=True))]
    moved = Mover(threads=threads).run(transfers)
    assert [m.entry for m in moved] == [entry_of(d, str(i)) for i, d in enumerate(files)]
    assert [t.data for t in targets] == files


def test_nothing_to_do_is_done() -> None:
    assert Mover().run([]) == []


def test_progress_adds_up_to_all_bytes_and_never_comes_from_two_threads_at_once() -> None:
    told: list[int] = []
    inside = threading.Lock()

    def progress(count: int) -> None:
        assert inside.acquire(blocking=False)
        told.append(count)
        inside.release()

    files = [BIG, b"", b"x" * 10]
    transfers = [copy(d, Target(), str(i)) for i, d in enumerate(files)]
    Mover(threads=4, progress=progress).run(transfers)
    assert sum(told) == sum(map(len, files))


def test_each_complete_file_is_told_of_once() -> None:
    told: list[str] = []
    transfers = [copy(d, Target(), str(i)) for i, d in enumerate([BIG, b"", b"x"])]
    Mover(threads=3).run(transfers, done=lambda m: told.append(m.path))
    assert sorted(told) == ["0", "1", "2"]


def test_a_sequential_target_takes_its_blocks_front_to_back() -> None:
    target = Target()
    transfer = Transfer(
        "f",
        len(BIG),
        open_reader=lambda: Source(BIG),
        open_writer=lambda: target,
        sequential=True,
    )
    Mover(threads=4).run([transfer])
    assert target.order == [0, BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert target.data == BIG


@pytest.mark.parametrize("holes", [False, True])
def test_a_block_of_zeros_is_skipped_only_where_the_target_reads_holes_as_zeros(
    holes: bool,
) -> None:
    data = b"a" * BLOCK_SIZE + bytes(BLOCK_SIZE) + bytes(10)
    target = Target(holes=holes)
    (moved,) = Mover(threads=1).run([copy(data, target)])
    assert target.data == data
    assert moved.entry == entry_of(data)
    assert (BLOCK_SIZE in target.parts) is not holes


@pytest.mark.parametrize("threads", [1, 3])
def test_what_the_target_has_already_is_not_written_or_counted(threads: int) -> None:
    class Holding(Target):
        def kept(self, offset: int, data: memoryview) -> bool:
            kept = offset != BLOCK_SIZE
            if kept:
                self.parts[offset] = bytes(data)  # what it holds is what it is asked about
            return kept

        def skip_zeros(self, offset: int, length: int) -> bool:
            raise AssertionError("what is kept, or is no zeros, is not skipped")

    target = Holding()
    data = bytes(BLOCK_SIZE) + BIG[:BLOCK_SIZE] + b"end"
    (moved,) = Mover(threads=threads).run([copy(data, target, expect=data)])
    assert target.order == [BLOCK_SIZE]
    assert target.data == data
    assert moved.written == BLOCK_SIZE
    assert moved.entry == entry_of(data)


def test_a_differing_block_stops_everything_and_names_its_range() -> None:
    bad = bytearray(BIG)
    bad[BLOCK_SIZE + 5] ^= 1
    target = Target()
    with pytest.raises(IntegrityError) as caught:
        Mover(threads=2).run([copy(bytes(bad), target, expect=BIG)])
    (damage,) = caught.value.damage
    assert (damage.offset, damage.length) == (BLOCK_SIZE, BLOCK_SIZE)
    assert damage.reason == "content differs"
    assert target.aborted
    assert target.finished is None


def test_verification_names_every_differing_block_in_order() -> None:
    bad = bytearray(BIG)
    bad[-1] ^= 1
    bad[0] ^= 1
    (moved,) = Mover(threads=3).run([check(bytes(bad), BIG)], OnMismatch.COLLECT)
    assert [(d.offset, d.length) for d in moved.damage] == [(0, BLOCK_SIZE), (2 * BLOCK_SIZE, 6)]


def test_a_comparison_stops_at_the_first_difference() -> None:
    read: list[int] = []

    class Counting(Source):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            read.append(offset)
            return super().read_into(offset, buffer)

    bad = b"x" + BIG[1:]
    transfer = Transfer("f", len(BIG), open_reader=lambda: Counting(bad), expected=entry_of(BIG))
    (moved,) = Mover(threads=1).run([transfer], OnMismatch.STOP)
    assert read == [0]
    assert moved.entry is None
    assert moved.damage


@pytest.mark.parametrize("data", [b"shorter", BIG + b"longer"])
@pytest.mark.parametrize("how", [OnMismatch.COLLECT, OnMismatch.STOP])
def test_another_size_is_damage_of_the_whole_file(data: bytes, how: OnMismatch) -> None:
    (moved,) = Mover().run([check(data, BIG)], how)
    assert moved.entry is None
    (damage,) = moved.damage
    assert (damage.offset, damage.length) == (0, 0)
    assert str(len(data)) in damage.reason


def missing() -> Reader:
    raise NotFoundError("gone")


def test_a_missing_file_is_damage_to_a_verification_and_no_end_of_it() -> None:
    gone = Transfer("g", 5, open_reader=missing, expected=entry_of(b"hello", "g"))
    first, second = Mover(threads=1).run([gone, check(b"x", b"x")], OnMismatch.COLLECT)
    assert [d.reason for d in first.damage] == ["missing"]
    assert second.entry is not None
    assert not second.damage


def test_a_missing_source_that_nothing_is_known_of_is_an_error() -> None:
    with pytest.raises(NotFoundError):
        Mover().run([Transfer("g", 5, open_reader=missing)], OnMismatch.COLLECT)


def test_a_source_that_ends_early_has_changed() -> None:
    target = Target()
    transfer = Transfer(
        "f", 10, open_reader=lambda: Source(b"short", 10), open_writer=lambda: target
    )
    with pytest.raises(SourceChangedError):
        Mover().run([transfer])
    assert target.aborted


def test_a_stored_file_that_ends_early_is_damaged() -> None:
    transfer = Transfer("f", 5, open_reader=lambda: Source(b"ab", 5), expected=entry_of(b"abcde"))
    (moved,) = Mover().run([transfer], OnMismatch.COLLECT)
    assert [d.reason for d in moved.damage] == ["ends early"]


def test_a_source_that_changed_while_it_was_read_is_not_completed() -> None:
    class Changing(Source):
        def check_unchanged(self) -> None:
            raise SourceChangedError("it changed")

    target = Target()
    transfer = Transfer("f", 1, open_reader=lambda: Changing(b"x"), open_writer=lambda: target)
    with pytest.raises(SourceChangedError):
        Mover().run([transfer])
    assert target.aborted


def failing_target(stage: str) -> tuple[Target, Callable[[], Writer]]:
    class Failing(Target):
        def write(self, offset: int, data: memoryview) -> None:
            if stage == "write":
                raise TemporaryError("write")
            super().write(offset, data)

        def finish(self, size: int) -> None:
            if stage == "finish":
                raise ConflictError("finish")
            super().finish(size)

    target = Failing()
    return target, lambda: target


@pytest.mark.parametrize("stage", ["write", "finish"])
@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_the_target_gives_it_up_and_closes_the_source(stage: str, threads: int) -> None:
    sources: list[Source] = []

    def opened() -> Reader:
        sources.append(Source(BIG))
        return sources[-1]

    target, opens = failing_target(stage)
    with pytest.raises((TemporaryError, ConflictError), match=stage):
        Mover(threads=threads).run([Transfer("f", len(BIG), opened, opens)])
    assert target.aborted
    assert sources
    assert not any(s.open for s in sources)


def test_after_an_error_complete_targets_stay_and_others_are_given_up() -> None:
    first, last = Target(), Target()
    _, opens = failing_target("write")
    transfers = [
        copy(b"one", first, "1"),
        Transfer("2", 3, lambda: Source(b"two"), opens),
        copy(b"three", last, "3"),
    ]
    with pytest.raises(TemporaryError):
        Mover(threads=1).run(transfers)
    assert first.finished == 3
    assert not first.aborted
    assert last.finished is None


@pytest.mark.parametrize("threads", [1, 3])
def test_cancelling_ends_the_work_and_gives_up_what_is_not_complete(threads: int) -> None:
    cancel = threading.Event()
    target = Target()
    mover = Mover(threads=threads, progress=lambda _: cancel.set(), cancel=cancel)
    with pytest.raises(CancelledError):
        mover.run([copy(BIG * 3, target)])
    assert target.finished is None
    assert target.aborted


def test_an_error_of_the_progress_callback_ends_the_work() -> None:
    def progress(_: int) -> None:
        raise KeyboardInterrupt

    target = Target()
    with pytest.raises(KeyboardInterrupt):
        Mover(threads=2, progress=progress).run([copy(BIG, target)])
    assert target.finished is None


def test_good_blocks_of_an_interrupted_transfer_are_kept() -> None:
    partial = bytearray(BIG)
    partial[BLOCK_SIZE] ^= 1
    target = Target()
    transfer = Transfer(
        "f",
        len(BIG),
        open_reader=lambda: Source(BIG),
        open_writer=lambda: target,
        expected=entry_of(BIG),
        partial=lambda: Source(bytes(partial)),
    )
    told: list[int] = []
    (moved,) = Mover(threads=2, progress=told.append).run([transfer])
    assert target.order == [BLOCK_SIZE]
    assert moved.written == BLOCK_SIZE
    assert moved.entry == entry_of(BIG)
    assert sum(told) == len(BIG)


def test_memory_is_one_block_a_thread() -> None:
    largest = 0

    class Watching(Source):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            nonlocal largest
            largest = max(largest, len(buffer))
            return super().read_into(offset, buffer)

    Mover(threads=1).run([Transfer("f", len(BIG), open_reader=lambda: Watching(BIG))])
    assert largest == BLOCK_SIZE


def test_threads_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_THREADS", "3")
    assert default_threads() == 3
    for text in ("0", "", "-1", "x"):
        monkeypatch.setenv("CKPT_THREADS", text)
        assert 2 <= default_threads() <= 8


def test_no_file_stays_open_when_the_target_of_many_blocks_cannot_be_opened(
    tmp_path: Path,
) -> None:
    source = tmp_path / "f"
    with source.open("wb") as f:
        f.truncate(8 * BLOCK_SIZE)
    opened: list[Reader] = []

    def open_reader() -> Reader:
        opened.append(LocalReader(str(source)))
        return opened[-1]

    def refuse() -> Writer:
        time.sleep(0.02)  # so that the other threads are at it too
        raise AccessDeniedError("read-only")

    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(AccessDeniedError, match="read-only"):
            Mover(threads=8).run([Transfer("f", 8 * BLOCK_SIZE, open_reader, refuse)])
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert len(opened) == 3


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_while_threads_are_started_ends_those_that_run(
    error: type[BaseException], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    class Slow(Source):
        def read_into(self, offset: int, buffer: memoryview) -> int:
            time.sleep(0.02)
            read.append(offset)
            return super().read_into(offset, buffer)

    start = threading.Thread.start
    begun: list[threading.Thread] = []

    def fails(thread: threading.Thread) -> None:
        last = len(begun) == 2
        if not last or when == "after":
            begun.append(thread)
            start(thread)
        if last:
            raise error("no more threads")

    transfers = [Transfer(str(i), 1, lambda: Slow(b"x"), Target) for i in range(40)]
    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(error, match="no more threads"):
        Mover(threads=4).run(transfers)
    assert len(begun) == (2 if when == "before" else 3)
    assert not any(thread.is_alive() for thread in begun)
    assert len(read) < 20
