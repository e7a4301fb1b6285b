"""How a training ends: at its last step, at a step, a time or a signal, or shut out by another."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from tests.cli.support import ckpt
from tests.conftest import FULL
from tests.trainer.support import Lab, Training, stop_in_a_save, until

Make = Callable[..., Training]


def test_the_last_step_is_saved_whatever_save_freq_says(training: Make) -> None:
    never = training("never", "trainer.save_freq=-1", "trainer.total_steps=3")
    never.run().ok("ended at step 3 of 3")
    assert never.steps() == [3]
    exact = training("exact", "trainer.save_freq=2", "trainer.total_steps=4")
    exact.run().ok()
    assert exact.steps() == [2, 4], "not twice"


def test_epochs_are_counted_to_their_end(training: Make, lab: Lab) -> None:
    """24 samples in batches of 7: three steps an epoch, and what is left over is left out."""
    one = training(
        *("one", f"data.train_files=[{lab.few}]", "data.batch_size=7", "trainer.save_freq=-1"),
        *("trainer.save_every_epochs=1", "trainer.total_epochs=3", "trainer.total_steps=null"),
    )
    one.run("trainer.stop_at_step=6").ok("ended at step 6 of 9")
    one.run().ok("ended at step 9 of 9")
    assert one.steps() == [3, 6, 9]
    assert [line["data/epoch"] for line in one.lines()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_saves_by_time(training: Make) -> None:
    often = training("often", "trainer.save_freq=-1", "trainer.save_every_minutes=1e-4")
    often.run("trainer.total_steps=3").ok()
    assert often.steps() == [1, 2, 3]
    seldom = training("seldom", "trainer.save_freq=-1", "trainer.save_every_minutes=60")
    seldom.run("trainer.total_steps=3").ok()
    assert seldom.steps() == [3]


def test_a_run_in_slices_is_as_one_in_one_piece(training: Make, whole: Make) -> None:
    settings = (
        *("actor.optim.schedule=cosine", "actor.optim.warmup_steps=2", "actor.mini_batch_size=6"),
        *("critic.optim.schedule=linear", "trainer.save_freq=-1", "trainer.total_steps=6"),
    )
    sliced = training("sliced", *settings)
    for stop in (1, 4, 10):
        sliced.run(f"trainer.stop_at_step={stop}").ok(f"ended at step {min(stop, 6)} of 6")
    assert sliced.steps() == [1, 4, 6]
    sliced.same_as(whole(*settings), 6)
    assert len({line["actor/lr"] for line in sliced.lines()}) == 6


@pytest.mark.parametrize("form", ["seconds", "iso", "variable"] if FULL else ["variable"])
def test_it_ends_before_the_time_that_expires_at_gives(training: Make, form: str) -> None:
    one = training("one", "trainer.total_steps=10000", "trainer.save_freq=-1")
    end = time.time() + 63
    text = {
        "seconds": str(int(end)),
        "iso": (datetime.now(UTC) + timedelta(seconds=63)).isoformat(),
        "variable": "THE_END",
    }[form]
    margin = "trainer.expires_margin=60"
    ended = one.run(f"trainer.expires_at={text}", margin, env={"THE_END": str(end)})
    ended.ok("the time that trainer.expires_at gives is near")
    assert one.steps() == [line["step"] for line in one.lines()][-1:]


# Signals


def gated(lab: Lab) -> tuple[str, ...]:
    return (
        f"reward.function={lab.rewards}:noisy",
        "actor.mini_batch_size=6",
        "trainer.total_steps=5",
        "trainer.save_freq=2",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1] if FULL else [signal.SIGTERM])
def test_a_signal_in_a_rollout_abandons_the_step(
    training: Make, whole: Make, lab: Lab, number: signal.Signals
) -> None:
    """In the fourth step, after the reward function has drawn from the generators."""
    one = training("one", *gated(lab))
    running = one.start(env={"GATE": "40:"})
    until((one.directory / "reached").exists, "the gate")
    running.send(number)
    (one.directory / "go").touch()
    running.wait().ok(f"{number.name} came: saving step 3 and ending", "ended at step 3 of 5")
    assert one.steps() == [2, 3]
    assert [line["step"] for line in one.lines()] == [1, 2, 3]
    one.run().ok("resumed from step 3")
    one.same_as(whole(*gated(lab)), 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1] if FULL else [signal.SIGUSR1])
def test_a_signal_in_an_update_ends_after_the_step(
    training: Make, whole: Make, lab: Lab, number: signal.Signals
) -> None:
    """A step has four updates, two of the critic and two of the actor: it is in the third step."""
    one = training("one", *gated(lab))
    one.run(env={"SIGNAL_AT_UPDATE": f"11:{number.name}"}).ok(f"{number.name} came: saving step 3")
    assert one.steps() == [2, 3]
    one.run().ok("resumed from step 3")
    one.same_as(whole(*gated(lab)), 5)


def test_a_signal_in_a_validation_keeps_the_step(training: Make, whole: Make, lab: Lab) -> None:
    one = training(
        *("one", *gated(lab), f"data.val_files=[{lab.few}]", "trainer.test_freq=3"),
        "data.val_batch_size=5",
    )
    running = one.start(env={"GATE": "7:write"})
    until((one.directory / "reached").exists, "the gate")
    running.send(signal.SIGTERM)
    (one.directory / "go").touch()
    running.wait().ok("SIGTERM came: saving step 3")
    assert [line["step"] for line in one.lines()] == [1, 2, 3]
    assert one.steps() == [2, 3]
    one.run().ok("resumed from step 3")
    one.same_as(whole(*gated(lab)), 5)


def test_a_signal_before_the_first_step(training: Make, lab: Lab) -> None:
    one = training(
        *("one", *gated(lab), f"data.val_files=[{lab.few}]", "trainer.val_before_train=true"),
        "trainer.test_freq=3",
    )
    running = one.start(env={"GATE": "2:"})
    until((one.directory / "reached").exists, "the gate")
    running.send(signal.SIGTERM)
    (one.directory / "go").touch()
    running.wait().ok("ended at step 0 of 5")
    assert one.lines() == []
    assert ckpt("list", one.directory / "store", "--json").ok().json == []
    one.run("trainer.stop_at_step=1").ok("starting from scratch")


def test_signals_can_be_left_to_the_default(training: Make) -> None:
    one = training("one", "trainer.save_on_signal=false", "trainer.total_steps=500")
    running = one.start()
    one.wait_for_step(1, running)
    running.send(signal.SIGTERM)
    assert running.wait().code == -signal.SIGTERM


def test_all_ranks_end_at_the_same_step_when_one_is_told(training: Make) -> None:
    one = training("one", "trainer.total_steps=500", "trainer.save_freq=-1")
    ranks = one.start_ranks(2)
    one.wait_for_step(2, *ranks)
    ranks[1].send(signal.SIGUSR1)
    ranks[0].wait().ok("SIGUSR1 came: saving step")
    ranks[1].wait().ok()
    assert one.steps() == [line["step"] for line in one.lines()][-1:]


# Two lives


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_older_of_two_lives_commits_nothing(
    training: Make, whole: Make, background: str
) -> None:
    settings = ("actor.mini_batch_size=6", "trainer.total_steps=5", "trainer.save_freq=2")
    one = training("one", *settings)
    older = one.start(f"storage.async_save={background}", "trainer.total_steps=500")
    stop_in_a_save(one, older)
    one.run().ok("ended at step 5 of 5")
    before = one.steps()
    older.send(signal.SIGCONT)
    older.wait().failed(6, "life 2 of run 'run' began", "commits nothing any more", "hint:")
    assert one.steps() == before
    assert before[-1] == 5
    one.same_as(whole(*settings), 5)
    ckpt("verify", one.directory / "store", "--deep").ok()
