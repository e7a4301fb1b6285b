"""Saving a training run on one rank: what goes into a checkpoint, and what became of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptstore.errors import CkptError
from ckptstore.torch import Checkpointer, PendingSave
from trainer import checkpointing as keeping
from trainer import resuming
from trainer.alerts import RewardStalled, SizeChanged
from trainer.build import Data, ModelFacts
from trainer.comm import Comm
from trainer.config import Config
from trainer.export import safetensors_of
from trainer.loop import Metrics, Ppo, Roles
from trainer.mirroring import Mirrors
from trainer.rng import rng_state
from trainer.saveclock import SaveClock
from trainer.settings import config_digest, to_dict
from trainer.tracking import Tracker

RECORDED = ("reward/mean", "kl/mean", "response/length", "val/reward")
"""Metrics that a checkpoint's record keeps, beside the one that says which is best."""


@dataclass
class Progress:
    """Where a training run stands.

    Attributes:
        step: Steps done.
        best: The best value of the metric that ``storage.best_metric`` names.
        history: Metrics of the last steps.
        saved_step: The last one that was saved, or whose save has begun.
        last: A sentence about the last checkpoint.
    """

    step: int = 0
    best: float | None = None
    history: deque[dict[str, Any]] = field(
        default_factory=lambda: deque(maxlen=keeping.HISTORY),
    )
    saved_step: int | None = None
    last: str = "there is no checkpoint yet"


class Saver:
    """Saves a run on one rank, when it is due and at the end. Its methods are collectives.

    Args:
        config: The configuration.
        comm: The ranks.
        checkpointer: Writes.
        roles, ppo, data, facts: What is saved.
        progress: Where the run stands; kept up to date.
        tracker: Where what happens is told; ``None`` on all ranks but the first.
        alerts: What the alerts remember from the checkpoint that was resumed from.
        mirrors: The mirrors of the store; ``None`` without any, and on all ranks but the first.
    """

    def __init__(
        self,
        config: Config,
        comm: Comm,
        checkpointer: Checkpointer,
        roles: Roles,
        ppo: Ppo,
        data: Data,
        facts: ModelFacts,
        progress: Progress,
        tracker: Tracker | None,
        alerts: Mapping[str, Any],
        mirrors: Mirrors | None,
    ) -> None:
        self._config = config
        self._comm = comm
        self._checkpointer = checkpointer
        self._roles = roles
        self._ppo = ppo
        self._data = data
        self._facts = facts
        self._progress = progress
        self._tracker = tracker
        self._mirrors = mirrors
        self._reward_alert = RewardStalled(alerts.get("reward"))
        self._size_alert = SizeChanged(config.storage.run, alerts.get("size"))
        self._clock = SaveClock(config.trainer, data.loader.steps_per_epoch)
        self._pending: PendingSave | None = None

    def save_if_due(self) -> None:
        """Save the present step if it is one that is saved."""
        if self._clock.is_due(self._progress.step):
            self.save()

    def save(self) -> None:
        """Save the present step."""
        storage, progress = self._config.storage, self._progress
        files: dict[str, bytes] = {}
        if "extra" in storage.save_contents:
            files[keeping.rng_file(self._comm.rank)] = msgspec.json.encode(rng_state())
        exported = None
        if "hf_model" in storage.save_contents:
            exported = safetensors_of(self._roles.actor, self._config.model.dtype, self._comm)
        last = progress.history[-1] if progress.history else {}
        names = {*RECORDED, *filter(None, [(storage.best_metric or "").rpartition(":")[0]])}
        metrics = {n: v for n, v in last.items() if n in names and isinstance(v, float)}
        self._alert(metrics)
        if self._comm.is_first:
            files[keeping.STATE_FILE] = msgspec.json.format(msgspec.json.encode(self._state()))
            files |= self._facts.files
            if exported is not None:
                files[f"{keeping.MODEL_FILES}/model.safetensors"] = exported
        self._pending = self._checkpointer.save(
            progress.step,
            resuming.state_parts(self._roles, storage.save_contents),
            files=files,
            metadata={"trainer": "ckptstore-ppo", "versions": keeping.versions()},
            metrics=metrics,
            wait=not storage.async_save,
        )
        progress.saved_step = progress.step
        self._clock.saved()
        if self._tracker is not None:
            self._tracker.flush()

    def _state(self) -> keeping.TrainerState:
        progress = self._progress
        return keeping.TrainerState(
            step=progress.step,
            life=self._checkpointer.life or 0,
            loader=self._ppo.loader.state_dict(),
            kl_controller=self._ppo.kl_controller.state_dict(),
            schedules={
                role: learner.schedule_state()
                for role, learner in resuming.learners(self._roles).items()
            },
            config=to_dict(self._config),
            config_digest=config_digest(self._config),
            world_size=self._comm.size,
            best=progress.best,
            history=list(progress.history),
            alerts=self._alerts(),
            versions=keeping.versions(),
            run_ids=self._tracker.run_ids if self._tracker is not None else {},
            data=[msgspec.to_builtins(f) for f in self._data.train.files],
            identities=self._facts.identities,
        )

    def _alerts(self) -> dict[str, Any]:
        states = {"reward": self._reward_alert.state, "size": self._size_alert.state}
        if self._mirrors is not None:
            states["mirrors"] = self._mirrors.alert_state
        return states

    def _alert(self, metrics: Mapping[str, Any]) -> None:
        if self._tracker is None:
            return
        reward = metrics.get("reward/mean")
        if reward is not None:
            text = self._reward_alert.check(self._progress.step, reward)
            if text is not None:
                self._tracker.warn(text)

    def follow(self) -> Metrics:
        """Once a save has ended, say how; what there is to log of it.

        Raises:
            SupersededError: a newer start of this run has taken over.
            CkptError: it failed, with ``on_save_error=fail``.
        """
        metrics = self._mirrors.metrics if self._mirrors is not None else {}
        pending = self._pending
        if pending is None:
            return metrics
        self._say_saved(pending)
        return {**metrics, "time/save_stall": pending.stall}

    def _say_saved(self, pending: PendingSave) -> None:
        if not self._comm.all(pending.done):
            return
        self._pending = None
        self._checkpointer.wait()  # raises what ends the training, and says what does not
        try:
            commit = pending.result()
        except CkptError:
            return
        name = commit.name
        self._progress.last = f"step {commit.step} ({name}) is the last checkpoint, and stands"
        if self._tracker is not None:
            self._tracker.note(f"saved step {commit.step} ({name})")
            if self._mirrors is not None:
                self._mirrors.saved()
            text = self._size_alert.check(commit.step, commit.size)
            if text is not None:
                self._tracker.warn(text)

    def finish(self, *, save: bool) -> None:
        """Save the present step if it is not saved yet and this is wanted, and wait for it.

        Raises:
            CkptError: it could not be saved.
        """
        self._checkpointer.wait()
        if save and self._progress.saved_step != self._progress.step:
            self.save()
        pending = self._pending
        self._checkpointer.wait()
        if pending is not None:
            self._say_saved(pending)
            pending.result()  # the last one must be there, whatever failed saves mean on the way
