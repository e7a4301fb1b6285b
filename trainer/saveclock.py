"""Which steps a run saves."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.config import TrainerConfig


class SaveClock:
    """Which steps are saved.

    Args:
        config: Says so.
        steps_per_epoch: Steps in an epoch.
        now: A clock, in seconds.
    """

    def __init__(
        self,
        config: TrainerConfig,
        steps_per_epoch: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._steps_per_epoch = steps_per_epoch
        self._now = now
        self._saved = now()

    def is_due(self, step: int) -> bool:
        """Whether the end of this step is to be saved."""
        config = self._config
        every = config.save_freq
        epochs = config.save_every_epochs * self._steps_per_epoch
        seconds = config.save_every_minutes * 60
        return (
            (every > 0 and step % every == 0)
            or (epochs > 0 and step % epochs == 0)
            or (seconds > 0 and self._now() - self._saved >= seconds)
        )

    def saved(self) -> None:
        """A save has begun."""
        self._saved = self._now()
