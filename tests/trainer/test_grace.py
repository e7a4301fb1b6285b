"""What is said when a step outlasts the time that a scheduler grants."""

from __future__ import annotations

import time

from trainer.config import TrainerConfig
from trainer.grace import GraceWatch
from trainer.stopping import StopRequest


def watched(reason: str | None, grace: float, pause: float) -> list[str]:
    """What a watch says within a time."""
    said: list[str] = []
    stop = StopRequest(TrainerConfig(save_on_signal=False))
    stop.reason = reason
    watch = GraceWatch(stop, grace, lambda: "step 5 stands", said.append)
    time.sleep(pause)
    watch.close()
    return said


def test_the_last_checkpoint_is_named_when_the_grace_is_nearly_over() -> None:
    (said,) = watched("SIGTERM came", 0.2, 0.6)
    assert "SIGTERM came" in said
    assert "step 5 stands" in said


def test_nothing_is_said_without_a_signal_or_in_good_time() -> None:
    assert watched(None, 0.05, 0.4) == []
    assert watched("SIGTERM came", 60.0, 0.3) == []
