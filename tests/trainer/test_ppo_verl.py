"""What verl's functions gave for the same inputs (recorded by ``make_verl_numbers``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from trainer import ppo
from trainer.config import Schedule

VERL = json.loads(Path(__file__).with_name("verl_numbers.json").read_text(encoding="utf-8"))
SETTINGS: dict[str, Any] = VERL["settings"]
OUTPUTS: dict[str, Any] = VERL["outputs"]
MASK = torch.tensor(VERL["inputs"]["mask"])
TOKENS = float(MASK.sum())


def given(name: str) -> Tensor:
    return torch.tensor(VERL["inputs"][name])


def one_process(x: Tensor) -> Tensor:
    return x


def same(found: Tensor, recorded: Any) -> None:
    expected = torch.tensor(recorded, dtype=found.dtype)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)


def same_inside(found: Tensor, recorded: Any) -> None:
    """verl leaves something outside the mask where ours is 0."""
    same(found, (torch.tensor(recorded) * MASK).tolist())


def test_log_probabilities_and_entropy() -> None:
    logits = given("logits")
    same(ppo.token_logprobs(logits, given("tokens")), OUTPUTS["logprobs_from_logits_naive"])
    entropies = ppo.entropy(logits)
    same(entropies, OUTPUTS["entropy_from_logits"])
    same(ppo.token_mean(entropies, MASK, TOKENS), OUTPUTS["compute_entropy_loss"])


@pytest.mark.parametrize("estimator", get_args(ppo.Estimator))
def test_kl(estimator: ppo.Estimator) -> None:
    found = ppo.kl(given("logprobs"), given("ref_logprobs"), estimator)
    same(found, OUTPUTS[f"kl_penalty {estimator}"])


def test_token_rewards() -> None:
    # verl takes scores that lie on tokens already: ours, without a penalty, gives those.
    scores = given("rewards")[:, 0]
    on_tokens = ppo.token_rewards(scores, torch.zeros(5, 6), MASK, 0.0)
    kl = ppo.kl(given("logprobs"), given("ref_logprobs"), "k1")
    found = ppo.token_rewards(scores, kl, MASK, SETTINGS["kl_coef"])
    penalty = torch.tensor(OUTPUTS["compute_rewards"]) - given("rewards")
    same_inside(found, (on_tokens + penalty).tolist())


def test_gae() -> None:
    advantages, returns = ppo.gae(
        given("rewards"), given("old_values"), MASK, SETTINGS["gamma"], SETTINGS["lam"]
    )
    recorded = OUTPUTS["compute_gae_advantage_return"]
    same_inside(returns, recorded["returns"])
    same_inside(ppo.whiten(advantages, MASK, one_process), recorded["advantages"])


def test_whiten() -> None:
    same_inside(ppo.whiten(given("advantages"), MASK, one_process), OUTPUTS["masked_whiten"])


def test_mean_over_tokens() -> None:
    found = ppo.token_mean(given("advantages"), MASK, SETTINGS["batch_num_tokens"])
    same(found, OUTPUTS["agg_loss"])


def test_policy_loss() -> None:
    logprobs = given("logprobs").requires_grad_()
    loss, sums = ppo.policy_loss(
        logprobs,
        given("old_logprobs"),
        given("advantages"),
        MASK,
        SETTINGS["clip_ratio"],
        SETTINGS["batch_num_tokens"],
    )
    loss.backward()  # type: ignore[no-untyped-call]
    recorded = OUTPUTS["compute_policy_loss_vanilla"]
    assert 0 < recorded["actor/pg_clipfrac"] < 1
    assert recorded["actor/pg_clipfrac_lower"] == 0  # no dual clip
    same(loss, recorded["loss"])
    same(gradient(logprobs), recorded["gradient"])
    same(sums["clip_fraction"] / TOKENS, recorded["actor/pg_clipfrac"])
    same(sums["approx_kl"] / TOKENS, recorded["actor/ppo_kl"])


def test_value_loss() -> None:
    values = given("values").requires_grad_()
    loss, sums = ppo.value_loss(
        values,
        given("old_values"),
        given("returns"),
        MASK,
        SETTINGS["clip_value"],
        SETTINGS["batch_num_tokens"],
    )
    loss.backward()  # type: ignore[no-untyped-call]
    recorded = OUTPUTS["compute_value_loss"]
    assert 0 < recorded["clipfrac"] < 1
    same(loss, recorded["loss"])
    same(gradient(values), recorded["gradient"])
    same(sums["clip_fraction"] / TOKENS, recorded["clipfrac"])


def test_adaptive_kl_controller() -> None:
    controller = ppo.KLController(
        SETTINGS["kl_coef_start"], "adaptive", SETTINGS["kl_target"], SETTINGS["kl_horizon"]
    )
    recorded = OUTPUTS["AdaptiveKLController"]
    found = []
    for current, samples in recorded["updates"]:
        controller.update(current, samples)
        found.append(controller.coef)
    assert found == pytest.approx(recorded["coefs"], rel=1e-8)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_schedules(schedule: Schedule) -> None:
    recorded = OUTPUTS[f"get_{schedule}_schedule_with_warmup"]
    found = [
        ppo.lr_factor(
            step,
            SETTINGS["warmup_steps"],
            SETTINGS["total_steps"],
            schedule,
            SETTINGS["min_ratio"],
        )
        for step in range(len(recorded))
    ]
    assert found == pytest.approx(recorded, rel=1e-8)


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
