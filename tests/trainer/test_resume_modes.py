"""What a training starts from: the ways to choose, and what damage makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.reading import Checkpoint
from tests.cli.support import ckpt
from tests.trainer.support import Training

Make = Callable[..., Training]

WEIGHTS = "actor/model/__0_0.distcp"


def damage(checkpoint: Checkpoint, path: str = WEIGHTS) -> None:
    """Flip a bit in the middle of a file."""
    root = checkpoint.path
    assert root is not None
    file = Path(root) / path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)


def told(training: Training, ref: str = "run@latest", *options: str) -> int | None:
    """The step that ``ckpt resume-info`` says a resume takes."""
    ran = ckpt("resume-info", f"{training.directory}/store/{ref}", "--json", *options)
    step: int | None = json.loads(ran.out)["step"]
    return step


def test_auto_takes_the_newest(half_done: Training) -> None:
    assert told(half_done) == 6
    name = half_done.commits()[-1].name
    half_done.run().ok(f"resumed from step 6: run@6 ({name}) in", "ended at step 8 of 8")
    assert half_done.steps() == [2, 4, 6, 8]
    assert [line["step"] for line in half_done.lines()] == list(range(1, 9))
    assert [line["life"] for line in half_done.lines()] == [1] * 6 + [2] * 2


def test_auto_and_none_start_from_scratch_and_say_why(training: Make, half_done: Training) -> None:
    new = training("new", "trainer.total_steps=2")
    new.run().ok("starting from scratch: no checkpoint yet of run run")
    half_done.run("trainer.resume_mode=none", "trainer.stop_at_step=1").ok(
        "starting from scratch: trainer.resume_mode=none"
    )
    assert half_done.steps() == [2, 4, 6, 1]
    assert [line["step"] for line in half_done.lines()] == [1]
    aside = half_done.metrics.with_name("metrics.discarded-2.jsonl")
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == [*range(1, 7)]


def test_the_newest_save_counts_and_not_the_highest_step(half_done: Training) -> None:
    half_done.run("trainer.resume_mode=2", "trainer.stop_at_step=3").ok("resumed from step 2")
    assert half_done.steps() == [2, 4, 6, 3]
    assert told(half_done) == 3
    half_done.run("trainer.stop_at_step=4").ok("resumed from step 3")


def test_latest_must_exist(training: Make, half_done: Training) -> None:
    mode = "trainer.resume_mode=latest"
    training("new").run(mode).failed(4, "trainer.resume_mode=latest, and run 'run' has no", "hint:")
    half_done.run(mode).ok("resumed from step 6")


def test_a_step_a_ref_and_a_uri(training: Make, half_done: Training) -> None:
    name = half_done.commits()[0].name
    for mode, step in (("4", 4), ("run@2", 2), (f"run@{name}", 2)):
        one = Training(half_done.lab, half_done.directory.parent / f"as-{step}{len(mode)}")
        shutil.copytree(half_done.directory, one.directory, dirs_exist_ok=True)
        one.run(f"trainer.resume_mode={mode}", f"trainer.stop_at_step={step + 1}").ok(
            f"resumed from step {step}"
        )
        assert [line["step"] for line in one.lines()] == list(range(1, step + 2))
    other = training("other", "trainer.total_steps=8")
    mode = f"trainer.resume_mode={half_done.directory}/store/run@4"
    other.run(mode, "trainer.stop_at_step=5").ok("resumed from step 4", str(half_done.directory))
    assert other.steps() == [5]
    # The other store's first line is what the first store's fifth was.
    (ours,), theirs = other.facts(), half_done.facts()[4]
    assert ours == theirs


@pytest.mark.parametrize("mode", ["3", "run@3", "other@latest", "/nowhere/store/run@latest"])
def test_what_is_named_and_missing(half_done: Training, mode: str) -> None:
    half_done.run(f"trainer.resume_mode={mode}").failed(4)
    assert half_done.steps() == [2, 4, 6]
    assert len(half_done.lines()) == 6


def test_another_run_is_used_only_while_there_is_no_own(
    training: Make, half_done: Training
) -> None:
    where = f"{half_done.directory}/store"
    for text, step in ((f"{where}/run", 6), (f"{where}/run@latest", 6), (f"{where}/run@2", 2)):
        name = f"branch{len(text)}"
        branch = training(name, "trainer.save_freq=-1", f"trainer.resume_from={text}")
        branch.settings.append("trainer.total_steps=8")
        branch.run(f"trainer.stop_at_step={step + 1}").ok(f"resumed from step {step}", where)
        branch.run().ok(f"resumed from step {step + 1}", f"{branch.directory}/store")
        assert branch.steps() == [step + 1, 8]
    own = Training(half_done.lab, half_done.directory, ["storage.run=branch"])
    own.run("trainer.resume_from=run@4", "trainer.stop_at_step=5").ok("resumed from step 4: run@4")
    own.run("trainer.resume_from=run@2", "trainer.stop_at_step=6").ok(
        "resumed from step 5: branch@5"
    )
    assert own.steps("branch") == [5, 6]
    assert own.steps("run") == [2, 4, 6]


def test_damage_means_the_next_older_one(half_done: Training) -> None:
    third, second, _ = reversed(half_done.commits())
    damage(third)
    assert told(half_done, "run@latest", "--deep") == 4
    half_done.run("trainer.stop_at_step=5").ok(
        f"passed over {third.name}: ", WEIGHTS, "resumed from step 4"
    )
    assert half_done.commits()[2].state == "damaged", "who found it has left a note"
    damage(second, "trainer_state.json")
    damage(half_done.commits()[-1], "rng/rank-00000.json")
    half_done.run("trainer.stop_at_step=3").ok("resumed from step 2")
    assert [line["step"] for line in half_done.lines()] == [1, 2, 3]


def test_files_that_are_gone_mean_the_next_older_one(half_done: Training) -> None:
    root = half_done.commits()[-1].path
    assert root is not None
    (Path(root) / WEIGHTS).unlink()
    assert told(half_done) == 4
    half_done.run("trainer.stop_at_step=5").ok("passed over", "missing", "resumed from step 4")


@pytest.mark.parametrize("deep", [True, False])
def test_checkpoints_and_none_intact_is_no_fresh_start(half_done: Training, deep: bool) -> None:
    for checkpoint in half_done.commits():
        if deep:
            damage(checkpoint)
        else:
            assert checkpoint.path is not None
            (Path(checkpoint.path) / WEIGHTS).unlink()
    assert told(half_done, "run@latest", "--deep") is None
    for mode in ("auto", "latest", "auto"):
        ended = half_done.run(f"trainer.resume_mode={mode}", "trainer.resume_from=run@2")
        ended.failed(5, "none is intact", "ckpt verify")
        assert "step 1/" not in ended.text
    assert told(half_done) is None
    assert half_done.steps() == [2, 4, 6]
    assert len(half_done.lines()) == 6


def test_one_that_is_named_is_not_replaced_by_another(half_done: Training) -> None:
    damage(half_done.commits()[-1])
    for mode in ("6", "run@6"):
        half_done.run(f"trainer.resume_mode={mode}").failed(5, WEIGHTS)
    branch = Training(half_done.lab, half_done.directory, ["storage.run=branch"])
    branch.run("trainer.resume_from=run@6").failed(5)
    assert half_done.steps() == [2, 4, 6]


def test_what_no_trainer_saved(training: Make) -> None:
    other = training("other")
    (other.directory / "tree").mkdir()
    (other.directory / "tree" / "a.bin").write_bytes(b"x")
    ckpt("push", other.directory / "tree", f"{other.directory}/store/run@1").ok()
    other.run().failed(2, "is no checkpoint of this trainer", "model.path")


def test_nothing_to_train(half_done: Training) -> None:
    half_done.run("trainer.stop_at_step=6").ok("there is nothing to train: step 6 of 6 is done")
    half_done.run("trainer.total_steps=3").ok("there is nothing to train: step 6 of 3 is done")
    assert half_done.steps() == [2, 4, 6]
    assert len(half_done.lines()) == 6
