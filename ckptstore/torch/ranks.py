"""The ranks of a process group agreeing with one another, errors included.

Every method is a collective: all ranks of the group call it, in the same order. What goes wrong on
one rank is raised on all of them, with the rank's number and host, so that nobody waits for a rank
that has given up.
"""

from __future__ import annotations

import copy
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from ckptstore.errors import CkptError

T = TypeVar("T")


@dataclass
class _Answer(Generic[T]):
    """What one rank's call came to."""

    value: T | None = None
    error: BaseException | None = None
    host: str = ""


class Ranks:
    """A process group, or this process alone.

    Args:
        group: The group; its backend must be able to send objects from host memory (gloo).
            ``None`` means this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0, which begins and commits saves."""
        return self.rank == 0

    def on_coordinator(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 and give its result to all.

        Raises:
            CkptError: what it raised there (an error of another kind becomes one).
        """
        answer = _call(function) if self.is_coordinator else _Answer[T]()
        if self._group is not None:
            answer, packed = _packed(answer)
            box = [packed]
            source = dist.get_global_rank(self._group, 0)
            with _reaching():
                dist.broadcast_object_list(box, src=source, group=self._group)
            if not self.is_coordinator:
                answer = _unpacked(box[0])
        if answer.error is not None:
            raise self._failure(0, answer)
        return answer.value  # type: ignore[return-value]

    def everywhere(self, function: Callable[[], T]) -> list[T]:
        """Call ``function`` on every rank and give all results to all, by rank.

        Raises:
            CkptError: what it raised on the lowest rank where it failed.
        """
        if self._group is None:
            return self._values([_call(function)])
        _, packed = _packed(_call(function))
        boxes = [b""] * self.size
        with _reaching():
            dist.all_gather_object(boxes, packed, group=self._group)
        return self._values([_unpacked(box) for box in boxes])

    def gathered(self, function: Callable[[], T]) -> list[T] | None:
        """Call ``function`` on every rank and give all results to rank 0 only.

        Raises:
            CkptError: on every rank, what it raised on the lowest rank where it failed.
        """
        if self._group is None:
            return self._values([_call(function)])
        _, packed = _packed(_call(function))
        target = dist.get_global_rank(self._group, 0)
        boxes = [b""] * self.size if self.is_coordinator else None
        with _reaching():
            dist.gather_object(packed, boxes, dst=target, group=self._group)
        answers: list[_Answer[T]] = [_unpacked(box) for box in boxes or []]
        values = self.on_coordinator(lambda: _Hidden(self._values(answers)))
        return values.value

    def scattered(self, function: Callable[[], list[T]]) -> T:
        """Call ``function`` on rank 0 and give each rank its own element of the result.

        Raises:
            CkptError: on every rank, what it raised there.
        """
        if self._group is None:
            return function()[0]
        source = dist.get_global_rank(self._group, 0)
        boxes: list[bytes] | None = None
        if self.is_coordinator:
            answer = _call(function)
            if answer.error is None:
                boxes = [_packed(_Answer(v, None, answer.host))[1] for v in answer.value or []]
            else:
                boxes = [_packed(answer)[1]] * self.size
        box = [b""]
        with _reaching():
            dist.scatter_object_list(box, boxes, src=source, group=self._group)
        mine: _Answer[T] = _unpacked(box[0])
        if mine.error is not None:
            raise self._failure(0, mine)
        return mine.value  # type: ignore[return-value]

    def all(self, value: bool) -> bool:
        """Whether ``value`` is true on every rank."""
        return all(self.everywhere(lambda: value))

    def _values(self, answers: list[_Answer[T]]) -> list[T]:
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                raise self._failure(rank, answer)
        return [answer.value for answer in answers]  # type: ignore[misc]

    def _failure(self, rank: int, answer: _Answer[Any]) -> BaseException:
        error = answer.error
        assert error is not None
        if self.size == 1:
            return error
        where = f"rank {rank} on {answer.host}"
        if not isinstance(error, CkptError):
            error = CkptError(f"{type(error).__name__}: {error}")
        told = copy.copy(error)
        if not told.on_all_ranks:
            told.args = (f"{where}: {error}",)
            told.on_all_ranks = True
        return told


class _Hidden(Generic[T]):
    """A value that stays on the rank it is on: sending it sends nothing."""

    def __init__(self, value: T | None) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, tuple[None]]:
        return _Hidden, (None,)


@contextmanager
def _reaching() -> Iterator[None]:
    """Say what it means when the ranks do not reach one another."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CkptError(
            f"the ranks do not reach one another: {reason}",
            hint="has one of them ended? its own output says why",
        ) from error


def _packed(answer: _Answer[T]) -> tuple[_Answer[T], bytes]:
    """An answer, and the bytes to send; what cannot be sent becomes an error that can.

    It is packed before any rank sends: an error while sending would leave the others waiting.
    """
    try:
        return answer, pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 - whatever a foreign object does
        failed = _Answer[T](None, _sendable(error), answer.host)
        return failed, pickle.dumps(failed)


def _unpacked(data: bytes) -> _Answer[Any]:
    answer: _Answer[Any] = pickle.loads(data)  # noqa: S301 - from a rank of this job
    return answer


def _call(function: Callable[[], T]) -> _Answer[T]:
    host = socket.gethostname()
    try:
        return _Answer(function(), None, host)
    except Exception as error:  # noqa: BLE001 - raised on every rank
        return _Answer(None, _sendable(error), host)


def _sendable(error: Exception) -> BaseException:
    """``error`` if it survives being sent to another process, else its text as one that does."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - whatever a foreign exception does
        return CkptError(f"{type(error).__name__}: {error}")
    return error
