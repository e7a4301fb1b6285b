"""Generation with vLLM: what the engine does, and trainings that use it."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FULL
from tests.trainer.support import Lab, Running, Starter, Training, needs, rank_variables, until

pytestmark = [needs("vllm"), pytest.mark.timeout(600)]

SAMPLES = 12
"""Of a step."""


@pytest.fixture(scope="module")
def vllm_lab(lab: Lab) -> Iterator[Lab]:
    """What trainings need, with vLLM imported already."""
    starter = Starter("vllm", "vllm.entrypoints.llm")
    yield replace(lab, starter=starter)
    starter.close()


@pytest.fixture(scope="module")
def settings(vllm_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prompts that begin alike and are longer than a block of the engine's cache: 128 tokens."""
    beginning = "The same for all of them, longer than any block of a cache, as an example is. " * 2
    assert len(beginning.encode()) > 128 + 24
    data = tmp_path_factory.mktemp("long") / "long.jsonl"
    rows = [{"prompt": f"{beginning}{i}:", "answer": str(i)} for i in range(18)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"data.train_files=[{data}]",
        f"data.val_files=[{data}]",
        "data.max_prompt_length=192",
        "data.batch_size=6",
        "rollout.engine=vllm",
        "rollout.n=2",
        "rollout.temperature=0.8",
        "rollout.max_num_seqs=8",
        "actor.mini_batch_size=6",
        f"reward.function={vllm_lab.rewards}:gate",
        "trainer.total_steps=6",
        "trainer.save_freq=3",
        "trainer.test_freq=2",
    ]


@pytest.fixture(scope="module")
def told(vllm_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe saw; see ``engine_probe.py``."""
    directory = tmp_path_factory.mktemp("probe")
    running = vllm_lab.starter.start(
        [str(vllm_lab.model)], directory, {}, "tests.trainer.engine_probe:main"
    )
    running.wait().ok()
    found: dict[str, Any] = json.loads((directory / "told.json").read_text())
    return found


def test_log_probabilities_are_those_of_the_weights_that_were_pushed(told: dict[str, Any]) -> None:
    """Also of an output layer that is tied to the embeddings, and behind cached beginnings."""
    assert told["version at first"] is None
    assert told["version"] == 1
    assert told["not pushed"] > 0.01, "the weights differ, else this shows nothing"
    for what in ("greedy", "pushed", "greedy, pushed"):
        assert told[what] < 1e-5, what


def test_the_same_batch_gives_the_same_responses_and_no_generator_moves(
    told: dict[str, Any],
) -> None:
    assert told["again"]
    assert told["generators"]
    assert told["by key"] == [True, True, False]
    assert told["lengths"] == [6, 6, 6, 6]
    assert told["top_k 1"]
    assert told["ended"]


def test_a_push_that_misses_a_layer_or_has_one_too_many_is_an_error(told: dict[str, Any]) -> None:
    message, code = told["misses"]
    assert "lacks model.layers.1.mlp.up_proj.weight (1 missing, 0 unknown)" in message
    assert code == 1
    assert told["version after"] is None, "what it holds now is not known"
    assert "has x.y, which it does not know (0 missing, 1 unknown)" in told["too many"][0]


def test_what_vllm_refuses_is_a_sentence(told: dict[str, Any]) -> None:
    message, code = told["too long"]
    assert code == 2
    assert "vLLM does not start with the model in" in message
    assert "max_model_len (100000) is greater than" in message
    assert "\n" not in message
    message, code = told["small heads"]
    assert code == 2
    assert "vLLM does not start with the model in small: " in message
    assert "head_dim=16" in message


def test_vllm_finds_what_it_needs_in_the_environment(told: dict[str, Any]) -> None:
    assert told["environment"] == ["1", "1"]


def caught(training: Training, *running: Running) -> None:
    """Wait until a training stands in its reward, and all before it is saved."""
    until((training.directory / "reached").exists, f"step 4:\n{running[0].text}")
    until(lambda: training.steps() == [3], "the save of step 3")
    for process in running:
        process.send(signal.SIGKILL)
    assert [process.wait().code for process in running] == [-signal.SIGKILL] * len(running)


def in_step(step: int, share: int = 1) -> str:
    """What GATE must be to stop a rank in a step; validations come after the steps 2, 4, …"""
    return str((step - 1) * SAMPLES // share + (step - 1) // 2 * 18 // share + 1) + ":"


def test_after_a_kill_every_bit_is_the_same(
    vllm_lab: Lab, tmp_path: Path, settings: list[str]
) -> None:
    whole = Training(vllm_lab, tmp_path / "whole", settings)
    whole.run().ok()
    facts = whole.facts()
    assert all(0 < f["rollout/logprob_diff"] < 1e-5 for f in facts)
    assert len({f["digest/actor"] for f in facts}) == 6
    killed = Training(vllm_lab, tmp_path / "killed", settings)
    caught(killed, killed.start(env={"GATE": in_step(4)}))
    killed.run().ok("resumed from step 3")
    killed.same_as(whole, 6)


@pytest.mark.skipif(not FULL, reason="long")
def test_two_ranks_with_an_engine_each(vllm_lab: Lab, tmp_path: Path, settings: list[str]) -> None:
    whole = Training(vllm_lab, tmp_path / "whole", settings)
    for ended in whole.run_ranks(2):
        ended.ok()
    assert all(0 < f["rollout/logprob_diff"] < 1e-5 for f in whole.facts())
    killed = Training(vllm_lab, tmp_path / "killed", settings)
    gate = {"GATE": in_step(4, share=2)}
    caught(killed, *(killed.start(env={**ours, **gate}) for ours in rank_variables(2)))
    for ended in killed.run_ranks(2):
        ended.ok()
    killed.same_as(whole, 6)


SHARED = (
    "rollout.tensor_parallel_size=2",
    "data.val_batch_size=17",  # the last of the 18 is alone in its batch: other ranks have none
    "actor.mini_batch_size=12",
)


def test_ranks_that_share_an_engine_resume_exactly(
    vllm_lab: Lab, tmp_path: Path, settings: list[str]
) -> None:
    half = 3 if FULL else 1
    course = [f"trainer.total_steps={2 * half}", f"trainer.save_freq={half}", "trainer.test_freq=1"]
    whole = Training(vllm_lab, tmp_path / "whole", [*settings, *SHARED, *course])
    for ended in whole.run_ranks(2):
        ended.ok()
    facts = whole.facts()
    assert all(0 < f["rollout/logprob_diff"] < 1e-5 for f in facts)
    assert len({f["digest/actor"] for f in facts}) == 2 * half
    again = Training(vllm_lab, tmp_path / "again", whole.settings)
    shutil.copytree(whole.directory, again.directory, symlinks=True, dirs_exist_ok=True)
    for ended in again.run_ranks(2, f"trainer.resume_mode={half}"):
        ended.ok()
    again.same_as(whole, 2 * half)


@pytest.mark.skipif(not FULL, reason="minutes")
def test_a_kill_of_two_engines_with_two_ranks_each(
    vllm_lab: Lab, tmp_path: Path, settings: list[str]
) -> None:
    whole = Training(vllm_lab, tmp_path / "whole", [*settings, *SHARED])
    for ended in whole.run_ranks(4):
        ended.ok()
    assert all(0 < f["rollout/logprob_diff"] < 1e-5 for f in whole.facts())
    killed = Training(vllm_lab, tmp_path / "killed", [*settings, *SHARED])
    # 3 samples a step, and 5 and 1 of the validation after the second.
    gate = {"GATE": f"{3 * 3 + 5 + 1 + 1}:"}
    first, *others = rank_variables(4)
    caught(killed, killed.start(env={**first, **gate}), *(killed.start(env=o) for o in others))
    for ended in killed.run_ranks(4):
        ended.ok()
    killed.same_as(whole, 6)
