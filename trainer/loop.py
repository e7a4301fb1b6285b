"""PPO: one step, and the course of training. The same on one process, torchrun and Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer import ppo
from trainer.batch import Batch, Split
from trainer.comm import Comm
from trainer.config import Config
from trainer.data import Prompts, Sample
from trainer.loader import Loader
from trainer.models import full_weights
from trainer.rng import rng_state, rng_untouched, set_rng_state
from trainer.roles import Learner
from trainer.rollout.base import Response, Rollout, Sampling, sample_key

Metrics = dict[str, float | str]

_VALIDATION = -1
"""Stands for the step in the keys of validation's responses."""


class Interrupted(Exception):  # noqa: N818 - it is no error
    """A stop was asked for while a step's samples were being made: the step is abandoned."""


@dataclass
class Roles:
    """Everything that a step works with.

    Attributes:
        actor, critic: What learns.
        reference: Frozen, as sharded as the actor; ``None`` where no KL term needs it.
        rollout: Generates.
        judge: The rewards of responses to samples.
        decode: From token ids to a text.
        pad: The token that fills.
    """

    actor: Learner
    critic: Learner
    reference: torch.nn.Module | None
    rollout: Rollout
    judge: Callable[[Sequence[Sample], Sequence[str]], list[float]]
    decode: Callable[[Sequence[int]], str]
    pad: int


@dataclass
class _Experience:
    """Samples of a rank with all that the update needs; tensors are [B, R].

    ``kl_mean`` and ``samples`` are over all ranks.
    """

    batch: Batch
    logprobs: Tensor
    reference_logprobs: Tensor | None
    values: Tensor
    advantages: Tensor
    returns: Tensor
    kl_mean: float
    samples: int


class Ppo:
    """One rank's part of the algorithm.

    Args:
        config: The configuration.
        roles: What it works with.
        prompts, val_prompts: The data.
        loader: The order of prompts.
        split: Who computes which sample.
        comm: The ranks.
        interrupted: Polled between the parts of a step; all ranks get the same answer.

    Attributes:
        kl_controller: The weight of the KL penalty.
        loader: Where the data stands.
    """

    def __init__(
        self,
        config: Config,
        roles: Roles,
        prompts: Prompts,
        val_prompts: Prompts | None,
        loader: Loader,
        split: Split,
        comm: Comm,
        interrupted: Callable[[], bool],
    ) -> None:
        algorithm = config.algorithm
        self.loader = loader
        self.kl_controller = ppo.KLController(
            algorithm.kl_coef,
            algorithm.kl_controller,
            algorithm.kl_target,
            algorithm.kl_horizon,
        )
        self._config = config
        self._roles = roles
        self._prompts = prompts
        self._val_prompts = val_prompts
        self._split = split
        self._comm = comm
        self._interrupted = interrupted

    def step(self, step: int) -> Metrics:
        """Train one step, counted from 1. A collective.

        Raises:
            Interrupted: a stop was asked for before the update began; nothing has changed.
        """
        timer = _Timer()
        before, chance = self.loader.state_dict(), rng_state()
        try:
            epoch, indices = self.loader.next_batch()
            with timer("rollout"):
                samples, keys = self._own_samples(step, indices)
                responses = self._generate(samples, keys, self._sampling())
                self._poll()
            with timer("experience"):
                experience, metrics = self._experience(samples, responses)
                self._poll()
        except BaseException:
            self.loader.load_state_dict(before)
            set_rng_state(chance)  # a reward function may have drawn
            raise
        self.kl_controller.update(experience.kl_mean, experience.samples)
        with timer("update"):
            metrics |= self._update(step, experience)
        return {**metrics, "data/epoch": float(epoch), **timer.metrics()}

    def validate(self) -> Metrics:
        """The mean reward of the validation prompts. A collective; it changes nothing.

        Raises:
            Interrupted: a stop was asked for.
        """
        if self._val_prompts is None:
            return {}
        with rng_untouched():  # a reward function may draw
            return self._validate(self._val_prompts)

    def _validate(self, prompts: Prompts) -> Metrics:
        config = self._config
        sampling = self._sampling(temperature=config.rollout.val_temperature)
        seed = config.trainer.seed
        sums = torch.zeros(3, dtype=torch.float64)
        size = config.data.val_batch_size
        for start in range(0, len(prompts.samples), size):
            # Each rank has its share of every batch, perhaps none of a short last one.
            chosen = range(start, min(start + size, len(prompts.samples)))
            own = list(chosen)[self._comm.rank :: self._comm.size]
            pairs = [(prompts.samples[i], prompts.token_ids[i]) for i in own]
            keys = [sample_key(seed, _VALIDATION, sample.id, 0) for sample, _ in pairs]
            responses = self._generate(pairs, keys, sampling)
            rewards = self._judge(pairs, responses)
            lengths = [len(r.tokens) for r in responses]
            sums += torch.tensor([len(own), sum(rewards), sum(lengths)], dtype=torch.float64)
            self._poll()
        count, reward, length = self._comm.sum(sums).tolist()
        return {"val/reward": reward / count, "val/response_length": length / count}

    # Samples

    def _own_samples(
        self, step: int, indices: Sequence[int]
    ) -> tuple[list[tuple[Sample, list[int]]], list[int]]:
        """This rank's prompts, one for each response, and the responses' keys."""
        repetitions = self._config.rollout.n
        pairs, keys = [], []
        for number in self._split.of_rank(self._comm.rank):
            index, repetition = indices[number // repetitions], number % repetitions
            sample = self._prompts.samples[index]
            pairs.append((sample, self._prompts.token_ids[index]))
            keys.append(sample_key(self._config.trainer.seed, step, sample.id, repetition))
        return pairs, keys

    def _sampling(self, temperature: float | None = None) -> Sampling:
        rollout = self._config.rollout
        return Sampling(
            rollout.max_new_tokens,
            rollout.temperature if temperature is None else temperature,
            rollout.top_p,
            rollout.top_k,
        )

    def _generate(
        self, pairs: Sequence[tuple[Sample, list[int]]], keys: Sequence[int], sampling: Sampling
    ) -> list[Response]:
        roles = self._roles
        if not self._comm.all(roles.rollout.version == roles.actor.steps):
            roles.rollout.load_weights(full_weights(roles.actor.model), roles.actor.steps)
        return roles.rollout.generate([ids for _, ids in pairs], keys, sampling)

    def _judge(
        self, pairs: Sequence[tuple[Sample, list[int]]], responses: Sequence[Response]
    ) -> list[float]:
        texts = [self._roles.decode(response.tokens) for response in responses]
        return self._roles.judge([sample for sample, _ in pairs], texts)

    def _poll(self) -> None:
        if self._interrupted():
            raise Interrupted

    # Experience

    @torch.no_grad()
    def _experience(
        self, pairs: Sequence[tuple[Sample, list[int]]], responses: Sequence[Response]
    ) -> tuple[_Experience, Metrics]:
        roles, algorithm, comm = self._roles, self._config.algorithm, self._comm
        rewards = self._judge(pairs, responses)
        batch = Batch.build(
            [ids for _, ids in pairs], [r.tokens for r in responses], roles.pad, comm.device
        )
        scores = torch.tensor(rewards, device=comm.device)
        logprobs = self._all_rows(batch, self._config.actor.micro_batch_size, self._logprobs)
        reference = None
        kl = torch.zeros_like(logprobs)
        if roles.reference is not None:
            model = roles.reference
            reference = self._all_rows(
                batch,
                self._config.actor.micro_batch_size,
                lambda micro: self._logprobs(micro, model),
            )
            kl = ppo.kl(logprobs, reference, algorithm.kl_estimator)
        values = self._all_rows(batch, self._critic_micro_batch_size, self._values)
        coef = self.kl_controller.coef
        token_rewards = ppo.token_rewards(scores, kl, batch.mask, coef)
        advantages, returns = ppo.gae(
            token_rewards, values, batch.mask, algorithm.gamma, algorithm.lam
        )
        if algorithm.whiten_advantages:
            advantages = ppo.whiten(advantages, batch.mask, comm.sum)
        kl_mean, _, _ = ppo.masked_moments(kl, batch.mask, comm.sum)
        every = torch.ones_like(scores)[:, None]
        reward_mean, reward_variance, count = ppo.masked_moments(scores[:, None], every, comm.sum)
        lengths = batch.response_lengths[:, None].double()
        length_mean, _, _ = ppo.masked_moments(lengths, every, comm.sum)
        metrics: Metrics = {
            "reward/mean": float(reward_mean),
            "reward/std": float(reward_variance.sqrt()),
            "kl/mean": float(kl_mean),
            "kl/coef": coef,
            "response/length": float(length_mean),
            "rollout/logprob_diff": self._logprob_diff(batch, logprobs, responses),
            "critic/explained_variance": ppo.explained_variance(
                values, returns, batch.mask, comm.sum
            ),
        }
        experience = _Experience(
            batch, logprobs, reference, values, advantages, returns, float(kl_mean), int(count)
        )
        return experience, metrics

    @staticmethod
    def _all_rows(batch: Batch, size: int, values_of: Callable[[Batch], Tensor]) -> Tensor:
        parts = [values_of(micro) for _, micro in batch.micro_batches(slice(None), size)]
        return torch.cat(parts)

    def _logits(self, batch: Batch, model: torch.nn.Module) -> Tensor:
        """[B, R, V]: what predicts each response token, at the temperature of sampling."""
        out = model(
            input_ids=batch.tokens,
            attention_mask=batch.attention,
            position_ids=batch.positions,
            use_cache=False,
        )
        logits = batch.before_response(out.logits)
        temperature = self._config.rollout.temperature
        return logits if temperature == 1.0 else logits / temperature

    def _logprobs(self, batch: Batch, model: torch.nn.Module | None = None) -> Tensor:
        logits = self._logits(batch, model or self._roles.actor.model)
        return ppo.token_logprobs(logits, batch.response_tokens) * batch.mask

    def _values(self, batch: Batch) -> Tensor:
        values: Tensor = self._roles.critic.model(batch.tokens, batch.attention, batch.positions)
        return batch.before_response(values) * batch.mask

    def _logprob_diff(self, batch: Batch, logprobs: Tensor, responses: Sequence[Response]) -> float:
        """How far the engine's log-probabilities are from the actor's, in the mean."""
        theirs = torch.zeros_like(logprobs)
        for row, response in zip(theirs, responses, strict=True):
            row[: len(response.logprobs)] = torch.tensor(response.logprobs)
        mean, _, _ = ppo.masked_moments((theirs - logprobs).abs(), batch.mask, self._comm.sum)
        return float(mean)

    # Update

    @property
    def _critic_micro_batch_size(self) -> int:
        return self._config.critic.micro_batch_size or self._config.actor.micro_batch_size

    def _update(self, step: int, experience: _Experience) -> Metrics:
        config = self._config
        critic_epochs = config.critic.epochs or config.actor.epochs
        critic = self._train(
            self._roles.critic,
            experience,
            self._split.critic,
            critic_epochs,
            self._critic_micro_batch_size,
            self._critic_loss,
        )
        metrics = {f"critic/{k}": v for k, v in critic.items()}
        metrics["critic/lr"] = self._roles.critic.lr
        if step > config.critic.warmup_steps:
            actor = self._train(
                self._roles.actor,
                experience,
                self._split.actor,
                config.actor.epochs,
                config.actor.micro_batch_size,
                self._actor_loss,
            )
            metrics |= {f"actor/{k}": v for k, v in actor.items()}
            metrics["actor/lr"] = self._roles.actor.lr
        return dict(metrics)

    def _train(
        self,
        learner: Learner,
        experience: _Experience,
        mini_batch: int,
        epochs: int,
        micro_batch: int,
        loss_of: Callable[[_Experience, float], Callable[..., tuple[Tensor, Mapping[str, Tensor]]]],
    ) -> dict[str, float]:
        """All optimizer steps of one learner; the means of what they report."""
        batch = experience.batch
        totals: dict[str, float] = {}
        updates = 0
        for _ in range(epochs):
            for part in self._split.mini_batches(mini_batch):
                tokens = batch.mask[part].sum(dtype=torch.float64)
                denominator = max(1.0, float(self._comm.sum(tokens)))
                found = learner.update(batch, part, micro_batch, loss_of(experience, denominator))
                updates += 1
                for name, value in found.items():
                    share = value if name in ("loss", "grad_norm") else value / denominator
                    totals[name] = totals.get(name, 0.0) + share
        return {name: value / updates for name, value in totals.items()}

    def _actor_loss(
        self, experience: _Experience, denominator: float
    ) -> Callable[[Batch, slice], tuple[Tensor, Mapping[str, Tensor]]]:
        config = self._config.actor

        def loss_of(micro: Batch, rows: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
            logits = self._logits(micro, self._roles.actor.model)
            logprobs = ppo.token_logprobs(logits, micro.response_tokens)
            loss, sums = ppo.policy_loss(
                logprobs,
                experience.logprobs[rows],
                experience.advantages[rows],
                micro.mask,
                config.clip_ratio,
                denominator,
            )
            entropy = ppo.entropy(logits) if config.entropy_coef else None
            if entropy is not None:
                loss = loss - config.entropy_coef * ppo.token_mean(entropy, micro.mask, denominator)
                sums["entropy"] = ppo.masked_sum(entropy.detach(), micro.mask)
            if config.kl_loss_coef and experience.reference_logprobs is not None:
                # Of the estimators only this one's gradient is that of KL; k1's is 0 in the mean.
                kl = ppo.kl(logprobs, experience.reference_logprobs[rows], "k2")
                loss = loss + config.kl_loss_coef * ppo.token_mean(kl, micro.mask, denominator)
                sums["kl_loss"] = ppo.masked_sum(kl.detach(), micro.mask)
            return loss, sums

        return loss_of

    def _critic_loss(
        self, experience: _Experience, denominator: float
    ) -> Callable[[Batch, slice], tuple[Tensor, Mapping[str, Tensor]]]:
        clip_value = self._config.critic.clip_value

        def loss_of(micro: Batch, rows: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
            return ppo.value_loss(
                micro.before_response(
                    self._roles.critic.model(micro.tokens, micro.attention, micro.positions)
                ),
                experience.values[rows],
                experience.returns[rows],
                micro.mask,
                clip_value,
                denominator,
            )

        return loss_of


class _Timer:
    """How long the parts of a step take."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._parts[part] = time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        """In seconds."""
        whole = time.perf_counter() - self._begun
        return {"time/step": whole, **{f"time/{k}": v for k, v in self._parts.items()}}
