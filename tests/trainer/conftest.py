"""A starter of trainings, a model and data, made once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.support import REWARDS, Lab, Starter, Training
from trainer.make_data import ensure_data
from trainer.make_model import ensure_model


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """What trainings need."""
    place = tmp_path_factory.mktemp("lab")
    few = place / "few.jsonl"
    rows = [{"prompt": f"{'write ' * (i % 3)}digits {i}:", "answer": str(i)} for i in range(24)]
    few.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = place / "rewards.py"
    rewards.write_text(REWARDS)
    starter = Starter()
    model = ensure_model("tiny", place / "models")
    yield Lab(starter, model, ensure_data("digits", place / "data"), few, rewards)
    starter.close()


@pytest.fixture(scope="session")
def whole(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Training]:
    """Trainings that nothing interrupted, by their settings; each is run once."""
    done: dict[tuple[str, ...], Training] = {}

    def run(*settings: str) -> Training:
        if settings not in done:
            made = Training(lab, tmp_path_factory.mktemp("whole"), list(settings))
            made.run().ok()
            done[settings] = made
        return done[settings]

    return run


@pytest.fixture
def training(lab: Lab, tmp_path: Path) -> Callable[..., Training]:
    """Makes trainings, each in a directory of its own."""
    return lambda name, *settings: Training(lab, tmp_path / name, list(settings))


@pytest.fixture(scope="session")
def _half_done(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Training:
    made = Training(lab, tmp_path_factory.mktemp("half"), ["trainer.total_steps=8"])
    made.run("trainer.stop_at_step=6", "trainer.save_freq=2").ok()
    return made


@pytest.fixture
def half_done(_half_done: Training, tmp_path: Path) -> Training:
    """A training of 8 steps that stands at 6 and has saved 2, 4 and 6; this test's own copy."""
    shutil.copytree(_half_done.directory, tmp_path / "half", symlinks=True)
    return Training(_half_done.lab, tmp_path / "half", list(_half_done.settings))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are not worth a second thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
