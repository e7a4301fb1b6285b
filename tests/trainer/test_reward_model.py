"""Rewards from a sequence classifier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore.errors import NotFoundError, UsageError
from tests.trainer.support import Lab, Training
from trainer.config import ModelConfig, RewardConfig
from trainer.data import Sample
from trainer.models import load_tokenizer
from trainer.reward_model import RewardModel

CPU = torch.device("cpu")


def classifier(lab: Lab, path: Path, labels: int = 1) -> Path:
    """A tiny classifier with the tiny model's tokenizer."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(lab.model, num_labels=labels)
    torch.manual_seed(3)
    made: Any = AutoModelForSequenceClassification
    made.from_config(config).save_pretrained(path)
    load_tokenizer(lab.model, ModelConfig()).save_pretrained(path)
    return path


def test_a_reward_depends_on_its_own_text_only(lab: Lab, tmp_path: Path) -> None:
    path = str(classifier(lab, tmp_path / "rm"))
    samples = [Sample(i, "x" * (i + 1), "") for i in range(5)]
    responses = ["a", "bb", "ccc", "dddd", "eeeee"]
    two = RewardModel(RewardConfig(model=path, micro_batch_size=2), ModelConfig(), CPU)
    one = RewardModel(RewardConfig(model=path, micro_batch_size=1), ModelConfig(), CPU)
    rewards = two(samples, responses)
    assert rewards == pytest.approx(one(samples, responses), abs=1e-5)
    assert len({round(r, 4) for r in rewards}) == 5


def test_what_is_no_reward_model_is_refused(lab: Lab, tmp_path: Path) -> None:
    missing = RewardConfig(model=str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError, match="no reward model"):
        RewardModel(missing, ModelConfig(), CPU)
    two = RewardConfig(model=str(classifier(lab, tmp_path / "two", labels=2)))
    with pytest.raises(UsageError, match="gives 2 numbers"):
        RewardModel(two, ModelConfig(), CPU)


def test_a_training_is_judged_by_it(
    lab: Lab, training: Callable[..., Training], tmp_path: Path
) -> None:
    path = classifier(lab, tmp_path / "rm")
    made = training("judged", f"reward.model={path}", "trainer.total_steps=3")
    made.run("trainer.stop_at_step=2").ok()
    made.run().ok("resumed from step 2")
    assert made.lines()[-1]["reward/std"] > 0
    torch.manual_seed(4)
    other = classifier(lab, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    ended = made.run(f"reward.model={other}", "trainer.total_steps=4")
    ended.ok("the reward", "is not the one it was")
