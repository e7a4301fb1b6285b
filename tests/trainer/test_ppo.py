"""PPO's functions against values worked out by hand, definitions, and themselves on split batches.

Expected numbers stand with their arithmetic beside them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckptstore.errors import UsageError
from trainer import logits as logits_module
from trainer import ppo
from trainer.config import Schedule

NAN = math.nan
T = TypeVar("T")


def one_process(x: Tensor) -> Tensor:
    return x


def on_ranks(world: int, work: Callable[[int, ppo.AllReduce], T]) -> list[T]:
    """What ``work`` returns on each of several ranks, which are threads that sum for each other."""
    barrier = threading.Barrier(world, timeout=20)
    parts: list[Tensor] = [torch.empty(0)] * world

    def rank(index: int) -> T:
        def all_reduce(x: Tensor) -> Tensor:
            parts[index] = x
            barrier.wait()
            total = torch.stack(parts).sum(0)
            barrier.wait()
            return total

        return work(index, all_reduce)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


def close(found: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found.detach(), wanted, rtol=tolerance, atol=tolerance)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def random_batch(rows: int = 12, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Right-padded rows of 0 to ``length`` tokens, with NaN in the padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < lengths
    names = ("logprobs", "old_logprobs", "advantages", "values", "old_values", "returns")
    batch = {
        name: torch.randn(rows, length, generator=generator).masked_fill(~mask, NAN)
        for name in names
    }
    return batch | {"mask": mask}


# Log-probabilities and entropy


def test_log_probability_and_entropy_by_hand() -> None:
    # Weights 1, 2, 1: p = 1/4, 1/2, 1/4, and H = 2 (1/4) ln 4 + (1/2) ln 2 = 1.5 ln 2.
    logits = torch.tensor([[[0.0, math.log(2), 0.0], [5.0, 5.0, -math.inf]]])
    close(ppo.token_logprobs(logits, torch.tensor([[1, 0]])), [[math.log(0.5), math.log(0.5)]])
    close(ppo.entropy(logits), [[1.5 * math.log(2), math.log(2)]])


@pytest.mark.parametrize("block", [1, 7, 40, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_change_neither_values_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, block: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(logits_module, "BLOCK_ELEMENTS", block)
    torch.manual_seed(1)
    # A slice, as logits of a response are one: not contiguous.
    logits = (torch.randn(3, 6, 5) * 3).to(dtype)[:, :-1].requires_grad_()
    tokens, weights = torch.randint(0, 5, (3, 5)), torch.randn(3, 5)
    whole = logits.detach().clone().requires_grad_()
    every = whole.float().log_softmax(-1)
    expected = every.gather(-1, tokens[..., None])[..., 0], -(every.exp() * every).sum(-1)
    for found, wanted in zip(
        (ppo.token_logprobs(logits, tokens), ppo.entropy(logits)), expected, strict=True
    ):
        assert found.dtype == torch.float32
        close(found, wanted)
        (by_block,) = torch.autograd.grad((found * weights).sum(), logits)
        (plain,) = torch.autograd.grad((wanted * weights).sum(), whole, retain_graph=True)
        assert by_block.dtype == dtype
        close(by_block, plain, 1e-6 if dtype == torch.float32 else 1e-2)


def test_large_logits_keep_their_digits() -> None:
    logits = torch.tensor([[[1e4, 1e4 + 1.0]]])
    close(ppo.token_logprobs(logits, torch.tensor([[1]])), [[-math.log1p(math.exp(-1))]])


def test_excluded_tokens_get_no_gradient() -> None:
    logits = torch.tensor([[[1.0, 2.0, -math.inf]]], requires_grad=True)
    backward((ppo.entropy(logits) + ppo.token_logprobs(logits, torch.tensor([[0]]))).sum())
    assert gradient(logits).isfinite().all()
    assert gradient(logits)[0, 0, 2] == 0


# KL and rewards


def test_kl_estimators_by_hand() -> None:
    # p = 0.5 under the policy, 0.25 under the reference: r = ln 0.25 - ln 0.5 = -ln 2.
    p, q = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    close(ppo.kl(p, q, "k1"), [[math.log(2)]])
    close(ppo.kl(q, p, "k1"), [[-math.log(2)]])
    close(ppo.kl(q, p, "abs"), [[math.log(2)]])
    close(ppo.kl(p, q, "k2"), [[math.log(2) ** 2 / 2]])
    close(ppo.kl(p, q, "k3"), [[0.5 - 1 + math.log(2)]])  # exp(r) = 0.25 / 0.5
    close(ppo.kl(q, p, "k3"), [[2 - 1 - math.log(2)]])


def test_k3_is_bounded() -> None:
    wild = torch.tensor([[-50.0, 50.0, 0.0]], requires_grad=True)
    found = ppo.kl(wild, torch.zeros(1, 3), "k3")
    assert found.tolist() == [[10.0, 10.0, 0.0]]
    backward(found.sum())
    assert gradient(wild).tolist() == [[0.0, 0.0, 0.0]]


def test_kl_estimators_agree_on_average() -> None:
    # Over all tokens, weighted with the policy's probabilities: the KL itself for k1 and k3.
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    exact = (p * (p / q).log()).sum()
    estimators: list[ppo.Estimator] = ["k1", "k3"]
    for estimator in estimators:
        close((p * ppo.kl(p.log(), q.log(), estimator)).sum(), exact)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="k4"):
        ppo.kl(torch.zeros(1, 1), torch.zeros(1, 1), cast("ppo.Estimator", "k4"))
    with pytest.raises(UsageError, match="steps"):
        ppo.lr_factor(0, 0, 10, cast("Schedule", "steps"), 0.0)


def test_token_rewards_by_hand() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]])
    kl = torch.tensor([[1.0, 2.0, NAN], [0.0, -1.0, 3.0], [NAN, NAN, NAN], [1.0, 1.0, 1.0]])
    found = ppo.token_rewards(torch.tensor([10.0, 20.0, 30.0, 40.0]), kl, mask, 0.5)
    assert found.tolist() == [
        [-0.5, 9.0, 0.0],  # 10 - 0.5 · 2 on the last token
        [0.0, 0.5, 18.5],  # 20 - 0.5 · 3
        [0.0, 0.0, 0.0],  # no token, so no score
        [-0.5, 0.0, 39.5],
    ]


# Advantages


def test_gae_by_hand() -> None:
    rewards = torch.tensor([[0.0, 1.0, NAN]])
    values = torch.tensor([[0.5, 0.25, NAN]])
    advantages, returns = ppo.gae(rewards, values, torch.tensor([[1, 1, 0]]), 0.5, 0.5)
    # δ(1) = 1 - 0.25 = 0.75; δ(0) = 0 + 0.5 · 0.25 - 0.5 = -0.375
    # A(1) = 0.75; A(0) = -0.375 + 0.25 · 0.75 = -0.1875
    assert advantages.tolist() == [[-0.1875, 0.75, 0.0]]
    assert returns.tolist() == [[0.3125, 1.0, 0.0]]


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[list[float], list[float], list[bool], float, float]:
    length = draw(st.integers(1, 8))
    number = st.floats(-3, 3, width=32)
    return (
        draw(st.lists(number, min_size=length, max_size=length)),
        draw(st.lists(number, min_size=length, max_size=length)),
        draw(st.lists(st.booleans(), min_size=length, max_size=length)),
        draw(st.floats(0, 1)),
        draw(st.floats(0, 1)),
    )


@settings(deadline=None, max_examples=60)
@given(trajectories())
def test_gae_is_the_weighted_sum_of_td_errors(
    trajectory: tuple[list[float], list[float], list[bool], float, float],
) -> None:
    rewards, values, mask, gamma, lam = trajectory
    # The definition, over the tokens inside the mask as if nothing stood between them.
    at = [t for t, inside in enumerate(mask) if inside]
    expected = [0.0] * len(mask)
    for i, t in enumerate(at):
        for j in range(i, len(at)):
            following = values[at[j + 1]] if j + 1 < len(at) else 0.0
            delta = rewards[at[j]] + gamma * following - values[at[j]]
            expected[t] += (gamma * lam) ** (j - i) * delta
    advantages, returns = ppo.gae(
        torch.tensor([rewards]), torch.tensor([values]), torch.tensor([mask]), gamma, lam
    )
    close(advantages[0], expected, 1e-4)
    close(returns[0], [a + v * m for a, v, m in zip(expected, values, mask, strict=True)], 1e-4)


def test_gae_without_discount_is_reward_to_go_minus_value() -> None:
    rewards, values = torch.randn(4, 9), torch.randn(4, 9)
    advantages, returns = ppo.gae(rewards, values, torch.ones(4, 9), 1.0, 1.0)
    reward_to_go = rewards.flip(1).cumsum(1).flip(1)
    close(advantages, reward_to_go - values, 1e-5)
    close(returns, reward_to_go, 1e-5)


def test_gae_sends_no_gradient() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    advantages, returns = ppo.gae(torch.ones(1, 2), values, torch.ones(1, 2), 1.0, 1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


# Moments over ranks


def test_moments_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0], [6.0, NAN]])
    mean, variance, count = ppo.masked_moments(values, torch.tensor([[1, 1], [1, 0]]), one_process)
    # Mean 9/3; squares of differences 4 + 1 + 9 = 14, over 3 - 1.
    assert (mean.item(), variance.item(), count.item()) == (3.0, 7.0, 3.0)


@pytest.mark.parametrize(("inside", "expected"), [(0, (0.0, 0.0, 0.0)), (1, (5.0, 0.0, 1.0))])
def test_moments_of_hardly_anything(inside: int, expected: tuple[float, float, float]) -> None:
    values, mask = torch.tensor([[5.0, NAN]]), torch.tensor([[inside, 0]])
    found = ppo.masked_moments(values, mask, one_process)
    assert tuple(x.item() for x in found) == expected
    assert ppo.whiten(values, mask, one_process).tolist() == [[0.0, 0.0]]


def test_moments_keep_digits_far_from_zero() -> None:
    values = torch.tensor([[1e8, 1e8 + 1, 1e8 + 2]], dtype=torch.float64)
    _, variance, _ = ppo.masked_moments(values, torch.ones(1, 3), one_process)
    close(variance, 1.0, 1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_whitening_is_the_same_on_any_number_of_ranks(world: int) -> None:
    batch = random_batch()
    values, mask = batch["advantages"], batch["mask"].clone()
    mask[: len(mask) // world] = False  # the first rank has no token
    whole = ppo.whiten(values, mask, one_process)
    mean, variance, _ = ppo.masked_moments(whole, mask, one_process)
    close(mean, 0.0)
    close(variance, 1.0)
    shares = list(zip(values.chunk(world), mask.chunk(world), strict=True))
    parts = on_ranks(world, lambda rank, reduce: ppo.whiten(*shares[rank], reduce))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-7, atol=1e-7)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([[1.0, 3.0, 5.0, NAN]])
    mask = torch.tensor([[1, 1, 1, 0]])

    def of(*values: float) -> float:
        return ppo.explained_variance(torch.tensor([[*values, NAN]]), returns, mask, one_process)

    assert of(1.0, 3.0, 5.0) == 1.0
    assert of(11.0, 13.0, 15.0) == 1.0  # a constant offset is no variance
    assert of(7.0, 7.0, 7.0) == 0.0
    assert of(1.0, 3.0, 2.0) == 0.25  # left: 0, 0, 3, variance 3; whole: variance 4
    assert of(5.0, 3.0, 1.0) == -3.0  # left: -4, 0, 4, variance 16


def test_explained_variance_of_constant_returns_is_zero() -> None:
    constant = torch.full((1, 3), 2.0)
    assert ppo.explained_variance(torch.randn(1, 3), constant, torch.ones(1, 3), one_process) == 0


@pytest.mark.parametrize("world", [2, 3])
def test_explained_variance_is_the_same_on_any_number_of_ranks(world: int) -> None:
    batch = random_batch()
    values, returns, mask = (batch[name] for name in ("values", "returns", "mask"))
    whole = ppo.explained_variance(values, returns, mask, one_process)
    shares = list(zip(values.chunk(world), returns.chunk(world), mask.chunk(world), strict=True))
    found = on_ranks(world, lambda rank, reduce: ppo.explained_variance(*shares[rank], reduce))
    assert found == pytest.approx([whole] * world, rel=1e-12)


# Losses


def test_policy_loss_by_hand() -> None:
    # Ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages 2, -2, 2, -2, 1, clipped to [0.8, 1.2].
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 1.0, NAN]])
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0, NAN, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    logprobs = (ratios.log() - 1.0).requires_grad_()
    loss, sums = ppo.policy_loss(logprobs, torch.full((1, 7), -1.0), advantages, mask, 0.2, 10.0)
    # max(-3, -2.4) = -2.4; max(3, 2.4) = 3; max(-1, -1.6) = -1; max(1, 1.6) = 1.6; -1.1
    close(loss, (-2.4 + 3.0 - 1.0 + 1.6 - 1.1) / 10)
    assert sums["clip_fraction"].item() == 2  # the first and the fourth
    close(sums["approx_kl"], -(2 * math.log(1.5) + 2 * math.log(0.5) + math.log(1.1)))
    assert not any(value.requires_grad for value in sums.values())
    backward(loss)
    # -A · ratio / 10 where it is not clipped.
    close(gradient(logprobs), [[0.0, 0.3, -0.1, 0.0, -0.11, 0.0, 0.0]])


def test_policy_loss_survives_an_enormous_ratio() -> None:
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-1000.0, 1000.0]])
    loss, sums = ppo.policy_loss(logprobs, old, -torch.ones(1, 2), torch.ones(1, 2), 0.2, 1.0)
    close(loss, math.exp(20) + 0.8)
    assert sums["approx_kl"].item() == 0  # -20 + 20


def test_value_loss_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 0.0, 0.25, 0.25]], requires_grad=True)
    returns = torch.tensor([[3.0, 3.0, 3.0, 1.0, NAN]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    loss, sums = ppo.value_loss(values, torch.zeros(1, 5), returns, mask, 0.5, 8.0)
    # Clipped values 0.5, 0.5, 0, 0.25. Larger squares: 2.5², 2.5² (not 1), 3², 0.75².
    close(loss, 0.5 * (6.25 + 6.25 + 9.0 + 0.5625) / 8)
    assert sums["clip_fraction"].item() == 2
    backward(loss)
    # (v - R) / 8 where it is not clipped (equal squares share a gradient that is the same).
    close(gradient(values), [[0.0, 0.0, -0.375, -0.09375, 0.0]])


def test_token_mean_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, NAN]], requires_grad=True)
    loss = ppo.token_mean(values, torch.tensor([[1, 1, 0]]), 4.0)
    close(loss, 0.75)
    backward(loss)
    assert gradient(values).tolist() == [[0.25, 0.25, 0.0]]


def test_sums_keep_small_addends_beside_large_ones() -> None:
    values = torch.tensor([[1e8, 1.0, -1e8]])  # in float32, 1e8 + 1 is 1e8
    assert ppo.token_mean(values, torch.ones(1, 3), 2.0).item() == 0.5


def a_policy_loss(batch: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = (x, batch["old_logprobs"], batch["advantages"], batch["mask"])
    return ppo.policy_loss(*inputs, clip_ratio=0.2, denominator=50.0)


def a_value_loss(batch: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = (x, batch["old_values"], batch["returns"], batch["mask"])
    return ppo.value_loss(*inputs, clip_value=0.5, denominator=50.0)


@pytest.mark.parametrize("pieces", [2, 3, 12])
@pytest.mark.parametrize("loss_of", [a_policy_loss, a_value_loss])
def test_losses_of_micro_batches_add_up(
    pieces: int, loss_of: Callable[[dict[str, Tensor], Tensor], tuple[Tensor, dict[str, Tensor]]]
) -> None:
    batch = random_batch()
    # One parameter that all tokens share, as a model's are; what it computes on padding is finite.
    batch["feature"] = batch["logprobs"].nan_to_num(0.7)
    weight = torch.tensor(0.5, requires_grad=True)
    loss, sums = loss_of(batch, weight * batch["feature"])
    backward(loss)
    whole = gradient(weight).clone()
    weight.grad = None
    split = {name: value.chunk(pieces) for name, value in batch.items()}
    losses, all_sums = [], []
    for i in range(pieces):
        part = {name: chunks[i] for name, chunks in split.items()}
        part_loss, part_sums = loss_of(part, weight * part["feature"])
        backward(part_loss)
        losses.append(part_loss.detach())
        all_sums.append(part_sums)
    close(torch.stack(losses).sum(), loss.detach(), 1e-7)
    close(gradient(weight), whole)
    for name, value in sums.items():
        close(torch.stack([s[name] for s in all_sums]).sum(), value)


# The KL controller and the schedule


def test_adaptive_controller_by_hand() -> None:
    controller = ppo.KLController(0.1, "adaptive", target=2.0, horizon=100.0)
    controller.update(2.2, 50)  # error 0.1: times 1 + 0.1 · 50 / 100
    assert controller.coef == pytest.approx(0.105)
    controller.update(2000.0, 10)  # error clipped to 0.2: times 1.02
    assert controller.coef == pytest.approx(0.1071)
    controller.update(-5.0, 10)  # to -0.2: times 0.98
    assert controller.coef == pytest.approx(0.104958)
    controller.update(2.0, 10)
    assert controller.coef == pytest.approx(0.104958)


def test_fixed_controller_stays() -> None:
    controller = ppo.KLController(0.1)
    controller.update(100.0, 100)
    assert controller.coef == 0.1


def test_adaptive_controller_goes_on_where_it_was() -> None:
    first = ppo.KLController(0.1, "adaptive")
    first.update(1.0, 64)
    resumed = ppo.KLController(0.1, "adaptive")
    resumed.load_state_dict(first.state_dict())
    first.update(0.01, 64)
    resumed.update(0.01, 64)
    assert resumed.coef == first.coef != 0.1


@pytest.mark.parametrize(
    ("saved", "now"), [("fixed", "fixed"), ("fixed", "adaptive"), ("adaptive", "fixed")]
)
def test_a_configured_coefficient_wins_over_a_saved_one(
    saved: ppo.Controller, now: ppo.Controller
) -> None:
    controller = ppo.KLController(0.5, now)
    controller.load_state_dict(ppo.KLController(0.1, saved).state_dict())
    assert controller.coef == 0.5


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (NAN, 1.0)])
def test_adaptive_controller_refuses_impossible_settings(target: float, horizon: float) -> None:
    with pytest.raises(UsageError, match="target"):
        ppo.KLController(0.1, "adaptive", target, horizon)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Warm-up over 2 steps, then from 1 to 0.2 over 4 more, then flat.
        ("constant", [0, 0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]),
        # 0.2 + 0.8 (1 + cos(π/4 k)) / 2
        (
            "cosine",
            [0, 0.5, 1, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.6 - 0.4 * 0.5**0.5, 0.2, 0.2, 0.2],
        ),
    ],
)
def test_schedules_by_hand(schedule: Schedule, expected: list[float]) -> None:
    found = [ppo.lr_factor(step, 2, 6, schedule, 0.2) for step in range(9)]
    assert found == pytest.approx(expected)


def test_schedule_without_warm_up_starts_at_the_peak() -> None:
    for schedule in get_args(Schedule):
        assert ppo.lr_factor(0, 0, 5, schedule, 0.0) == 1.0


def test_schedule_that_ends_with_its_warm_up() -> None:
    assert [ppo.lr_factor(step, 2, 2, "linear", 0.1) for step in (1, 2, 3)] == [
        0.5,
        1.0,
        pytest.approx(0.1),
    ]
