"""The mathematics of PPO: pure functions of tensors.

Shapes: B sequences, T tokens of a response, V words of the vocabulary. A mask is 1 (or true) on the
tokens of the response and 0 on padding; what stands outside it, even NaN, changes nothing.

Means are global. A loss is a sum over tokens divided by a ``denominator``, the number of response
tokens of the whole mini-batch over all ranks, so that the losses and gradients of micro-batches
and ranks simply add up. Moments take an ``all_reduce`` that sums a float64 tensor over ranks
(``lambda x: x`` in one process). Sums are float64: a result hardly depends on how a batch is split.

Conventions are those of verl's ``core_algos`` (https://github.com/volcengine/verl), and the tests
compare with numbers it gave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from ckptstore.errors import UsageError
from trainer.config import Schedule
from trainer.logits import entropy, token_logprobs

__all__ = [
    "AllReduce", "Controller", "Estimator", "KLController", "entropy", "explained_variance", "gae",
    "kl", "lr_factor", "masked_moments", "masked_sum", "policy_loss", "token_logprobs",
    "token_mean", "token_rewards", "value_loss", "whiten",
]  # fmt: skip

AllReduce = Callable[[Tensor], Tensor]
Estimator = Literal["k1", "abs", "k2", "k3"]
Controller = Literal["fixed", "adaptive"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before ``exp``, as in verl."""


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """An estimate of KL(policy ‖ reference) at each token sampled from the policy.

    With r = log p(reference) - log p(policy): ``k1`` is -r, ``abs`` is |r|, ``k2`` is r²/2 and
    ``k3`` is exp(r) - 1 - r (J. Schulman, http://joschu.net/blog/kl-approx.html). As in verl, k3
    clamps r to ±20 and the result to [-10, 10], so one wild token cannot outweigh a batch.

    In a loss choose k2, whose gradient is that of KL in expectation; k1's is 0.

    Args:
        logprobs, ref_logprobs: [B, T].
        estimator: One of the four.

    Returns:
        [B, T].

    Raises:
        UsageError: another estimator.
    """
    match estimator:
        case "k1":
            return logprobs - ref_logprobs
        case "abs":
            return (logprobs - ref_logprobs).abs()
        case "k2":
            return 0.5 * (logprobs - ref_logprobs).square()
        case "k3":
            log_ratio = (ref_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)
        case _:
            raise UsageError(f"{estimator!r} is no KL estimator", hint="k1, abs, k2 or k3")


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards of tokens: the KL penalty on each, and the score on the last one of each response.

    Args:
        scores: [B], one a response.
        kl: [B, T], from ``kl``.
        mask: [B, T]. A row without any response token gets no reward, nor its score.
        kl_coef: Weight of the penalty.

    Returns:
        [B, T], 0 outside the mask.
    """
    inside = mask.bool()
    from_the_end = inside.flip(1).cumsum(1).flip(1)
    last = inside & (from_the_end == 1)
    return torch.where(inside, -kl_coef * kl, 0.0) + torch.where(last, scores.unsqueeze(1), 0.0)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438).

    δ(t) = r(t) + γ V(t+1) - V(t) and A(t) = δ(t) + γ λ A(t+1), where t+1 is the next token *inside*
    the mask, and V and A are 0 after the last: verl's ``compute_gae_advantage_return`` without its
    whitening. No gradient flows.

    Args:
        rewards, values, mask: [B, T].
        gamma: Discount.
        lam: Lambda; 1 gives the discounted rewards to come minus the value.

    Returns:
        Advantages and returns (advantage + value), [B, T], both 0 outside the mask.
    """
    inside = mask.bool()
    values = torch.where(inside, values, 0.0)
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        here = inside[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, advantage, 0.0)
    return advantages, advantages + values


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum inside the mask, a float64 scalar."""
    return torch.where(mask.bool(), values, 0.0).sum(dtype=torch.float64)


def token_mean(values: Tensor, mask: Tensor, denominator: float) -> Tensor:
    """This part's share of a mean over tokens: the loss for entropy, or for a KL term.

    Args:
        values, mask: [B, T].
        denominator: Response tokens of the whole mini-batch over all ranks, more than 0.

    Returns:
        A float64 scalar; those of all parts add up to the mean.
    """
    return masked_sum(values, mask) / denominator


@torch.no_grad()
def masked_moments(
    values: Tensor, mask: Tensor, all_reduce: AllReduce
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count over the masks of all ranks.

    The squares are of differences from the global mean, in a second round: E[x²] - E[x]² would
    lose digits where the mean is large.

    Args:
        values, mask: [B, T]; a rank may have nothing inside.
        all_reduce: Sums a float64 tensor over ranks; called twice, on every rank.

    Returns:
        Float64 scalars, the same on every rank. The variance is the unbiased one. With one value it
        is 0, and with none the mean is, too.
    """
    inside = mask.bool()
    local = torch.stack([masked_sum(values, inside), inside.sum(dtype=torch.float64)])
    total, count = all_reduce(local).unbind()
    mean = total / count.clamp(min=1)
    squares = all_reduce(masked_sum((values.double() - mean).square(), inside))
    return mean, squares / (count - 1).clamp(min=1), count


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, all_reduce: AllReduce, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over the masks of all ranks (verl's masked_whiten).

    Args:
        values, mask: [B, T].
        all_reduce: As in ``masked_moments``.
        eps: Added to the variance.

    Returns:
        [B, T] of the dtype of ``values``, 0 outside the mask.
    """
    mean, variance, _ = masked_moments(values, mask, all_reduce)
    whitened = (values.double() - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask.bool(), whitened, 0.0).to(values.dtype)


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, all_reduce: AllReduce
) -> float:
    """1 - Var(returns - values) / Var(returns) over the masks of all ranks.

    Returns:
        At most 1, which is perfect; 0 is no better than a constant. 0 also where all returns are
        equal and there is nothing to explain.
    """
    _, left, _ = masked_moments(returns.double() - values.double(), mask, all_reduce)
    _, whole, _ = masked_moments(returns, mask, all_reduce)
    return 1.0 - float(left / whole) if float(whole) > 0 else 0.0


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio: float,
    denominator: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate, to be minimized (https://arxiv.org/abs/1707.06347, equation 7).

    Args:
        logprobs: [B, T], under the policy in training.
        old_logprobs: [B, T], under the policy that sampled.
        advantages, mask: [B, T].
        clip_ratio: The ratio of probabilities is clipped to 1 ± this.
        denominator: Response tokens of the whole mini-batch over all ranks, more than 0.

    Returns:
        The loss, a float64 scalar, and sums over tokens without a gradient: add them up over
        micro-batches and ranks, then divide by ``denominator``. ``clip_fraction`` counts tokens
        whose gradient the clip stopped; ``approx_kl`` is k1 from the old policy to the new one.
    """
    inside = mask.bool()
    # Masked already here: a NaN outside would come back in the gradient, as 0 · NaN.
    log_ratio = torch.where(inside, logprobs - old_logprobs, 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    loss = token_mean(torch.maximum(plain, clipped), inside, denominator)
    return loss, {
        "clip_fraction": masked_sum((clipped > plain).double(), inside),
        "approx_kl": masked_sum(-log_ratio.detach(), inside),
    }


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_value: float,
    denominator: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped squared error of the critic, with verl's factor 1/2.

    Args:
        values: [B, T], of the critic in training.
        old_values: [B, T], when the batch was sampled.
        returns, mask: [B, T].
        clip_value: How far a value may move from its old one and still lower the loss.
        denominator: As in ``policy_loss``.

    Returns:
        The loss, a float64 scalar, and sums over tokens as from ``policy_loss``: ``clip_fraction``
        counts tokens where the clipped error was the larger one.
    """
    inside = mask.bool()
    error = torch.where(inside, values - returns, 0.0)
    clipped = torch.clamp(values, old_values - clip_value, old_values + clip_value)
    clipped_error = torch.where(inside, clipped - returns, 0.0)
    plain, bounded = error.square(), clipped_error.square()
    loss = 0.5 * token_mean(torch.maximum(plain, bounded), inside, denominator)
    return loss, {"clip_fraction": masked_sum((bounded > plain).double(), inside)}


class KLController:
    """The weight of the KL penalty, constant or steered towards a target.

    Adaptive (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2, as in verl): each
    update multiplies it by 1 + clip(kl / target - 1, ±0.2) · samples / horizon.

    Args:
        coef: The weight, or where it starts.
        controller: ``fixed`` or ``adaptive``.
        target: KL to keep, per token as ``update`` is given it.
        horizon: Samples over which a deviation of 20 % would change the weight by 20 %.

    Attributes:
        coef: The weight now.

    Raises:
        UsageError: an adaptive one whose target or horizon is not positive.
    """

    def __init__(
        self,
        coef: float,
        controller: Controller = "fixed",
        target: float = 0.1,
        horizon: float = 10000.0,
    ) -> None:
        if controller == "adaptive" and not (target > 0 and horizon > 0):
            raise UsageError(
                f"an adaptive KL controller cannot have target {target} and horizon {horizon}",
                hint="set algorithm.kl_target and algorithm.kl_horizon to more than 0",
            )
        self.coef = coef
        self._controller = controller
        self._target = target
        self._horizon = horizon

    def update(self, current_kl: float, samples: int) -> None:
        """Note the KL of a batch of so many samples."""
        if self._controller == "adaptive":
            error = min(max(current_kl / self._target - 1, -0.2), 0.2)
            self.coef *= 1 + error * samples / self._horizon

    def state_dict(self) -> dict[str, str | float]:
        """What a checkpoint keeps."""
        return {"controller": self._controller, "coef": self.coef}

    def load_state_dict(self, state: Mapping[str, str | float]) -> None:
        """Go on from a saved weight, if both were adaptive; else it is a setting and stays."""
        if self._controller == "adaptive" and state["controller"] == "adaptive":
            self.coef = float(state["coef"])


def lr_factor(
    step: int, warmup_steps: int, total_steps: int, schedule: Schedule, min_ratio: float
) -> float:
    """The share of the peak learning rate at an optimizer step.

    Args:
        step: Optimizer steps done before this one: 0 at the first, whose rate is 0 if it is warm-up
            (as in verl and transformers).
        warmup_steps: Steps over which it grows linearly to 1.
        total_steps: Optimizer steps in all; ``linear`` and ``cosine`` (half a wave) fall from the
            end of the warm-up until here, and stay there.
        schedule: After the warm-up.
        min_ratio: Where they end; ``constant`` ignores it.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - min_ratio) * progress
        case "cosine":
            return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise UsageError(f"{schedule!r} is no schedule", hint="constant, linear or cosine")
