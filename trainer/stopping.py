"""When to end before the last step: a signal, a time, or a step that was asked for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime
from types import FrameType

from ckptstore.errors import UsageError
from trainer.config import TrainerConfig

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A wish to stop that a signal or the clock leaves, and that training looks at.

    A signal handler can do no more than leave a note; all ranks agree on it where it is safe to.

    Args:
        config: Says what counts.
        now: The clock, in seconds since the epoch.

    Attributes:
        reason: Why to stop; ``None`` while there is no reason.
    """

    def __init__(self, config: TrainerConfig, now: Callable[[], float] = time.time) -> None:
        self.reason: str | None = None
        self._now = now
        self._deadline = deadline(config)
        self._margin = config.expires_margin
        if config.save_on_signal and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.reason = self.reason or f"{signal.Signals(number).name} came"

    def wanted(self) -> bool:
        """Whether this rank wants to stop."""
        if self._deadline is not None and self._now() >= self._deadline - self._margin:
            self.reason = self.reason or "the time that trainer.expires_at gives is near"
        return self.reason is not None


def deadline(config: TrainerConfig) -> float | None:
    """``trainer.expires_at`` in seconds since the epoch.

    Raises:
        UsageError: it is neither a time nor a variable with one.
    """
    text = config.expires_at
    if text is None:
        return None
    text = os.environ.get(text, text)
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(
            f"trainer.expires_at={config.expires_at} is no time and no environment variable with "
            "one",
            hint="as in 2027-01-31T18:00:00+00:00, 1801418400, or SLURM_JOB_END_TIME",
        ) from None
