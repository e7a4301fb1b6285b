"""What a training run keeps in a checkpoint, when it saves, and what it resumes from."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    UsageError,
)
from ckptstore.layout import Name
from ckptstore.maintenance.policy import Policy
from ckptstore.reading import Checkpoint
from ckptstore.records import BestRule
from ckptstore.resume import ResumePlan, plan_from, plan_resume
from ckptstore.sizes import parse_size
from ckptstore.store import Store, open_store
from ckptstore.uri import Ref, parse_ref
from ckptstore.version import __version__
from trainer.config import Config, StorageConfig

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
MODEL_FILES = "actor/hf"
"""The policy's configuration and tokenizer, as transformers reads them."""

CRITIC_FILES = "critic/hf"
"""The configuration of a critic whose backbone is another model's."""

HISTORY = 200
"""Steps of metrics that a checkpoint keeps."""


def rng_file(rank: int) -> str:
    """Where a rank's random generators are kept."""
    return f"rng/rank-{rank:05d}.json"


class TrainerState(msgspec.Struct, kw_only=True):
    """``trainer_state.json``.

    Attributes:
        step: Steps done.
        life: Which start of the run saved it.
        loader: Where the data stands; ``epoch`` and ``consumed`` samples are in it.
        kl_controller: The weight of the KL penalty.
        schedules: Where each learner's learning rate stands.
        best: The best value of the metric that ``storage.best_metric`` names.
        history: Metrics of the last steps, a mapping a step.
        alerts: What the alerts remember.
        config: The configuration, whole.
        config_digest: Digest of the part of it that changes training.
        versions: Of Python, torch, transformers and ckptstore.
        world_size: Ranks that trained.
        run_ids: Ids of the run in services.
        data, val_data: Identity of the data files.
        identities: Path and digest of the reference model and of the reward.
    """

    step: int
    life: int
    loader: dict[str, Any]
    kl_controller: dict[str, Any]
    schedules: dict[str, dict[str, Any]]
    config: dict[str, Any]
    config_digest: str
    world_size: int
    best: float | None = None
    history: list[dict[str, Any]] = []
    alerts: dict[str, Any] = {}
    versions: dict[str, str] = {}
    run_ids: dict[str, str] = {}
    data: list[dict[str, Any]] = []
    val_data: list[dict[str, Any]] = []
    identities: dict[str, dict[str, str]] = {}


def versions() -> dict[str, str]:
    """What this process runs."""
    import transformers

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "ckptstore": __version__,
    }


def read_state(checkpoint: Checkpoint) -> TrainerState:
    """The trainer's own state in a checkpoint.

    Raises:
        UsageError: the checkpoint is not of this trainer.
        IntegrityError: its state cannot be understood.
    """
    try:
        data = checkpoint.read_bytes(STATE_FILE)
    except NotFoundError as error:
        raise UsageError(
            f"{checkpoint.ref} is no checkpoint of this trainer: it has no {STATE_FILE}",
            hint="to start from a model's weights, set model.path",
        ) from error
    try:
        return msgspec.json.decode(data, type=TrainerState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"{checkpoint.ref}: {STATE_FILE} cannot be understood: {error}"
        raise IntegrityError(what) from error


@dataclass(frozen=True)
class Origin:
    """Where a run starts from.

    Attributes:
        uri: The store's URI, with its options.
        store, run: Where to look.
        ref: Which checkpoint there.
        found: The plan by which it was found; on the rank that looked.
    """

    uri: str
    store: Store
    run: str
    ref: Ref
    found: ResumePlan | None = None

    def is_own(self, store: Store, run: str) -> bool:
        """Whether it is where the run saves to, however that is spelt."""
        return self.run == run and self.store.id == store.id

    def plan(self, refused: Mapping[Name, str]) -> ResumePlan:
        """What a resume would take there, as ``ckpt resume-info`` tells it.

        What was found is that plan until something is refused: the store is listed once. Like any
        plan it may be overtaken, so that what it chose is gone when it is read.
        """
        if not refused and self.found is not None:
            return self.found
        if self.ref.selector in (None, "latest"):
            return plan_resume(self.store, self.run, refused=refused)
        plan = plan_from(self.store, self.ref)
        if plan.chosen is not None and plan.chosen.name in refused:
            raise IntegrityError(f"{self.ref}: {refused[plan.chosen.name]}")
        return plan


def open_training_store(config: Config) -> Store:
    """The store that a run saves to.

    Raises:
        ConflictError: it is not the one that ``storage.store_id`` names.
        CkptError: it cannot be reached.
    """
    store = open_store(config.storage.uri)
    wanted = config.storage.store_id
    if wanted is not None:
        if not store.exists:
            raise NotFoundError(
                f"there is no store at {store.uri}, and storage.store_id={wanted} must be there",
                hint="is the disk mounted? drop storage.store_id to begin a new store",
            )
        if store.id != wanted:
            raise ConflictError(
                f"the store at {store.uri} has the id {store.id}, and storage.store_id={wanted}",
                hint="is another disk mounted there?",
            )
    return store


def find_origin(config: Config, store: Store) -> Origin | None:
    """Where the run starts from; ``None`` is from scratch. Looks, and loads nothing.

    Raises:
        NotFoundError: what ``trainer.resume_mode`` names must exist, and does not.
        IntegrityError: the run has checkpoints and none is intact: never from scratch then.
    """
    mode, run = config.trainer.resume_mode, config.storage.run
    if mode == "none":
        return None
    if mode in ("auto", "latest"):
        own = _own_origin(config, store)
        if own is not None:
            return own
        if config.trainer.resume_from is not None:
            return named_origin(config.trainer.resume_from, config.storage.uri, store)
        if mode == "latest":
            raise NotFoundError(
                f"trainer.resume_mode=latest, and run {run!r} has no checkpoint in {store.uri}",
                hint="trainer.resume_mode=auto starts from scratch then",
            )
        return None
    text = f"{run}@{mode}" if mode.isdigit() else mode
    return named_origin(text, config.storage.uri, store)


def _own_origin(config: Config, store: Store) -> Origin | None:
    """The run itself; ``None`` while it has no checkpoint."""
    run = config.storage.run
    own = Origin(config.storage.uri, store, run, Ref(None, run, "latest"))
    try:
        plan = own.plan({})
    except NotFoundError:
        return None
    if plan.commits == 0:
        return None
    try:
        plan.require()
    except IntegrityError as error:
        mirrored = _mirrored_origin(config)
        if mirrored is None:
            raise
        log.warning("%s; resuming from the mirror %s", error, mirrored.store.uri)
        return mirrored
    return replace(own, found=plan)


def _mirrored_origin(config: Config) -> Origin | None:
    """The first mirror that holds an intact checkpoint of the run."""
    run = config.storage.run
    for uri in config.storage.mirrors:
        try:
            origin = Origin(uri, open_store(uri), run, Ref(None, run, "latest"))
            plan = origin.plan({})
        except CkptError as error:
            log.warning("the mirror %s could not be asked: %s", uri, error)
            continue
        if plan.chosen is not None:
            return replace(origin, found=plan)
    return None


def named_origin(text: str, uri: str, store: Store) -> Origin:
    """What a REF, or a store with one, names; a REF alone is looked up in ``store``.

    Raises:
        UsageError: it is neither.
        NotFoundError: there is no such checkpoint.
    """
    ref = parse_ref(text, selector_optional=True)
    elsewhere = ref.store is not None and ref.store != uri
    where = open_store(ref.store) if ref.store is not None and elsewhere else store
    origin = Origin(ref.store if ref.store is not None else uri, where, ref.run, ref)
    plan = origin.plan({})
    plan.require()
    return replace(origin, found=plan)


def best_rule(text: str | None) -> BestRule | None:
    """What ``storage.best_metric`` says; it has been checked."""
    if text is None:
        return None
    metric, _, mode = text.rpartition(":")
    kind: Literal["max", "min"] = "max" if mode == "max" else "min"
    return BestRule(metric=metric, mode=kind)


def retention_policy(storage: StorageConfig) -> Policy | None:
    """What is kept of the run; ``None`` when no key of retention is set: all of it.

    Raises:
        UsageError: ``storage.max_size`` is no amount of bytes.
    """
    size = storage.max_size
    rules = (storage.keep_last, storage.keep_every, storage.keep_best, size)
    if all(rule is None for rule in rules):
        return None
    return Policy(
        keep_last=storage.keep_last,
        keep_every=storage.keep_every,
        keep_best=storage.keep_best,
        max_size=parse_size(size) if size is not None else None,
        owed_limit=storage.owed_limit,
    )


def fetch_model_files(
    checkpoint: Checkpoint, scratch: Path, kept: str = MODEL_FILES
) -> Path | None:
    """A model's configuration and tokenizer from a checkpoint, in a directory below ``scratch``.

    With them a resume needs no model directory: the weights come from the checkpoint.

    Args:
        checkpoint: The checkpoint.
        scratch: Where the directory is made.
        kept: Where they are kept in the checkpoint.

    Returns:
        The directory; ``None`` when the checkpoint has none of them.
    """
    directory = scratch / kept
    prefix = f"{kept}/"
    for entry in checkpoint.files:
        if entry.path.startswith(prefix) and not entry.path.endswith(".safetensors"):
            target = directory / entry.path.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(checkpoint.read_bytes(entry.path))
    return directory if directory.is_dir() else None
