"""The roles that learn: an actor and a critic, each a sharded model with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer import ppo
from trainer.batch import Batch
from trainer.comm import Comm
from trainer.config import OptimConfig
from trainer.models import adapters_of, state_of, whole
from trainer.offload import HostState

LossFunction = Callable[[Batch, slice], tuple[Tensor, Mapping[str, Tensor]]]
"""Loss of a micro-batch, as its share of the mini-batch's mean, and sums to be reported."""


class Learner:
    """A sharded model and its AdamW.

    Args:
        model: The model, sharded.
        config: The optimizer and its schedule.
        total_steps: Optimizer steps in all, for the schedule.
        comm: The ranks.
        offload: Keep AdamW's tensors in host memory while it does not step.

    Attributes:
        model: The model.
        steps: Optimizer steps done.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        total_steps: int,
        comm: Comm,
        *,
        offload: bool = False,
    ) -> None:
        self.model = model
        self.steps = 0
        self._config = config
        self._total_steps = total_steps
        self._comm = comm
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self._host_state = HostState(self._optimizer) if offload else None

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer step: a function of their number alone."""
        config = self._config
        factor = ppo.lr_factor(
            self.steps, config.warmup_steps, self._total_steps, config.schedule, config.min_lr_ratio
        )
        return config.lr * factor

    def update(
        self, batch: Batch, part: slice, micro_batch_size: int, loss_of: LossFunction
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch.

        Args:
            batch: This rank's samples.
            part: Those of the mini-batch.
            micro_batch_size: Samples a pass; 0 is all.
            loss_of: The loss of each micro-batch.

        Returns:
            The mini-batch's loss and sums, over all ranks, and ``grad_norm``.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
        self._optimizer.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = {}
        for rows, micro in batch.micro_batches(part, micro_batch_size):
            loss, sums = loss_of(micro, rows)
            # FSDP averages gradients over the ranks, and the losses of all ranks are to be added.
            (loss * self._comm.size).backward()  # type: ignore[no-untyped-call]
            for name, value in {"loss": loss.detach(), **sums}.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        norm = self._clip()
        with self._host_state.on_device() if self._host_state is not None else nullcontext():
            self._optimizer.step()
        self.steps += 1
        names = sorted(totals)
        summed = self._comm.sum(torch.stack([totals[n].double() for n in names]))
        return {**dict(zip(names, summed.tolist(), strict=True)), "grad_norm": norm}

    def _clip(self) -> float:
        """Scale the gradient down to the largest norm that is allowed; its norm before."""
        limit = self._config.grad_clip or torch.inf
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        return float(whole(norm))

    # What a checkpoint holds

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters learn, on a base that stays as it is."""
        return any(".lora_" in name for name in self._parameters)

    def model_state(self) -> dict[str, Tensor]:
        """What of the model learns; loading into these tensors loads it."""
        return adapters_of(self.model) if self.has_adapters else state_of(self.model)

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's tensors by parameter; they exist, as zeros, also before the first step."""
        for parameter in self._parameters.values():
            own = self._optimizer.state[parameter]
            if not own:
                own["step"] = torch.tensor(0.0)
                own["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                own["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if self._host_state is not None:
            self._host_state.rest()
        return {
            name: {key: value.detach() for key, value in self._optimizer.state[parameter].items()}
            for name, parameter in self._parameters.items()
        }

    def schedule_state(self) -> dict[str, Any]:
        """Where the learning rate's schedule stands."""
        return {"steps": self.steps, "lr": self.lr}

    def load_schedule(self, state: Mapping[str, Any]) -> None:
        """Go on after so many optimizer steps; the rate itself is the configuration's."""
        self.steps = int(state["steps"])
