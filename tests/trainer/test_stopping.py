"""When a training is asked to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ckptstore.errors import UsageError
from trainer.config import TrainerConfig
from trainer.stopping import SIGNALS, StopRequest, deadline

AT = 1_800_000_000.0


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put the handlers of signals back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_leaves_a_wish(number: signal.Signals) -> None:
    stop = StopRequest(TrainerConfig())
    assert not stop.wanted()
    os.kill(os.getpid(), number)
    assert stop.wanted()
    assert stop.reason == f"{number.name} came"
    assert stop.wanted(), "it stays"


def test_the_first_reason_counts() -> None:
    stop = StopRequest(TrainerConfig())
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wanted()
    assert stop.reason == "SIGUSR1 came"


def test_signals_can_be_left_alone() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    StopRequest(TrainerConfig(save_on_signal=False))
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_it_stops_before_the_time_that_expires_at_gives() -> None:
    now = [AT - 121]
    config = TrainerConfig(expires_at="1800000000", expires_margin=120, save_on_signal=False)
    stop = StopRequest(config, lambda: now[0])
    assert not stop.wanted()
    now[0] += 1
    assert stop.wanted()
    assert stop.reason is not None
    assert "expires_at" in stop.reason


@pytest.mark.parametrize(
    "text",
    [
        "1800000000",
        "1800000000.0",
        "2027-01-15T08:00:00+00:00",
        "2027-01-15T08:00:00Z",
        "2027-01-15T09:00:00+01:00",
        "THE_END",
    ],
)
def test_how_a_time_is_written(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_END", "1800000000")
    assert deadline(TrainerConfig(expires_at=text)) == AT


def test_no_time_is_no_deadline() -> None:
    assert deadline(TrainerConfig()) is None


def test_what_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THE_END", raising=False)
    with pytest.raises(UsageError, match="THE_END is no time"):
        deadline(TrainerConfig(expires_at="THE_END"))
    monkeypatch.setenv("THE_END", "soon")
    with pytest.raises(UsageError, match="THE_END is no time"):
        deadline(TrainerConfig(expires_at="THE_END"))
