"""Calls that must end: into a client that may wait for a silent server for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class DeadlinePassed(Exception):  # noqa: N818 - it is told to our own code only
    """The call has not returned in time. Nobody knows whether it ever will."""


class _Job(Generic[T]):
    """A call, and what became of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        assert self._function is not None
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
            self._error = error
        self._function = None
        self._done.set()

    def wait(self, seconds: float) -> T:
        if not self._done.wait(seconds):
            raise DeadlinePassed
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        result, self._result = self._result, None
        return result  # type: ignore[return-value] # None only where T allows it


class Caller:
    """Runs calls in threads of its own and waits for each no longer than it may take.

    A call that is late is left to its thread, which ends with the process: it may still be carried
    out. Several threads may call at once, also in a child after a fork.
    """

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self._process = os.getpid()
        self._idle: list[SimpleQueue[_Job[Any] | None]] = []

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """What ``function`` returns or raises.

        Raises:
            DeadlinePassed: it has not returned within ``seconds``.
        """
        if os.getpid() != self._process:
            self._start_anew()  # threads do not survive a fork
        job = _Job(function)
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            threading.Thread(
                target=self._work, args=(inbox, self._idle), name="ckptstore-call", daemon=True
            ).start()
        inbox.put(job)
        return job.wait(seconds)

    @staticmethod
    def _work(
        inbox: SimpleQueue[_Job[Any] | None], idle: list[SimpleQueue[_Job[Any] | None]]
    ) -> None:
        while (job := inbox.get()) is not None:
            job.run()
            del job  # it may hold a buffer
            idle.append(inbox)

    def close(self) -> None:
        """End the threads that wait for work."""
        while self._idle:
            self._idle.pop().put(None)
