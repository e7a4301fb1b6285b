"""What a resume makes of a configuration, data, a model or contents that have changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import Lab, Training

Make = Callable[..., Training]


def last(training: Training, key: str) -> float:
    value: float = training.lines()[-1][key]
    return value


def test_a_changed_learning_rate_is_named_and_used(half_done: Training) -> None:
    assert last(half_done, "actor/lr") == 1e-3
    said = half_done.run("actor.optim.lr=5e-4", "trainer.stop_at_step=7").ok("resumed from step 6")
    assert "actor.optim.lr: 0.001 → 0.0005" in said.text
    assert last(half_done, "actor/lr") == 5e-4
    assert last(half_done, "critic/lr") == 1e-3
    # Of the same state: the rate is used, not only shown.
    half_done.run("actor.optim.lr=5e-4", "trainer.resume_mode=6", "trainer.stop_at_step=7").ok()
    smaller = half_done.lines()[-1]
    half_done.run("actor.optim.lr=1e-3", "trainer.resume_mode=6", "trainer.stop_at_step=7").ok()
    assert half_done.lines()[-1]["digest/actor"] != smaller["digest/actor"]
    assert half_done.lines()[-1]["reward/mean"] == smaller["reward/mean"]


def test_a_changed_schedule_goes_on_at_this_step(half_done: Training) -> None:
    said = half_done.run("actor.optim.schedule=linear", "trainer.stop_at_step=7").ok()
    assert "actor.optim.schedule: 'constant' → 'linear'" in said.text
    assert last(half_done, "actor/lr") == pytest.approx(1e-3 * (1 - 7 / 8))


@pytest.mark.parametrize(
    ("strict", "code", "words"),
    [("error", 2, "actor.optim.lr: 0.001 → 0.0005"), ("ignore", 0, "resumed from step 6")],
)
def test_how_strict(half_done: Training, strict: str, code: int, words: str) -> None:
    ended = half_done.run("actor.optim.lr=5e-4", f"trainer.resume_strict={strict}")
    ended.failed(code, words)
    assert ("0.0005" in ended.text) == bool(code)
    assert half_done.steps() == ([2, 4, 6] if code else [2, 4, 6, 8])
    assert len(half_done.lines()) == (6 if code else 8)


def test_what_changes_no_training_is_not_named(half_done: Training) -> None:
    half_done.run(
        "trainer.save_freq=1", "trainer.resume_strict=error", "storage.async_save=false"
    ).ok("resumed from step 6")
    assert half_done.steps() == [2, 4, 6, 7, 8]


def test_data_that_changed_or_is_gone(training: Make, lab: Lab) -> None:
    data = training("one").directory / "data.jsonl"
    shutil.copy(lab.few, data)
    one = training("one", f"data.train_files=[{data}]", "trainer.total_steps=3")
    one.run("trainer.stop_at_step=1").ok()
    rows = data.read_text().splitlines()
    data.write_text("\n".join([*rows[:-1], rows[0]]) + "\n")
    one.run("trainer.stop_at_step=2").ok(f"{data} changed: ", "resumed from step 1")
    data.write_text("\n".join(rows[:-1]) + "\n")
    one.run().failed(2, "had 24 samples when the checkpoint was saved and has 23 now")
    data.unlink()
    one.run().failed(4, f"there is no data file {data}")
    moved = data.with_name("moved.jsonl")
    moved.write_text("\n".join([*rows[:-1], rows[0]]) + "\n")
    said = one.run(f"data.train_files=[{moved}]").ok("resumed from step 2")
    assert "takes the place" not in said.text, "the content is the same"
    assert one.steps() == [1, 2, 3]


def other_model(lab: Lab, place: Path, **changes: object) -> Path:
    """The tiny model with another architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(lab.model)
    for key, value in changes.items():
        setattr(config, key, value)
    shutil.copytree(lab.model, place)
    (place / "model.safetensors").unlink()
    build: Any = AutoModelForCausalLM.from_config
    build(config).save_pretrained(place)
    return place


def test_a_model_of_another_shape(half_done: Training, lab: Lab, tmp_path: Path) -> None:
    wide = other_model(lab, tmp_path / "wide", intermediate_size=96)
    half_done.run(f"model.path={wide}").failed(2, "has the shape", "is it of another model")
    deep = other_model(
        lab, tmp_path / "deep", num_hidden_layers=3, layer_types=["full_attention"] * 3
    )
    half_done.run(f"model.path={deep}").failed(2, "has no tensor", "layers.2")
    assert half_done.steps() == [2, 4, 6]


def test_an_optimizer_that_is_not_loaded(half_done: Training) -> None:
    said = half_done.run("storage.load_contents=[model,extra]", "trainer.stop_at_step=7")
    said.ok("left out by storage.load_contents, and begun anew: optimizer", "not bit for bit")
    anew = half_done.lines()[-1]
    half_done.run("trainer.resume_mode=6", "trainer.stop_at_step=7").ok()
    assert anew["digest/actor"] != half_done.lines()[-1]["digest/actor"]
    assert anew["reward/mean"] == half_done.lines()[-1]["reward/mean"], "the model was loaded"


def test_an_optimizer_that_was_not_saved(training: Make) -> None:
    lean = training("lean", "storage.save_contents=[model,extra]", "trainer.total_steps=3")
    lean.run("trainer.stop_at_step=2").ok()
    assert not any("optimizer" in entry.path for entry in lean.commits()[-1].files)
    lean.run().ok(
        "resumed from step 2",
        "not in the checkpoint, and begun anew: actor/optimizer, critic/optimizer",
    )
    assert [line["step"] for line in lean.lines()] == [1, 2, 3]


def test_a_model_that_was_not_saved(training: Make) -> None:
    empty = training("empty", "storage.save_contents=[optimizer,extra]", "trainer.total_steps=3")
    empty.run("trainer.stop_at_step=2").ok()
    empty.run().failed(2, "holds no actor/model", "storage.save_contents must have model")


def test_the_policy_as_transformers_reads_it(training: Make, lab: Lab, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept = training(
        "kept", "storage.save_contents=[model,optimizer,extra,hf_model]", "trainer.total_steps=2"
    )
    kept.run().ok()
    root = kept.commits()[-1].path
    assert root is not None
    shown = f"{root}/actor/hf"
    policy = AutoModelForCausalLM.from_pretrained(shown, dtype=torch.float32).train(False)
    before = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float32).train(False)
    tokens = AutoTokenizer.from_pretrained(shown)("write digits 1:", return_tensors="pt")
    with torch.no_grad():
        logits = policy(**tokens).logits
        assert not torch.equal(logits, before(**tokens).logits)
    # A run that starts from it has the same policy: its digest before training is that of the end.
    again = training("again", f"model.path={shown}", "trainer.total_steps=1", "actor.optim.lr=0")
    again.run("critic.warmup_steps=1").ok()
    ours, theirs = (
        {e.path: e.digest for e in one.commits()[-1].files if e.path.startswith("actor/model/")}
        for one in (kept, again)
    )
    assert ours == theirs


def test_a_resume_needs_no_model_directory(training: Make, lab: Lab, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(lab.model, model)
    moved = training("moved", f"model.path={model}", "algorithm.kl_coef=0")
    moved.settings.append("trainer.total_steps=3")
    moved.run("trainer.stop_at_step=2").ok()
    shutil.rmtree(model)
    moved.run().ok("resumed from step 2")
    stayed = training("stayed", "algorithm.kl_coef=0", "trainer.total_steps=3")
    stayed.run().ok()
    assert moved.facts() == stayed.facts()


def test_a_resume_needs_no_directory_of_the_critic(
    training: Make, lab: Lab, tmp_path: Path
) -> None:
    critic = other_model(lab, tmp_path / "critic", intermediate_size=96)
    whole = training("whole", f"model.critic_path={critic}", "trainer.total_steps=3")
    whole.run().ok()
    stopped = training("stopped", *whole.settings)
    stopped.run("trainer.stop_at_step=2").ok()
    kept = {e.path for e in stopped.commits()[-1].files if e.path.startswith("critic/hf/")}
    assert kept == {"critic/hf/config.json", "critic/hf/generation_config.json"}
    shutil.rmtree(critic)
    stopped.run().ok("resumed from step 2")
    assert stopped.facts() == whole.facts()
    assert stopped.stored() == whole.stored()
    new = training("new", *whole.settings)
    new.run().failed(4, f"there is no model directory {critic}")


def test_a_reference_that_is_gone_or_another(training: Make, lab: Lab, tmp_path: Path) -> None:
    """The checkpoint does not hold it, so it must still be what it was."""
    model = tmp_path / "model"
    shutil.copytree(lab.model, model)
    one = training("one", f"model.path={model}", "trainer.total_steps=3")
    one.run("trainer.stop_at_step=1").ok()
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**config, "top_k": 3}))
    one.run("trainer.stop_at_step=2").ok(f"the reference {model} is not the one it was")
    shutil.rmtree(model)
    one.run().failed(4, f"there is no model directory {model}")
