"""Old checkpoints go while a training runs; what matters stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptstore import mirrors, open_store
from tests.cli.support import ckpt
from tests.trainer.support import Lab, Training
from tests.trainer.test_storage_trouble import (
    FULL_DISK,
    GATE,
    elsewhere,
    fill_up,
    mount,
    stopped_at_step_3,
    unmount,
)

Make = Callable[..., Training]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A small file system: room for six checkpoints."""
    point = tmp_path / "small"
    mount(point)
    yield point
    unmount(point)


def directories(training: Training) -> int:
    """How many checkpoints take space, recorded or not."""
    return len(training.store.catalog.directories("run"))


def test_the_last_ones_stay_also_after_a_rollback(training: Make) -> None:
    one = training("one", "trainer.total_steps=8", "trainer.save_freq=2", "storage.keep_last=2")
    one.run("trainer.stop_at_step=6").ok()
    assert one.steps() == [4, 6]
    newest = one.commits()[-1].name
    first, second = one.run_ranks(2, "trainer.resume_mode=4")
    first.ok("resumed from step 4")
    second.ok()
    assert one.steps() == [6, 8]
    assert one.commits()[0].name != newest, "the new step 6 is the newer one"
    assert directories(one) == 2
    ckpt("verify", one.directory / "store", "--deep").ok()


def test_the_best_of_an_earlier_life_stays(training: Make, tmp_path: Path) -> None:
    """Best 0.9, a restart, then 0.1."""
    rewards = tmp_path / "fixed.py"
    rewards.write_text(
        "import os\n\n"
        "def fixed(prompt, response, answer):\n"
        "    return float(os.environ['REWARD'])\n"
    )
    one = training(
        *("one", f"reward.function={rewards}:fixed", "storage.best_metric=reward/mean:max"),
        *("trainer.save_freq=2", "trainer.total_steps=8", "storage.keep_last=1"),
    )
    one.run("trainer.stop_at_step=2", env={"REWARD": "0.9"}).ok()
    one.run("storage.keep_best=1", env={"REWARD": "0.1"}).ok("resumed from step 2")
    assert one.steps() == [2, 8]
    assert [c.metrics["reward/mean"] for c in one.commits()] == pytest.approx([0.9, 0.1])


def test_the_run_that_was_started_from_is_not_touched(half_done: Training) -> None:
    started = ("storage.run=other", "trainer.resume_from=run@4", "storage.keep_last=1")
    half_done.run(*started, "trainer.save_freq=2", "storage.max_size=1kB").ok()
    assert half_done.steps("other") == [8]
    assert half_done.steps() == [2, 4, 6]


def test_a_failed_save_deletes_nothing(lab: Lab, tmp_path: Path, small: Path) -> None:
    """Keeping one: it stays until the next one is there."""
    one = elsewhere(lab, tmp_path / "one", small / "store", "storage.keep_last=1")
    running = one.start(env=GATE)
    go_on = stopped_at_step_3(one)
    fill_up(small)
    go_on()
    running.wait().failed(8, "step 4 of run was not saved", FULL_DISK)
    assert one.steps() == [2]
    ckpt("verify", small / "store", "--deep").ok()


def test_a_mirror_that_is_down_does_not_fill_the_disk(
    lab: Lab, tmp_path: Path, small: Path
) -> None:
    """What it lacks is held back while there is room; a save that finds none goes on, loudly."""
    store = open_store(str(small / "store"))
    store.create()
    mirrors.expect_mirror(store.catalog, "/nowhere/mirror")
    one = elsewhere(lab, tmp_path / "one", small / "store", "storage.keep_last=2")
    ended = one.run("trainer.save_freq=1")
    ended.ok("the disk was full", "goes although /nowhere/mirror lacks it", "ended at step 9 of 9")
    assert one.steps()[-2:] == [8, 9]
    assert len(one.steps()) < 7
    ckpt("verify", small / "store", "--deep").ok()
