"""What a person is told of a start: from scratch or from where, and what is not as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptstore.errors import UsageError
from trainer import resuming
from trainer.checkpointing import TrainerState
from trainer.config import Config
from trainer.data import DataFile
from trainer.tracking import Tracker


def changes_since(
    state: TrainerState | None,
    config: Config,
    files: Sequence[DataFile],
    identities: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """What has changed since a checkpoint, as far as ``trainer.resume_strict`` asks for it.

    Raises:
        UsageError: something has, and ``trainer.resume_strict`` is ``error``.
    """
    strict = config.trainer.resume_strict
    if state is None or strict == "ignore":
        return []
    changes = resuming.what_changed(state, config, files, identities)
    if changes and strict == "error":
        raise UsageError(
            f"this is not the training that saved step {state.step}: {'; '.join(changes)}",
            hint="trainer.resume_strict=warn goes on with the new values",
        )
    return changes


def say_from_scratch(tracker: Tracker, config: Config, store: str) -> None:
    """Tell that nothing was resumed from, and why.

    Args:
        tracker: Where it is told.
        config: The configuration.
        store: The URI of the store.
    """
    mode = config.trainer.resume_mode
    why = "trainer.resume_mode=none" if mode == "none" else "no checkpoint yet"
    tracker.note(f"starting from scratch: {why} of run {config.storage.run} in {store}")


def say_resumed(
    tracker: Tracker,
    config: Config,
    loaded: resuming.Loaded,
    world_size: int,
    passed_over: Sequence[str],
    changes: Sequence[str],
) -> None:
    """Tell from where a training goes on, and what is not as it was.

    Args:
        tracker: Where it is told.
        config: The configuration.
        loaded: What was loaded.
        world_size: Ranks now.
        passed_over: A sentence for each newer checkpoint that was not taken.
        changes: See :func:`changes_since`.
    """
    for text in passed_over:
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
    refused = [c for c in ("optimizer", "extra") if c not in config.storage.load_contents]
    if refused:
        tracker.warn(
            f"left out by storage.load_contents, and begun anew: {', '.join(refused)}",
            "training goes on, but not bit for bit as before",
        )
    if loaded.state.world_size != world_size:
        tracker.note(f"saved by {loaded.state.world_size} ranks, loaded by {world_size}")
    if changes:
        tracker.warn(
            "the configuration has changed since, and the new one counts: " + "; ".join(changes)
        )
