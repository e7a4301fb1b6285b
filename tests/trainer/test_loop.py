"""A step of PPO and a validation, on a model of a few thousand weights in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import FULL
from tests.trainer.test_rollout_hf import EOS, PAD, make_model
from trainer.batch import Split
from trainer.comm import Comm, connect, disconnect
from trainer.config import Config
from trainer.data import Prompts, Sample
from trainer.digest import learner_digest
from trainer.loader import Loader
from trainer.loop import Interrupted, Ppo, Roles
from trainer.models import ValueModel, shard
from trainer.rng import rng_state
from trainer.roles import Learner
from trainer.rollout.hf import HfRollout
from trainer.settings import load_config

Never = Callable[[], bool]
SMALL = (
    *("data.batch_size=6", "rollout.n=2", "rollout.max_new_tokens=3", "actor.optim.lr=1e-2"),
    *("critic.optim.lr=1e-2", "algorithm.kl_coef=0.1", "trainer.total_steps=10"),
)


@pytest.fixture(scope="module")
def comm(one_thread: None) -> Iterator[Comm]:
    """This process alone."""
    yield connect(60)
    disconnect()


def make_config(*settings: str) -> Config:
    return load_config([*SMALL, *settings])[0]


def judge(samples: Sequence[Sample], responses: Sequence[str]) -> list[float]:
    """Draws from a global generator, as a person's reward may."""
    return [len(r) + random.random() + float(torch.rand(())) for r in responses]


def prompts(count: int) -> Prompts:
    samples = [Sample(i, f"sample {i}", str(i)) for i in range(count)]
    return Prompts(samples, [[2 + (i + j) % 20 for j in range(1 + i % 4)] for i in range(count)], 0)


def make_ppo(
    comm: Comm, config: Config, interrupted: Never = lambda: False, *, offload: bool = False
) -> Ppo:
    split = Split(12, config.actor.mini_batch_size or 12, config.critic.mini_batch_size or 12, 1)
    policy, critic = make_model(0), ValueModel(make_model(0).model, 32)
    reference = make_model(0).requires_grad_(False)
    actor = Learner(
        shard(policy, comm.mesh, "float32"), config.actor.optim, 100, comm, offload=offload
    )
    random.seed(0)
    torch.manual_seed(0)
    return Ppo(
        config,
        Roles(
            actor=actor,
            critic=Learner(shard(critic, comm.mesh, "float32"), config.critic.optim, 100, comm),
            reference=shard(reference, comm.mesh, "float32"),
            rollout=HfRollout(make_model(1), comm.device, "float32", eos=EOS, pad=PAD),
            judge=judge,
            decode=lambda tokens: "".join(chr(ord("a") + t) for t in tokens),
            pad=PAD,
        ),
        prompts(24),
        prompts(9),
        Loader(24, 6, shuffle=True, seed=0),
        split,
        comm,
        interrupted,
    )


def everything(ppo: Ppo) -> Any:
    roles = ppo._roles
    return (
        learner_digest(roles.actor),
        learner_digest(roles.critic),
        ppo.loader.state_dict(),
        ppo.kl_controller.state_dict(),
        rng_state(),
    )


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in metrics.items() if not k.startswith("time/")}


def test_a_step_changes_what_learns_and_says_how(comm: Comm) -> None:
    ppo = make_ppo(comm, make_config())
    before = everything(ppo)
    metrics = ppo.step(1)
    assert all(a != b for a, b in zip(before[:3], everything(ppo)[:3], strict=True))
    assert metrics["kl/mean"] == 0, "the policy is the reference still"
    assert abs(float(metrics["rollout/logprob_diff"])) < 1e-6
    assert metrics["data/epoch"] == 0
    assert 1 <= float(metrics["response/length"]) <= 3
    assert {"time/step", "time/rollout", "time/experience", "time/update"} < metrics.keys()
    second = ppo.step(2)
    assert second["kl/mean"] != 0
    assert abs(float(second["rollout/logprob_diff"])) < 1e-6, "the new weights were pushed"


def test_the_same_start_gives_the_same_steps(comm: Comm) -> None:
    ways = []
    for _ in range(2):
        ppo = make_ppo(comm, make_config("actor.mini_batch_size=4", "actor.epochs=2"))
        ways.append([numbers(ppo.step(i)) for i in (1, 2)])
    assert ways[0] == ways[1]


@pytest.mark.parametrize("stop_at", [1, 2])
def test_an_abandoned_step_leaves_no_trace(comm: Comm, stop_at: int) -> None:
    """Interrupted after the rollout, and after the reward has drawn."""
    polls = 0

    def interrupted() -> bool:
        nonlocal polls
        polls += 1
        return polls == 2 + stop_at

    config = make_config("algorithm.kl_controller=adaptive")
    ppo, straight = make_ppo(comm, config, interrupted), make_ppo(comm, config)
    ppo.step(1)
    # The generators are the process's: each of the two goes on with its own.
    random.seed(1)
    torch.manual_seed(1)
    before = everything(ppo)
    with pytest.raises(Interrupted):
        ppo.step(2)
    assert everything(ppo) == before
    again = numbers(ppo.step(2))
    random.seed(0)
    torch.manual_seed(0)
    straight.step(1)
    random.seed(1)
    torch.manual_seed(1)
    assert numbers(straight.step(2)) == again


def test_a_validation_leaves_no_trace(comm: Comm) -> None:
    ppo = make_ppo(comm, make_config("data.val_batch_size=4", "rollout.val_temperature=1"))
    ppo.step(1)
    before = everything(ppo)
    found = ppo.validate()
    assert everything(ppo) == before
    assert ppo.validate() == found, "not its own results either"
    assert found.keys() == {"val/reward", "val/response_length"}


def test_a_validation_is_of_all_prompts_whatever_its_batches(comm: Comm) -> None:
    found = []
    for size in (2, 4, 9, 100):
        ppo = make_ppo(comm, make_config(f"data.val_batch_size={size}"))
        found.append(ppo.validate())
    assert all(f == pytest.approx(found[0]) for f in found)


def test_an_interrupted_validation_leaves_no_trace_either(comm: Comm) -> None:
    ppo = make_ppo(comm, make_config("data.val_batch_size=4"), lambda: True)
    before = everything(ppo)
    with pytest.raises(Interrupted):
        ppo.validate()
    assert everything(ppo) == before


@pytest.mark.parametrize("size", [1, 5] if FULL else [5])
def test_micro_batches_change_nothing(comm: Comm, size: int) -> None:
    settings = ("actor.entropy_coef=0.1", "actor.kl_loss_coef=0.1", "actor.mini_batch_size=6")
    whole = make_ppo(comm, make_config(*settings))
    split = make_ppo(comm, make_config(*settings, f"actor.micro_batch_size={size}"))
    expected = [numbers(whole.step(i)) for i in (1, 2)]
    random.seed(0)
    torch.manual_seed(0)
    for step, line in enumerate(expected, 1):
        assert numbers(split.step(step)) == pytest.approx(line, rel=1e-3, abs=1e-4)


def test_the_critic_warms_up_alone(comm: Comm) -> None:
    ppo = make_ppo(comm, make_config("critic.warmup_steps=2"))
    actor, critic = learner_digest(ppo._roles.actor), learner_digest(ppo._roles.critic)
    for step in (1, 2):
        assert "actor/loss" not in ppo.step(step)
    assert learner_digest(ppo._roles.actor) == actor
    assert learner_digest(ppo._roles.critic) != critic
    assert "actor/loss" in ppo.step(3)
    assert learner_digest(ppo._roles.actor) != actor


def test_weights_are_pushed_when_they_are_new_and_only_then(comm: Comm) -> None:
    ppo = make_ppo(comm, make_config("critic.warmup_steps=1"))
    pushed: list[int] = []
    rollout: Any = ppo._roles.rollout
    load = rollout.load_weights

    def noted(weights: Any, version: int) -> None:
        pushed.append(version)
        load(weights, version)

    rollout.load_weights = noted
    ppo.validate()
    ppo.step(1)
    assert pushed == [0], "nothing has changed but the critic"
    ppo.step(2)
    ppo.validate()
    ppo.step(3)
    assert pushed == [0, 1]
