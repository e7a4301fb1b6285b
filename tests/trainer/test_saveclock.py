"""Which steps are saved."""

from __future__ import annotations

import pytest

from trainer.config import TrainerConfig
from trainer.saveclock import SaveClock


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def saved(config: TrainerConfig, steps: int, per_epoch: int = 4) -> list[int]:
    clock = SaveClock(config, per_epoch, Clock())
    return [step for step in range(1, steps + 1) if clock.is_due(step)]


@pytest.mark.parametrize(
    ("freq", "epochs", "expected"),
    [
        (3, -1, [3, 6, 9, 12]),
        (-1, -1, []),
        (-1, 1, [4, 8, 12]),
        (-1, 2, [8]),
        (3, 2, [3, 6, 8, 9, 12]),
        (1, 1, list(range(1, 13))),
    ],
)
def test_by_step_and_by_epoch(freq: int, epochs: int, expected: list[int]) -> None:
    assert saved(TrainerConfig(save_freq=freq, save_every_epochs=epochs), 12) == expected


def test_by_time_since_the_last_save_began() -> None:
    now = Clock()
    clock = SaveClock(TrainerConfig(save_freq=-1, save_every_minutes=0.5), 4, now)
    now.now += 29
    assert not clock.is_due(1)
    now.now += 1
    assert clock.is_due(2)
    assert clock.is_due(2), "asking changes nothing"
    clock.saved()
    assert not clock.is_due(3)
    now.now += 30
    assert clock.is_due(4)


def test_a_save_for_another_reason_counts_for_the_time() -> None:
    now = Clock()
    clock = SaveClock(TrainerConfig(save_freq=5, save_every_minutes=1), 4, now)
    now.now += 50
    assert clock.is_due(5)
    clock.saved()
    now.now += 50
    assert not clock.is_due(6)
    now.now += 10
    assert clock.is_due(7)
