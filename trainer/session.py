"""A training run on one rank: built, resumed, trained, saved and ended."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ckptstore.errors import CkptError, NotFoundError
from ckptstore.reading import Checkpoint
from ckptstore.store import open_store
from ckptstore.torch import Checkpointer
from ckptstore.uri import Ref
from trainer import checkpointing as keeping
from trainer import resuming
from trainer.build import (
    StoredModels,
    build_data,
    build_roles,
    model_facts,
    model_paths,
)
from trainer.comm import Comm
from trainer.config import Config
from trainer.digest import learner_digest, values_digest
from trainer.grace import GraceWatch
from trainer.loop import Interrupted, Metrics, Ppo
from trainer.make_model import ensure_model
from trainer.mirroring import Mirrors, check_not_lost
from trainer.models import load_tokenizer
from trainer.reach import check_same_store
from trainer.rng import rng_state, seed_all, set_rng_state
from trainer.rollout.base import sample_key
from trainer.saving import Progress, Saver
from trainer.settings import to_dict
from trainer.startnotes import changes_since, say_from_scratch, say_resumed
from trainer.stopping import StopRequest
from trainer.tracking import Tracker

log = logging.getLogger(__name__)


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
        self._ended: Literal["done", "in a hurry"] | None = None
        storage = config.storage
        store = keeping.open_training_store(config)
        self._checkpointer = Checkpointer(
            store,
            storage.run,
            on_error="raise" if storage.on_save_error == "fail" else "warn",
            best=keeping.best_rule(storage.best_metric),
            retention=keeping.retention_policy(storage),
            threads=storage.threads or None,
            timeout=config.trainer.nccl_timeout,
        )
        ranks = self._ranks = self._checkpointer.ranks
        notes = [*notes, *ranks.on_coordinator(lambda: check_not_lost(config, store))]
        check_same_store(store, ranks)
        if not dry_run:
            self._checkpointer.life = ranks.on_coordinator(lambda: store.begin_life(storage.run))
        self._origin = self._find_origin()
        first = self._first_look()
        self._scratch = tempfile.TemporaryDirectory(prefix="ckptstore-")
        paths = model_paths(config, self._stored_models(first), weights=first is None)
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
        self._facts = model_facts(
            config, paths, self._tokenizer, comm, Path(self._scratch.name, "files")
        )
        self._progress = Progress()
        loaded = self._resume()
        if config.storage.async_save and not dry_run:
            self._checkpointer.reserve(
                resuming.state_parts(self._roles, config.storage.save_contents)
            )
        self._tracker = self._start_tracking(loaded, notes, dry_run=dry_run)
        alerts = loaded.state.alerts if loaded is not None else {}
        self._mirrors = self._start_mirrors(alerts) if not dry_run else None
        self._saver = Saver(
            config,
            comm,
            self._checkpointer,
            self._roles,
            self._ppo,
            self._data,
            self._facts,
            self._progress,
            self._tracker,
            alerts,
            self._mirrors,
        )

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

    def _stored_models(self, checkpoint: Checkpoint | None) -> StoredModels:
        """A checkpoint's own model files, where a model's directory is not there any more."""
        model = self._config.model
        policy = critic = None
        if not model.lora.rank:  # its base is in no checkpoint
            policy = self._stored(checkpoint, model.path, keeping.MODEL_FILES)
        if model.critic_path is not None:
            critic = self._stored(checkpoint, model.critic_path, keeping.CRITIC_FILES)
        return StoredModels(policy, critic)

    def _stored(self, checkpoint: Checkpoint | None, path: str, kept: str) -> Path | None:
        if checkpoint is None:
            return None
        try:
            ensure_model(path)
        except CkptError:
            return keeping.fetch_model_files(checkpoint, Path(self._scratch.name), kept)
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
        if loaded is None:
            raise NotFoundError(
                f"the checkpoint to resume from, {origin.ref}, was deleted meanwhile",
                hint="the same command again looks for another one",
            )
        resuming.apply(loaded, self._roles, self._ppo, config)
        if loaded.rng is not None and loaded.state.world_size == self._comm.size:
            set_rng_state(loaded.rng)
        else:
            seed_all(sample_key(config.trainer.seed, loaded.state.step, self._comm.rank, 0) % 2**32)
        state, progress = loaded.state, self._progress
        progress.step = state.step
        name = loaded.checkpoint.name
        progress.last = f"step {state.step} ({name}) is the last checkpoint, and stands"
        progress.best = state.best
        progress.history.extend(state.history)
        if origin.is_own(self._checkpointer.store, config.storage.run):
            progress.saved_step = state.step
        return loaded

    def _noted_plan(self, refused: Any) -> Any:
        """The plan, and what it passes over, to be told once the console is there."""
        assert self._origin is not None
        plan = self._origin.plan(refused)
        self._passed_over = [f"passed over {p.name}: {p}" for p in plan.passed_over]
        return plan

    def _start_tracking(
        self, loaded: resuming.Loaded | None, notes: Sequence[str], *, dry_run: bool
    ) -> Tracker | None:
        """Open the logs on rank 0 and say what this start is."""
        config, state = self._config, loaded.state if loaded is not None else None
        files, identities = self._data.train.files, self._facts.identities
        changes = self._ranks.on_coordinator(
            lambda: changes_since(state, config, files, identities)
        )
        if not self._comm.is_first:
            return None
        tracker = Tracker(
            Path(config.trainer.log_dir.replace("{run}", config.storage.run)),
            config.storage.run,
            self._checkpointer.life or 0,
            config.trainer.loggers if not dry_run else (),
            config.trainer.project,
            to_dict(config),
            state.run_ids if state is not None else None,
        )
        for note in notes:
            tracker.note(note)
        if not dry_run:
            tracker.start(state.step if state is not None else None, self._last_step)
        dropped = self._data.prompts.dropped
        if dropped:
            tracker.warn(f"{dropped} prompts are longer than data.max_prompt_length and left out")
        if loaded is None:
            say_from_scratch(tracker, config, self._checkpointer.store.uri)
        else:
            size = self._comm.size
            say_resumed(tracker, config, loaded, size, self._passed_over, changes)
        return tracker

    def _start_mirrors(self, alerts: Mapping[str, Any]) -> Mirrors | None:
        """Start mirroring, on rank 0."""
        if self._tracker is None or not self._config.storage.mirrors:
            return None
        log_dir, store = self._tracker.log_dir, self._checkpointer.store
        try:
            return Mirrors(self._config, store, log_dir, self._tracker, alerts.get("mirrors"))
        except CkptError as error:
            self._tracker.warn(f"this run is not mirrored: {error}", error.hint)
            return None

    # Training

    @property
    def step(self) -> int:
        """Steps done."""
        return self._progress.step

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
            watch = GraceWatch(self._stop, config.grace_seconds, lambda: self._progress.last, say)
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
        self._progress.step += 1
        if config.test_freq > 0 and self.step % config.test_freq == 0:
            with suppress(Interrupted):  # the step itself is done; the next one will not begin
                metrics |= self._ppo.validate()
        metrics |= self._saver.follow()
        if config.log_digest:
            metrics |= self._digests()
        self._log(metrics)
        self._saver.save_if_due()

    def _log(self, metrics: Metrics) -> None:
        rule, best = keeping.best_rule(self._config.storage.best_metric), self._progress.best
        value = metrics.get(rule.metric) if rule is not None else None
        better = isinstance(value, float) and (
            best is None or (rule is not None and rule.better(value, best))
        )
        if better:
            assert isinstance(value, float)
            self._progress.best = value
        self._progress.history.append({"step": self.step, **metrics})
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

    # Ending

    def _end(self) -> None:
        """Save what is not saved yet, and wait for it.

        Raises:
            CkptError: it could not be saved.
        """
        reason = self._ranks.everywhere(lambda: self._stop.reason)
        asked = next((r for r in reason if r is not None), None)
        if asked is not None:
            self._note(f"{asked}: saving step {self.step} and ending")
        self._saver.finish(save=self.step > 0 or asked is None)
        self._ended = "in a hurry" if asked is not None else "done"
        self._note(f"ended at step {self.step} of {self._data.total_steps}")

    def _end_mirrors(self) -> None:
        if self._mirrors is None:
            return
        if self._ended is None:
            self._mirrors.leave()
        else:
            self._mirrors.finish(hurry=self._ended == "in a hurry")

    def close(self) -> None:
        """Let go of everything; the mirrors may be waited for."""
        self._scratch.cleanup()
        try:
            self._checkpointer.close()
            self._end_mirrors()
        finally:
            if self._tracker is not None:
                self._tracker.close()
