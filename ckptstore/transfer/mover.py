"""The engine that moves bytes: parallel over files and over blocks, hashing in passing.

Memory is one block (16 MiB) a thread, whatever the size of the files: each worker takes the next
block of the next file, reads it into its own buffer, hashes it there, compares the digest with what
it must be where that is known, and writes it out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ckptstore.backends.base import Reader, Writer
from ckptstore.errors import (
    CancelledError,
    Damage,
    IntegrityError,
    NotFoundError,
    SourceChangedError,
    printable,
)
from ckptstore.hashing import (
    BLOCK_SIZE,
    block_count,
    block_digest,
    block_range,
    zero_block_digest,
)
from ckptstore.manifest import FileEntry

ProgressCallback = Callable[[int], None]
"""Called with the number of bytes just done; never from two threads at once."""


class OnMismatch(Enum):
    """What to do when a block is not what it must be."""

    RAISE = "raise"
    """Stop everything with an :class:`IntegrityError`: the default for whatever is copied."""

    COLLECT = "collect"
    """Note it and go on: verification."""

    STOP = "stop"
    """Note it and read no more of this file: is it the same or not?"""


@dataclass(frozen=True)
class Transfer:
    """One file to move, or only to read.

    Attributes:
        path: Its path in the checkpoint.
        size: Bytes.
        open_reader: Opens the source.
        open_writer: Opens the target; ``None`` to read and hash only.
        expected: What it must be, where that is known.
        executable: The exec bit of the entry that results.
        sequential: The target takes its blocks front to back only.
        partial: Opens what an interrupted transfer left of the target; its good blocks are kept.
            Needs ``expected``.
        only: The blocks to move, when not all are wanted; then no entry results.
    """

    path: str
    size: int
    open_reader: Callable[[], Reader]
    open_writer: Callable[[], Writer] | None = None
    expected: FileEntry | None = None
    executable: bool = False
    sequential: bool = False
    partial: Callable[[], Reader] | None = None
    only: Sequence[int] | None = None

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks to move."""
        return range(block_count(self.size)) if self.only is None else self.only


@dataclass(frozen=True)
class Moved:
    """The outcome of a transfer.

    Attributes:
        path: Its path in the checkpoint.
        entry: What was read; ``None`` when not all of it was.
        damage: Where it is not what it must be.
        written: Bytes that went to the target; not those that it held already.
    """

    path: str
    entry: FileEntry | None
    damage: tuple[Damage, ...]
    written: int


def default_threads() -> int:
    """``CKPT_THREADS``, or one a core: at least 2, at most 8 (each has a buffer of 16 MiB)."""
    text = os.environ.get("CKPT_THREADS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    return max(2, min(8, len(os.sched_getaffinity(0))))


class Mover:
    """Moves files.

    Args:
        threads: How many blocks are in flight at once; 0 or ``None`` is :func:`default_threads`.
        progress: Told of every block.
        cancel: Set it from any thread to end the work with :class:`CancelledError`.
        stop: Set it to end the work so after the files that have been begun.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.threads = threads or default_threads()
        self._progress = progress
        self._cancel = cancel or threading.Event()
        self._stop = stop or threading.Event()
        self._progress_lock = threading.Lock()

    def run(
        self,
        transfers: Sequence[Transfer],
        on_mismatch: OnMismatch = OnMismatch.RAISE,
        *,
        done: Callable[[Moved], None] | None = None,
    ) -> list[Moved]:
        """Do all of them.

        Args:
            transfers: What to do.
            on_mismatch: What to do about a block that is not what it must be.
            done: Told of each file that is complete, from the thread that completed it.

        On the first error (and on an interrupt) the others end, targets that are not complete are
        given up, and the error is raised; complete targets stay.

        Returns:
            The outcomes, in the order of ``transfers``.

        Raises:
            IntegrityError: with ``RAISE``: something read is not what it must be.
            CancelledError: ``cancel`` was set, or ``stop`` before the last file was begun.
            CkptError: reading or writing failed.
        """
        files = [_File(t, on_mismatch, self._advance, done) for t in transfers]
        work = _Work(files, self._cancel, self._stop)
        count = min(self.threads, sum(max(1, len(t.blocks)) for t in transfers))
        try:
            if count <= 1:
                work.loop()
            else:
                self._run_threads(work, count)
        finally:
            for file in files:
                file.close()
        if work.error is not None:
            raise work.error
        return [file.result() for file in files]

    @staticmethod
    def _run_threads(work: _Work, count: int) -> None:
        workers = [
            threading.Thread(target=work.loop, name=f"ckptstore-mover-{i}") for i in range(count)
        ]
        started: list[threading.Thread] = []
        try:
            for worker in workers:
                started.append(worker)
                worker.start()
            for worker in workers:
                worker.join()
        except BaseException:  # an interrupt: end the workers before going on with it
            work.stop()
            for worker in started:
                if worker.ident is not None:
                    worker.join()
            raise

    def _advance(self, count: int) -> None:
        if self._progress is not None:
            with self._progress_lock:
                self._progress(count)


class _Work:
    """The queue that the workers share."""

    def __init__(
        self, files: Sequence[_File], cancel: threading.Event, stop: threading.Event
    ) -> None:
        self._jobs = self._all_jobs(files, stop)
        self._largest = max((min(f.transfer.size, BLOCK_SIZE) for f in files), default=0)
        self._cancel = cancel
        self._lock = threading.Lock()
        self._stopped = False
        self.error: BaseException | None = None

    def _all_jobs(
        self, files: Sequence[_File], stop: threading.Event
    ) -> Iterator[tuple[_File, Sequence[int]]]:
        for file in files:
            if stop.is_set():
                self.error = self.error or CancelledError("stopped before the next file")
                return
            blocks = file.transfer.blocks
            if not blocks or file.transfer.sequential:
                yield file, blocks
            else:
                for index in blocks:
                    yield file, (index,)

    def loop(self) -> None:
        """Take jobs until there are none; the first error ends all workers."""
        buffer = memoryview(bytearray(self._largest))
        while True:
            with self._lock:
                job = None if self._stopped else next(self._jobs, None)
            if job is None:
                return
            file, indices = job
            try:
                for index in indices:
                    if self._cancel.is_set():
                        raise CancelledError("cancelled")
                    if self._stopped:
                        return
                    file.move(index, buffer)
                file.done(len(indices))
            except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
                with self._lock:
                    if self.error is None:
                        self.error = error
                self.stop()
                return

    def stop(self) -> None:
        """Give out no more jobs."""
        self._stopped = True


class _File:
    """A transfer under way."""

    def __init__(
        self,
        transfer: Transfer,
        on_mismatch: OnMismatch,
        advance: ProgressCallback,
        completed: Callable[[Moved], None] | None,
    ) -> None:
        self.transfer = transfer
        self.blocks: list[str | None] = [None] * block_count(transfer.size)
        self._on_mismatch = on_mismatch
        self._advance = advance
        self._completed = completed
        self._lock = threading.Lock()
        self._left = len(transfer.blocks)
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._partial: Reader | None = None
        self._opened = False
        self._skip = False
        self._damage: list[Damage] = []
        self._written = 0
        self._crc64nvme: str | None = None

    def _open(self) -> None:
        with self._lock:
            if self._opened:
                return
            self._opened = True  # also when it fails: the first error ends the whole transfer
            transfer = self.transfer
            try:
                self._reader = transfer.open_reader()
            except (NotFoundError, IntegrityError) as error:
                reason = "missing" if isinstance(error, NotFoundError) else str(error)
                self._unusable(reason, error)
            else:
                size = self._reader.size
                if size != transfer.size:
                    self._unusable(f"size is {size}, must be {transfer.size}", None)
            if not self._skip and transfer.partial is not None:
                self._partial = transfer.partial()
            if not self._skip and transfer.open_writer is not None:
                self._writer = transfer.open_writer()

    def _unusable(self, reason: str, error: BaseException | None) -> None:
        """The source as a whole is not what it must be."""
        damage = Damage(self.transfer.path, 0, 0, reason)
        if self.transfer.expected is None and error is not None:
            raise error
        if self._on_mismatch is OnMismatch.RAISE:
            raise IntegrityError(f"damaged: {damage}", damage=(damage,)) from error
        self._damage.append(damage)
        self._skip = True

    def move(self, index: int, buffer: memoryview) -> None:
        """Move one block."""
        self._open()
        offset, length = block_range(index, self.transfer.size)
        if self._skip or self._reader is None:
            return
        view = buffer[:length]
        if self._has(index, offset, view):
            self._advance(length)
            return
        there = self._reader.view(offset, length)
        if there is not None:
            view = there
        elif not self._read(offset, view):
            return
        digest = block_digest(view)
        self.blocks[index] = digest
        expected = self.transfer.expected
        if expected is not None and digest != expected.blocks[index]:
            self._mismatch(offset, length, "content differs")
        elif self._writer is not None:
            self._write(offset, view, digest)
        self._advance(length)

    def _read(self, offset: int, view: memoryview) -> bool:
        """Fill ``view``; whether that could be done."""
        assert self._reader is not None
        try:
            count = self._reader.read_into(offset, view)
        except IntegrityError as error:
            self._mismatch(offset, len(view), str(error))
            return False
        if count != len(view):
            self._short(offset, len(view))
            return False
        return True

    def _has(self, index: int, offset: int, view: memoryview) -> bool:
        """Whether the target holds this block already."""
        if self._partial is None or self.transfer.expected is None:
            return False
        wanted = self.transfer.expected.blocks[index]
        found = self._partial.read_into(offset, view) == len(view) and block_digest(view) == wanted
        if found:
            self.blocks[index] = wanted
        return found

    def _write(self, offset: int, view: memoryview, digest: str) -> None:
        assert self._writer is not None
        if self._writer.kept(offset, view):
            return
        whole_zeros = len(view) == BLOCK_SIZE and digest == zero_block_digest()
        if not (whole_zeros and self._writer.skip_zeros(offset, len(view))):
            self._writer.write(offset, view)
        with self._lock:
            self._written += len(view)

    def _mismatch(self, offset: int, length: int, reason: str) -> None:
        damage = Damage(self.transfer.path, offset, length, reason)
        if self._on_mismatch is OnMismatch.RAISE:
            raise IntegrityError(f"damaged: {damage}", damage=(damage,))
        with self._lock:
            self._damage.append(damage)
        if self._on_mismatch is OnMismatch.STOP:
            self._skip = True

    def _short(self, offset: int, length: int) -> None:
        if self.transfer.expected is None:
            raise SourceChangedError(
                f"{printable(self.transfer.path)} became shorter while it was read",
                hint="push a directory that nothing writes to any more",
            )
        self._mismatch(offset, length, "ends early")

    def done(self, count: int) -> None:
        """``count`` more blocks are done; after the last one the file is finished."""
        self._open()  # an empty file has no block that would open it
        with self._lock:
            self._left -= count
            if self._left > 0:
                return
        if self._reader is not None and not self._skip:
            self._reader.check_unchanged()
        if self._writer is not None and not self._skip:
            self._writer.finish(self.transfer.size)
            self._crc64nvme = self._writer.crc64nvme
            self._writer = None
        self.close()
        if self._completed is not None:
            self._completed(self.result())

    def close(self) -> None:
        """Let go of everything; an unfinished target is given up."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        for reader in (self._reader, self._partial):
            if reader is not None:
                reader.close()

    def result(self) -> Moved:
        """The outcome."""
        transfer = self.transfer
        blocks = [b for b in self.blocks if b is not None]
        entry = None
        if len(blocks) == len(self.blocks) and not self._skip:
            entry = FileEntry.build(
                transfer.path,
                transfer.size,
                blocks,
                executable=transfer.executable,
                crc64nvme=self._crc64nvme,
            )
        damage = tuple(sorted(self._damage, key=lambda d: d.offset))
        return Moved(transfer.path, entry, damage, self._written)
