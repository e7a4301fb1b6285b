"""A training that was killed goes on as if nothing had happened: bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FULL
from tests.trainer.support import ENVIRONMENT, Lab, Running, Training, chances, free_port, until

Make = Callable[..., Training]

TWO_UPDATES = ("actor.mini_batch_size=6",)


def rich(lab: Lab) -> tuple[str, ...]:
    """All that a resume must bring back: orders, generators, schedules, several updates a step."""
    return (
        f"data.train_files=[{lab.few}]",
        "data.batch_size=8",
        "rollout.n=2",
        "actor.mini_batch_size=8",
        "actor.micro_batch_size=3",
        "actor.epochs=2",
        "actor.entropy_coef=0.01",
        "actor.kl_loss_coef=0.1",
        "actor.optim.schedule=cosine",
        "actor.optim.warmup_steps=3",
        "critic.warmup_steps=1",
        "algorithm.kl_controller=adaptive",
        "algorithm.kl_horizon=100",
        f"reward.function={lab.rewards}:noisy",
        "trainer.total_steps=8",
        "trainer.save_freq=3",
    )


def with_validation(lab: Lab) -> tuple[str, ...]:
    return (
        *rich(lab),
        f"data.val_files=[{lab.few}]",
        "data.val_batch_size=10",
        "rollout.val_temperature=0.7",
        "trainer.test_freq=3",
        "trainer.val_before_train=true",
        "storage.best_metric=val/reward:max",
    )


@pytest.mark.parametrize("background", ["true", "false"])
def test_after_a_kill_every_bit_is_the_same(training: Make, whole: Make, background: str) -> None:
    killed = training("killed", *TWO_UPDATES, f"storage.async_save={background}")
    chance = chances(int(background == "true"))
    killed.killed(chance.randint(6, 8), chance.uniform(0, 0.2))
    killed.run().ok("resumed from step 5")
    killed.same_as(whole(*TWO_UPDATES), 12)
    assert {line["life"] for line in killed.lines()} == {1, 2}


def test_orders_generators_schedules_and_controllers_come_back(
    training: Make, whole: Make, lab: Lab
) -> None:
    """Epochs end after the steps 3 and 6; the reward draws from every global generator."""
    killed = training("killed", *rich(lab))
    for after in (3, 5) if not FULL else (3, 4, 5, 6):
        killed.killed(after, 0.05)
    killed.run().ok("resumed from step")
    uninterrupted = whole(*rich(lab))
    killed.same_as(uninterrupted, 8)
    facts = uninterrupted.facts()
    assert [f["data/epoch"] for f in facts] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert len({f["kl/coef"] for f in facts}) > 4, "the controller adapts, else this shows nothing"
    rates = [f["actor/lr"] for f in facts if "actor/lr" in f]
    assert len(set(rates)) == len(rates) == 7


def test_a_validation_changes_nothing(training: Make, whole: Make, lab: Lab) -> None:
    """Also not the generators that its rewards draw from."""
    validated = training("validated", *with_validation(lab))
    validated.run().ok()
    without = whole(*rich(lab)).facts()
    assert [line for line in validated.facts("val/") if line["step"] > 0] == without
    measured = [line["step"] for line in validated.lines() if "val/reward" in line]
    assert measured == [0, 3, 6]

    killed = training("killed", *with_validation(lab))
    killed.killed(6, 0.05)
    killed.run().ok("resumed from step")
    assert killed.facts() == validated.facts()


def test_a_run_that_is_killed_again_and_again(training: Make, whole: Make) -> None:
    """Every third time at any moment of its start, else after it has done a step more."""
    settings = (*TWO_UPDATES, "trainer.save_freq=2")
    killed = training("killed", *settings)
    chance = chances(11)
    for life in range(30 if FULL else 5):
        done = max((line["step"] for line in killed.lines()), default=0)
        running = killed.start()
        if life % 3 != 2:
            killed.wait_for_step(min(done + 1, 11), running)
        wait(running, chance.uniform(0, 0.4))
        running.kill()
    killed.run().ok()
    killed.same_as(whole(*settings), 12)
    assert max(line["life"] for line in killed.lines()) > 3


def wait(running: Running, seconds: float) -> None:
    """Let it run on for a while."""
    end = time.monotonic() + seconds
    until(lambda: running.poll() is not None or time.monotonic() > end, "time")


# Several ranks


def test_two_ranks_after_a_kill_of_all_or_of_one(training: Make) -> None:
    settings = (*TWO_UPDATES, "trainer.total_steps=8", "trainer.save_freq=3")
    uninterrupted = training("whole", *settings)
    for ended in uninterrupted.run_ranks(2):
        ended.ok()
    killed = training("killed", *settings)
    for after, victims in ((4, (0, 1)), (6, (1,))):
        ranks = killed.start_ranks(2)
        killed.wait_for_step(after, *ranks)
        for victim in victims:
            ranks[victim].send(signal.SIGKILL)
        for number, rank in enumerate(ranks):
            if number in victims:
                assert rank.wait().code == -signal.SIGKILL
            else:
                rank.wait().failed(8, "has lost another rank", "the same command again goes on")
    for ended in killed.run_ranks(2):
        ended.ok()
    killed.same_as(uninterrupted, 8)


def test_torchrun(training: Make, lab: Lab) -> None:
    """The command that people use, killed as a whole."""
    killed = training("killed", "trainer.total_steps=6", "trainer.save_freq=2")

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
                *("--master-port", str(free_port()), "-m", "trainer"),
                *(*lab.base(), *killed.settings),
            ],
            cwd=killed.directory,
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start()
    try:
        until(lambda: len(killed.lines()) >= 3 or first.poll() is not None, "step 3")
    finally:
        # Its ranks are in sessions of their own, and would go on without it.
        ranks = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        for pid in [*map(int, ranks), first.pid]:
            os.kill(pid, signal.SIGKILL)
        assert first.stderr is not None
        first.stderr.close()
        assert first.wait() == -signal.SIGKILL
    second = start()
    _, said = second.communicate(timeout=150)
    assert second.returncode == 0, said
    assert "resumed from step 2" in said or "resumed from step 4" in said
    whole = training("whole", *killed.settings)
    for ended in whole.run_ranks(2):
        ended.ok()
    killed.same_as(whole, 6)


def test_another_number_of_ranks(training: Make, whole: Make) -> None:
    """2, then 1, then 3 ranks: the state is the same to the last bit, what follows nearly."""
    settings = ("actor.mini_batch_size=6", "actor.optim.schedule=cosine", "trainer.total_steps=8")
    changing = training("changing", *settings)
    for ended in changing.run_ranks(2, "trainer.stop_at_step=3"):
        ended.ok()
    for before, ranks, stop in ((2, 1, 5), (1, 3, 8), (3, 2, 8)):
        saved = changing.lines()[-1]
        ends = changing.run_ranks(ranks, f"trainer.stop_at_step={stop}")
        assert all(rank.ok() for rank in ends)
        ends[0].ok(
            f"saved by {before} ranks, loaded by {ranks}",
            f"digest/actor {saved['digest/actor']} digest/critic {saved['digest/critic']}",
        )
    by_step = {line["step"]: line for line in whole(*settings).lines()}
    assert [line["step"] for line in changing.lines()] == sorted(by_step)
    for line in changing.lines():
        alone = by_step[line["step"]]
        for key in ("actor/loss", "critic/loss", "reward/mean", "kl/mean"):
            assert line[key] == pytest.approx(alone[key], abs=1e-5)
        assert line["actor/lr"] == alone["actor/lr"]
