"""The part of the suite that every backend must pass that is about replacing and resuming.

Part of :class:`ckptstore.testing.conformance.BackendConformance`, which says how to use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress

import pytest

from ckptstore.backends.base import Backend, Writer
from ckptstore.errors import ConflictError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import is_temporary


class WritingConformance(ABC):
    """What a test is told of the storage, and what a writer that replaces or resumes promises."""

    @abstractmethod
    def make(self) -> Backend:
        """A backend on the storage of this test: another client each time it is called."""

    @abstractmethod
    def raw_write(self, key: str, data: bytes) -> None:
        """Write an object behind the backend's back."""

    @abstractmethod
    def raw_read(self, key: str) -> bytes | None:
        """Read an object behind the backend's back; ``None`` when there is none."""

    def settle(self, backend: Backend, key: str) -> None:  # noqa: B027 - most need nothing
        """Called between writing a file and looking for it behind the backend's back.

        Nothing to do where the file shows to everybody at once. Where other clients see it only
        after ``sync``, as the contract allows: call that.
        """

    def resumes(self, backend: Backend) -> bool:
        """Whether an interrupted object is taken up here; some servers of a kind cannot do it."""
        return backend.capabilities.resumes

    @pytest.mark.parametrize("size", [6, BLOCK_SIZE + 5])
    def test_a_replacing_object_takes_the_place_of_what_is_there(
        self, backend: Backend, size: int
    ) -> None:
        """All at once when it is finished; also of nothing."""
        self.raw_write("d/x", b"damaged")
        data = b"n" * size
        for key, before in (("d/x", b"damaged"), ("d/y", None)):
            writer = backend.open_writer(key, size=size, replace=True)
            _send(writer, data)
            assert self.raw_read(key) == before
            writer.finish(size)
            writer.abort()
            self.settle(backend, key)
            assert self.raw_read(key) == data
        assert {e.key for e in backend.list("d", recursive=True)} == {"d/x", "d/y"}

    def test_a_replacing_object_that_is_given_up_changes_nothing(self, backend: Backend) -> None:
        """What is damaged is still the only one."""
        self.raw_write("d/x", b"damaged")
        writer = backend.open_writer("d/x", size=3, replace=True)
        writer.write(0, memoryview(b"new"))
        writer.abort()
        assert self.raw_read("d/x") == b"damaged"
        assert [e.key for e in backend.list("d", recursive=True)] == ["d/x"]

    # Resuming inside an object

    @pytest.mark.parametrize("replace", [False, True])
    def test_an_interrupted_object_is_taken_up(self, backend: Backend, replace: bool) -> None:
        """Whole blocks that are there are not sent again, not even by another client."""
        data = bytes(BLOCK_SIZE) + b"a" * BLOCK_SIZE + b"end"
        if replace:
            self.raw_write("d/x", b"damaged")
        writer = backend.open_writer("d/x", size=len(data), resume=True, replace=replace)
        assert _send(writer, data[: 2 * BLOCK_SIZE]) == [0, BLOCK_SIZE]
        writer.abort()
        writer.abort()
        assert self.raw_read("d/x") == (b"damaged" if replace else None)
        listed = {e.key for e in backend.list("d", recursive=True)} - {"d/x"}
        assert all(is_temporary(key) for key in listed)
        other = self.make()
        writer = other.open_writer("d/x", size=len(data), resume=True, replace=replace)
        sent = _send(writer, data)
        assert sent == ([] if self.resumes(backend) else [0, BLOCK_SIZE]) + [2 * BLOCK_SIZE]
        writer.finish(len(data))
        writer.abort()
        other.close()
        self.settle(backend, "d/x")
        self._is_alone("d/x", data, backend)

    def test_what_lies_in_the_wrong_place_is_not_kept(self, backend: Backend) -> None:
        """Each block is compared; a hole is no place for what was there, nor the other way."""
        left = b"a" * BLOCK_SIZE + b"b" * BLOCK_SIZE + bytes(BLOCK_SIZE) + b"end"
        data = b"a" * BLOCK_SIZE + bytes(BLOCK_SIZE) + b"c" * BLOCK_SIZE + b"End"
        writer = backend.open_writer("d/x", size=len(data), resume=True)
        _send(writer, left)
        writer.abort()
        writer = backend.open_writer("d/x", size=len(data), resume=True)
        sent = _send(writer, data)
        assert (0 in sent) is not self.resumes(backend)
        assert set(sent) >= {BLOCK_SIZE, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE}
        writer.finish(len(data))
        writer.abort()
        self.settle(backend, "d/x")
        self._is_alone("d/x", data, backend)

    @pytest.mark.parametrize("replace", [False, True])
    @pytest.mark.parametrize("size", [5, 2 * BLOCK_SIZE + 5])
    def test_two_that_resume_the_same_do_no_harm(
        self, backend: Backend, size: int, replace: bool
    ) -> None:
        """Whoever finishes second is told so, unless nobody can know which of the two it was."""
        data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
        writers = [
            client.open_writer("d/x", size=size, resume=True, replace=replace)
            for client in (backend, self.make())
        ]
        _send(writers[0], data[:BLOCK_SIZE])
        _send(writers[1], data)
        writers[1].finish(size)
        self.settle(backend, "d/x")
        assert self.raw_read("d/x") == data
        with suppress(ConflictError):
            _send(writers[0], data[BLOCK_SIZE:], BLOCK_SIZE)
            writers[0].finish(size)
        for writer in writers:
            writer.abort()
        self._is_alone("d/x", data, backend)

    def test_a_resumed_object_never_replaces_another(self, backend: Backend) -> None:
        """What came first stays as it was."""
        self.raw_write("d/x", b"first")
        writer = backend.open_writer("d/x", size=6, resume=True)
        _send(writer, b"second")
        with pytest.raises(ConflictError):
            writer.finish(6)
        writer.abort()
        self._is_alone("d/x", b"first", backend)

    def _is_alone(self, key: str, data: bytes, backend: Backend) -> None:
        """The object is there, and nothing is left over of what led to it."""
        assert self.raw_read(key) == data
        directory = key.rpartition("/")[0]
        assert [e.key for e in backend.list(directory, recursive=True)] == [key]
        assert not list(backend.unfinished(directory))


def _send(writer: Writer, data: bytes, start: int = 0) -> list[int]:
    """Write what is not kept, as the mover does. Returns at which offsets."""
    sent: list[int] = []
    for at in range(0, len(data), BLOCK_SIZE):
        block = memoryview(data)[at : at + BLOCK_SIZE]
        if writer.kept(start + at, block):
            continue
        sent.append(start + at)
        if bytes(block).strip(b"\0") or not writer.skip_zeros(start + at, len(block)):
            writer.write(start + at, block)
    return sent
