"""The time between a signal and the end that a scheduler grants."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trainer.stopping import StopRequest

_POLL = 0.2
"""Seconds between looks at what a signal has left."""

_SHARE = 0.9
"""Of the grace: when it is this far gone, it is said what a kill would leave."""


class GraceWatch:
    """Says, while a step is still under way after a signal, which checkpoint stands.

    Args:
        stop: Where the wish to stop is left.
        seconds: The grace.
        last: Names the last checkpoint.
        say: Tells a person.
    """

    def __init__(
        self, stop: StopRequest, seconds: float, last: Callable[[], str], say: Callable[[str], None]
    ) -> None:
        self._stop = stop
        self._seconds = seconds
        self._last = last
        self._say = say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainer-grace", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._stop.reason is None:
            if self._ended.wait(_POLL):
                return
        if not self._ended.wait(self._seconds * _SHARE):
            self._say(
                f"{self._stop.reason}, and the step outlasts trainer.grace_seconds="
                f"{self._seconds:g}: if this process is killed now, {self._last()}"
            )

    def close(self) -> None:
        """Say nothing any more."""
        self._ended.set()
        self._thread.join()
