"""Bringing a checkpoint back into the roles, and saying what is different since it was saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptstore.errors import NotFoundError, UsageError
from ckptstore.reading import Checkpoint
from ckptstore.torch import load_part, parts_of
from trainer.checkpointing import TrainerState, read_state, rng_file
from trainer.config import Config
from trainer.data import DataFile, changed_files
from trainer.loop import Ppo, Roles
from trainer.roles import Learner
from trainer.settings import differences

Say = Callable[[str], None]


@dataclass
class Loaded:
    """What was brought back.

    Attributes:
        checkpoint: From where.
        state: The trainer's own part of it.
        rng: This rank's random generators; ``None`` when the checkpoint has none for it.
        without: What of ``storage.load_contents`` the checkpoint does not hold.
    """

    checkpoint: Checkpoint
    state: TrainerState
    rng: dict[str, Any] | None = None
    without: list[str] = field(default_factory=list)


def learners(roles: Roles) -> dict[str, Learner]:
    """What learns, by the name of its part in a checkpoint."""
    return {"actor": roles.actor, "critic": roles.critic}


def state_parts(roles: Roles, contents: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The tensors that a checkpoint holds, by part. They share memory with the roles."""
    parts: dict[str, dict[str, Any]] = {}
    for role, learner in learners(roles).items():
        if "model" in contents:
            kind = "adapters" if learner.has_adapters else "model"
            parts[f"{role}/{kind}"] = dict(learner.model_state())
        if "optimizer" in contents:
            parts[f"{role}/optimizer"] = dict(learner.optimizer_state())
    return parts


def load(
    checkpoint: Checkpoint,
    roles: Roles,
    config: Config,
    *,
    rank: int,
    threads: int | None,
) -> Loaded:
    """Load tensors in place, and read the rest. No collective.

    Raises:
        UsageError: the checkpoint is of another trainer or model, or holds no model.
        IntegrityError: it is damaged.
    """
    loaded = Loaded(checkpoint, read_state(checkpoint))
    there = set(parts_of(checkpoint))
    for part, state in state_parts(roles, config.storage.load_contents).items():
        if part in there:
            load_part(checkpoint, part, state, threads=threads)
        elif part.endswith(("/model", "/adapters")):
            raise _no_model(checkpoint, part, there)
        else:
            for tensors in state.values():  # a damaged newer checkpoint may be half in there
                for tensor in tensors.values():
                    tensor.zero_()
            loaded.without.append(part)
    if "extra" in config.storage.load_contents:
        try:
            loaded.rng = msgspec.json.decode(checkpoint.read_bytes(rng_file(rank)))
        except NotFoundError:
            loaded.without.append(rng_file(rank))
    return loaded


def _no_model(checkpoint: Checkpoint, part: str, there: Collection[str]) -> UsageError:
    role, _, kind = part.partition("/")
    if kind == "model" and f"{role}/adapters" in there:
        return UsageError(
            f"{checkpoint.ref} holds adapters (LoRA) for the {role}, and this run trains all of it",
            hint="set model.lora.rank as it was, or start another run",
        )
    if kind == "adapters" and f"{role}/model" in there:
        return UsageError(
            f"{checkpoint.ref} holds a whole {role}, and this run trains adapters (LoRA)",
            hint="set model.lora.rank=0, or start another run",
        )
    return UsageError(
        f"{checkpoint.ref} holds no {part}: it was saved without its model",
        hint="storage.save_contents must have model for a resume",
    )


def apply(loaded: Loaded, roles: Roles, ppo: Ppo, config: Config) -> None:
    """Set what is no tensor: the position in the data, schedules, the weight of KL.

    Raises:
        UsageError: the data has another number of samples.
    """
    state = loaded.state
    ppo.loader.load_state_dict(state.loader)
    if "extra" in config.storage.load_contents:
        ppo.kl_controller.load_state_dict(state.kl_controller)
        for role, learner in learners(roles).items():
            learner.load_schedule(state.schedules[role])


def what_changed(
    state: TrainerState,
    config: Config,
    data: Sequence[DataFile],
    identities: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """How this training differs from the one that saved the checkpoint, a sentence each."""
    changes = [f"{key}: {old!r} → {new!r}" for key, old, new in differences(state.config, config)]
    changes += changed_files(msgspec.convert(state.data, list[DataFile]), data)
    for role, identity in identities.items():
        before = state.identities.get(role)
        if before is not None and before["digest"] != identity["digest"]:
            changes.append(f"the {role} {identity['path']} is not the one it was")
    return changes
