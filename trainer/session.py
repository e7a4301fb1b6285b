"""A training run on one rank: built, resumed, trained, saved and ended."""

from __future__ import annotations

import logging
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ckptstore.errors import CkptError, UsageError
from ckptstore.reading import Checkpoint
from ckptstore.store import open_store
from ckptstore.torch import Checkpointer, PendingSave
from ckptstore.uri import Ref
from trainer import checkpointing as keeping
from trainer import resuming
from trainer.alerts import RewardStalled, SizeChanged
from trainer.build import (
    build_data,
    build_roles,
    directory_identity,
    model_files,
    model_paths,
    needs_reference,
)
from trainer.comm import Comm
from trainer.config import Config
from trainer.digest import learner_digest, values_digest
from trainer.export import safetensors_of
from trainer.grace import GraceWatch
from trainer.loop import Interrupted, Metrics, Ppo
from trainer.make_model import ensure_model
from trainer.models import load_tokenizer
from trainer.reach import check_same_store
from trainer.rng import rng_state, seed_all, set_rng_state
from trainer.rollout.base import sample_key
from trainer.saveclock import SaveClock
from trainer.settings import config_digest, to_dict
from trainer.stopping import StopRequest
from trainer.tracking import Tracker

log = logging.getLogger(__name__)

RECORDED = ("reward/mean", "kl/mean", "response/length", "val/reward")
"""Metrics that a checkpoint's record keeps, beside the one that says which is best."""


class Session:
    """A training run on one rank. Making one builds everything and loads what it resumes from.

    Args:
        config: The configuration.
        comm: The ranks.
        notes: What is to be told first.
        dry_run: Build everything, begin nothing.
        stop: Where a wish to stop is left; by default signals leave it.

    Raises:
        CkptError: what a person has to see to before this can train.
    """

    def __init__(
        self,
        config: Config,
        comm: Comm,
        *,
        notes: Sequence[str] = (),
        dry_run: bool = False,
        stop: StopRequest | None = None,
    ) -> None:
        self._config = config
        self._comm = comm
        self._stop = stop or StopRequest(config.trainer)
        storage = config.storage
        store = keeping.open_training_store(config)
        self._checkpointer = Checkpointer(
            store,
            storage.run,
            on_error="raise" if storage.on_save_error == "fail" else "warn",
            best=keeping.best_rule(storage.best_metric),
            threads=storage.threads or None,
            timeout=config.trainer.nccl_timeout,
        )
        ranks = self._ranks = self._checkpointer.ranks
        check_same_store(store, ranks)
        if not dry_run:
            self._checkpointer.life = ranks.on_coordinator(lambda: store.begin_life(storage.run))
        self._origin = self._find_origin()
        first = self._first_look()
        self._scratch = tempfile.TemporaryDirectory(prefix="ckptstore-")
        stored = self._stored_model(first)
        paths = model_paths(config, stored, weights=first is None)
        seed_all(config.trainer.seed)
        self._tokenizer = load_tokenizer(paths.policy, config.model)
        self._data = build_data(config, self._tokenizer, comm)
        self._roles = build_roles(config, paths, self._tokenizer, self._data, comm)
        self._ppo = Ppo(
            config,
            self._roles,
            self._data.prompts,
            self._data.val_prompts,
            self._data.loader,
            self._data.split,
            comm,
            self._interrupted,
        )
        self._identities: dict[str, dict[str, str]] = {}
        self._model_files: dict[str, bytes] = {}
        if comm.is_first:
            if needs_reference(config):
                self._identities["reference"] = directory_identity(paths.reference)
            if config.model.lora.rank:
                same = paths.policy == paths.reference and "reference" in self._identities
                known = self._identities["reference"] if same else None
                self._identities["base"] = known or directory_identity(paths.policy)
            if config.reward.model is not None:
                self._identities["reward"] = directory_identity(Path(config.reward.model))
            self._model_files = model_files(
                paths.policy, config, self._tokenizer, Path(self._scratch.name, "files")
            )
        self.step = 0
        self._best: float | None = None
        self._history: deque[dict[str, Any]] = deque(maxlen=keeping.HISTORY)
        self._saved_step: int | None = None
        self._pending: PendingSave | None = None
        self._last = "there is no checkpoint yet"
        loaded = self._resume()
        if config.storage.async_save and not dry_run:
            self._checkpointer.reserve(
                resuming.state_parts(self._roles, config.storage.save_contents)
            )
        self._clock = SaveClock(config.trainer, self._data.loader.steps_per_epoch)
        self._start_tracking(loaded, notes, dry_run=dry_run)

    # Starting

    def _find_origin(self) -> keeping.Origin | None:
        """What rank 0 finds to start from, on every rank."""
        store = self._checkpointer.store
        found: keeping.Origin | None = None

        def find() -> tuple[str, str, str | None] | None:
            nonlocal found
            found = keeping.find_origin(self._config, store)
            if found is None:
                return None
            return found.uri, found.run, found.ref.selector

        told = self._ranks.on_coordinator(find)
        if told is None or found is not None:
            return found
        uri, run, selector = told
        where = store if uri == self._config.storage.uri else open_store(uri)
        return keeping.Origin(uri, where, run, Ref(None, run, selector))

    def _first_look(self) -> Checkpoint | None:
        """The checkpoint that will most likely be loaded, to build the models by."""
        origin = self._origin
        if origin is None:
            return None
        name = self._ranks.on_coordinator(lambda: origin.plan({}).require().name)
        return origin.store.get(origin.run, name=str(name))

    def _stored_model(self, checkpoint: Checkpoint | None) -> Path | None:
        """A checkpoint's own model files, where the model's directory is not there any more."""
        try:
            ensure_model(self._config.model.path)
        except CkptError:
            if checkpoint is None or self._config.model.lora.rank:
                raise
            return keeping.fetch_model_files(checkpoint, Path(self._scratch.name))
        return None

    def _resume(self) -> resuming.Loaded | None:
        """Load the newest checkpoint that every rank finds intact."""
        origin, config = self._origin, self._config
        if origin is None:
            return None
        loaded: resuming.Loaded | None = None

        def load(checkpoint: Checkpoint) -> None:
            nonlocal loaded
            loaded = resuming.load(
                checkpoint,
                self._roles,
                config,
                rank=self._comm.rank,
                threads=config.storage.threads or None,
            )

        self._checkpointer.newest_intact(
            load, store=origin.store, run=origin.run, plan=self._noted_plan
        )
        assert loaded is not None  # there was one when the origin was found
        resuming.apply(loaded, self._roles, self._ppo, config)
        if loaded.rng is not None and loaded.state.world_size == self._comm.size:
            set_rng_state(loaded.rng)
        else:
            seed_all(sample_key(config.trainer.seed, loaded.state.step, self._comm.rank, 0) % 2**32)
        self.step = loaded.state.step
        name = loaded.checkpoint.name
        self._last = f"step {self.step} ({name}) is the last checkpoint, and stands"
        self._best = loaded.state.best
        self._history.extend(loaded.state.history)
        if origin.is_own(self._checkpointer.store, self._config.storage.run):
            self._saved_step = self.step
        return loaded

    def _noted_plan(self, refused: Any) -> Any:
        """The plan, and what it passes over, to be told once the console is there."""
        assert self._origin is not None
        plan = self._origin.plan(refused)
        self._passed_over = [f"passed over {p.name}: {p.reason}" for p in plan.passed_over]
        return plan

    def _start_tracking(
        self, loaded: resuming.Loaded | None, notes: Sequence[str], *, dry_run: bool
    ) -> None:
        """Open the logs on rank 0 and say what this start is."""
        config, state = self._config, loaded.state if loaded is not None else None
        self._tracker: Tracker | None = None
        alerts = state.alerts if state is not None else {}
        self._reward_alert = RewardStalled(alerts.get("reward"))
        self._size_alert = SizeChanged(config.storage.run, alerts.get("size"))
        changes = self._ranks.on_coordinator(lambda: self._changes(state))
        if not self._comm.is_first:
            return
        self._tracker = Tracker(
            Path(config.trainer.log_dir.replace("{run}", config.storage.run)),
            config.storage.run,
            self._checkpointer.life or 0,
            config.trainer.loggers if not dry_run else (),
            config.trainer.project,
            to_dict(config),
            state.run_ids if state is not None else None,
        )
        for note in notes:
            self._tracker.note(note)
        if not dry_run:
            self._tracker.start(self.step if loaded is not None else None, self._last_step)
        self._say_start(loaded, changes)

    def _changes(self, state: keeping.TrainerState | None) -> list[str]:
        strict = self._config.trainer.resume_strict
        if state is None or strict == "ignore":
            return []
        changes = resuming.what_changed(
            state, self._config, self._data.train.files, self._identities
        )
        if changes and strict == "error":
            raise UsageError(
                f"this is not the training that saved step {state.step}: {'; '.join(changes)}",
                hint="trainer.resume_strict=warn goes on with the new values",
            )
        return changes

    def _say_start(self, loaded: resuming.Loaded | None, changes: Sequence[str]) -> None:
        tracker, store = self._tracker, self._checkpointer.store
        assert tracker is not None
        dropped = self._data.prompts.dropped
        if dropped:
            tracker.warn(f"{dropped} prompts are longer than data.max_prompt_length and left out")
        if loaded is None:
            mode = self._config.trainer.resume_mode
            why = "trainer.resume_mode=none" if mode == "none" else "no checkpoint yet"
            tracker.note(
                f"starting from scratch: {why} of run {self._config.storage.run} in {store.uri}"
            )
            return
        for text in self._passed_over:
            tracker.warn(text)
        checkpoint = loaded.checkpoint
        tracker.note(
            f"resumed from step {loaded.state.step}: {checkpoint.ref} ({checkpoint.name}) "
            f"in {checkpoint.catalog.uri}"
        )
        if loaded.without:
            tracker.warn(
                f"not in the checkpoint, and begun anew: {', '.join(loaded.without)}",
                "training goes on, but not bit for bit as before",
            )
        refused = [c for c in ("optimizer", "extra") if c not in self._config.storage.load_contents]
        if refused:
            tracker.warn(
                f"left out by storage.load_contents, and begun anew: {', '.join(refused)}",
                "training goes on, but not bit for bit as before",
            )
        if loaded.state.world_size != self._comm.size:
            tracker.note(f"saved by {loaded.state.world_size} ranks, loaded by {self._comm.size}")
        if changes:
            tracker.warn(
                "the configuration has changed since, and the new one counts: " + "; ".join(changes)
            )

    # Training

    @property
    def _last_step(self) -> int:
        total, stop_at = self._data.total_steps, self._config.trainer.stop_at_step
        return total if stop_at is None else min(total, stop_at)

    def _interrupted(self) -> bool:
        return self._comm.any(self._stop.wanted())

    def run(self) -> None:
        """Train to the end, or until a stop is asked for; the last state is saved.

        Raises:
            SupersededError: a newer start of this run has taken over.
            CkptError: a save failed with ``on_save_error=fail``, or the last state was not saved.
        """
        config = self._config.trainer
        if config.log_digest and self.step > 0:
            digests = " ".join(f"{name} {value}" for name, value in self._digests().items())
            self._note(f"at the start: {digests}")
        if self.step >= self._last_step:
            self._note(f"there is nothing to train: step {self.step} of {self._last_step} is done")
        watch = None
        if self._tracker is not None:
            say = self._tracker.warn
            watch = GraceWatch(self._stop, config.grace_seconds, lambda: self._last, say)
        try:
            with suppress(Interrupted):
                if config.val_before_train and self.step == 0:
                    self._log({**self._ppo.validate()})
                while self.step < self._last_step and not self._interrupted():
                    self._one_step()
            self._end()
        finally:
            if watch is not None:
                watch.close()

    def _one_step(self) -> None:
        config = self._config.trainer
        metrics = self._ppo.step(self.step + 1)
        self.step += 1
        if config.test_freq > 0 and self.step % config.test_freq == 0:
            with suppress(Interrupted):  # the step itself is done; the next one will not begin
                metrics |= self._ppo.validate()
        if self._pending is not None:
            metrics["time/save_stall"] = self._pending.stall
            self._say_saved()
        if config.log_digest:
            metrics |= self._digests()
        self._log(metrics)
        if self._clock.is_due(self.step):
            self._save()

    def _log(self, metrics: Metrics) -> None:
        rule = keeping.best_rule(self._config.storage.best_metric)
        value = metrics.get(rule.metric) if rule is not None else None
        better = isinstance(value, float) and (
            self._best is None or (rule is not None and rule.better(value, self._best))
        )
        if better:
            assert isinstance(value, float)
            self._best = value
        self._history.append({"step": self.step, **metrics})
        if self._tracker is not None:
            self._tracker.log(self.step, metrics)

    def _digests(self) -> Metrics:
        """Digests over all that a resume must bring back."""
        rng = self._ranks.everywhere(rng_state)
        rest = {
            "rng": rng,
            "loader": self._ppo.loader.state_dict(),
            "kl": self._ppo.kl_controller.state_dict(),
        }
        return {
            "digest/actor": learner_digest(self._roles.actor),
            "digest/critic": learner_digest(self._roles.critic),
            "digest/rest": values_digest(rest),
        }

    def _note(self, text: str) -> None:
        if self._tracker is not None:
            self._tracker.note(text)

    # Saving

    def _save(self) -> None:
        """Save the present step. A collective."""
        storage = self._config.storage
        files: dict[str, bytes] = {}
        if "extra" in storage.save_contents:
            files[keeping.rng_file(self._comm.rank)] = msgspec.json.encode(rng_state())
        exported = None
        if "hf_model" in storage.save_contents:
            exported = safetensors_of(self._roles.actor, self._config.model.dtype, self._comm)
        last = self._history[-1] if self._history else {}
        names = {*RECORDED, *filter(None, [(storage.best_metric or "").rpartition(":")[0]])}
        metrics = {n: v for n, v in last.items() if n in names and isinstance(v, float)}
        self._alert(metrics)
        if self._comm.is_first:
            files[keeping.STATE_FILE] = msgspec.json.format(msgspec.json.encode(self._state()))
            files |= {f"{keeping.MODEL_FILES}/{n}": d for n, d in self._model_files.items()}
            if exported is not None:
                files[f"{keeping.MODEL_FILES}/model.safetensors"] = exported
        self._pending = self._checkpointer.save(
            self.step,
            resuming.state_parts(self._roles, storage.save_contents),
            files=files,
            metadata={"trainer": "ckptstore-ppo", "versions": keeping.versions()},
            metrics=metrics,
            wait=not storage.async_save,
        )
        self._saved_step = self.step
        self._clock.saved()
        if self._tracker is not None:
            self._tracker.flush()

    def _state(self) -> keeping.TrainerState:
        return keeping.TrainerState(
            step=self.step,
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
            best=self._best,
            history=list(self._history),
            alerts={"reward": self._reward_alert.state, "size": self._size_alert.state},
            versions=keeping.versions(),
            run_ids=self._tracker.run_ids if self._tracker is not None else {},
            data=[msgspec.to_builtins(f) for f in self._data.train.files],
            identities=self._identities,
        )

    def _alert(self, metrics: dict[str, Any]) -> None:
        if self._tracker is None:
            return
        reward = metrics.get("reward/mean")
        if reward is not None:
            text = self._reward_alert.check(self.step, reward)
            if text is not None:
                self._tracker.warn(text)

    def _say_saved(self) -> None:
        """Once a save has ended, say how. A collective.

        Raises:
            SupersededError: a newer start of this run has taken over.
            CkptError: it failed, with ``on_save_error=fail``.
        """
        pending = self._pending
        if pending is None or not self._comm.all(pending.done):
            return
        self._pending = None
        self._checkpointer.wait()  # raises what ends the training, and says what does not
        try:
            commit = pending.result()
        except CkptError:
            return
        self._last = f"step {commit.step} ({commit.name}) is the last checkpoint, and stands"
        if self._tracker is not None:
            self._tracker.note(f"saved step {commit.step} ({commit.name})")
            text = self._size_alert.check(commit.step, commit.size)
            if text is not None:
                self._tracker.warn(text)

    def _end(self) -> None:
        """Save what is not saved yet, and wait for it.

        Raises:
            CkptError: it could not be saved.
        """
        reason = self._ranks.everywhere(lambda: self._stop.reason)
        asked = next((r for r in reason if r is not None), None)
        if asked is not None:
            self._note(f"{asked}: saving step {self.step} and ending")
        self._checkpointer.wait()
        if self._saved_step != self.step and (self.step > 0 or asked is None):
            self._save()
        pending = self._pending
        self._checkpointer.wait()
        self._say_saved()
        if pending is not None:
            pending.result()  # the last one must be there, whatever failed saves mean on the way
        self._note(f"ended at step {self.step} of {self._data.total_steps}")

    def close(self) -> None:
        """Let go of everything."""
        self._scratch.cleanup()
        try:
            self._checkpointer.close()
        finally:
            if self._tracker is not None:
                self._tracker.close()
