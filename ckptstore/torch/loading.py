"""Loading one part of a checkpoint into a state, at any world size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckptstore.errors import NotFoundError, UsageError
from ckptstore.reading import Checkpoint
from ckptstore.torch import values
from ckptstore.torch.metadata import STATE
from ckptstore.torch.planning import SafeLoadPlanner
from ckptstore.torch.reader import StoreReader

_SHOWN = 3
"""Names of tensors in a message."""


def load_part(
    checkpoint: Checkpoint,
    part: str,
    state: MutableMapping[str, Any],
    *,
    strict: bool = True,
    threads: int | None = None,
) -> list[str]:
    """Load a part into a state, in place. No collective: each rank reads what it needs.

    Args:
        checkpoint: The checkpoint.
        part: The part's name.
        state: A nest of mappings; tensors (also DTensors) are filled, other values replaced.
        strict: Whether state and checkpoint must have the same tensors; otherwise what both have
            is loaded.
        threads: Blocks in flight.

    Returns:
        The tensors of the state that the checkpoint does not have (none when strict).

    Raises:
        NotFoundError: the checkpoint has no such part.
        UsageError: it is of another model: tensors are missing, left over, or of another shape.
        IntegrityError: stored bytes are not what they must be.
    """
    reader = StoreReader(checkpoint, part, threads=threads)
    try:
        metadata = reader.read_metadata()
    except NotFoundError as error:
        raise NotFoundError(
            f"{checkpoint.ref} has no part {part!r}", hint=f"it has: {_spell(parts_of(checkpoint))}"
        ) from error
    tensors, _ = values.split(state, part)
    planner = SafeLoadPlanner(allow_partial_load=not strict)
    planner.set_up_planner(tensors, metadata, is_coordinator=False)
    missing = _compare(checkpoint, part, planner.state_dict, metadata, strict=strict)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.create_local_plan()
    reader.read_data(planner.finish_plan(plan), planner)
    path = f"{part}/{STATE}"
    if any(entry.path == path for entry in checkpoint.files):
        stored = values.decode(checkpoint.read_bytes(path), f"{checkpoint.ref}: {path}")
        values.merge(state, stored)
    return missing


def parts_of(checkpoint: Checkpoint) -> list[str]:
    """The names of the parts of a checkpoint that hold tensors."""
    suffix = "/.metadata"
    return [e.path.removesuffix(suffix) for e in checkpoint.files if e.path.endswith(suffix)]


def _compare(
    checkpoint: Checkpoint,
    part: str,
    wanted: Mapping[str, Any],
    metadata: Metadata,
    *,
    strict: bool,
) -> list[str]:
    stored = {
        key: kind
        for key, kind in metadata.state_dict_metadata.items()
        if isinstance(kind, TensorStorageMetadata)
    }
    pickled = sorted(set(metadata.state_dict_metadata) - set(stored))
    where = f"{part} of {checkpoint.ref}"
    hint = "is it of another model, or of another configuration of it?"
    for key, value in wanted.items():
        kind = stored.get(key)
        if kind is not None and tuple(kind.size) != tuple(value.shape):
            raise UsageError(
                f"{key} in {where} has the shape {tuple(kind.size)}, not {tuple(value.shape)}",
                hint=hint,
            )
    missing = sorted(set(wanted) - set(stored))
    left_over = sorted(set(stored) - set(wanted))
    if strict and pickled:
        raise UsageError(
            f"{where} has values that a stock writer pickled: {_spell(pickled)}",
            hint="read it with dcp.load(..., storage_reader=StoreReader(checkpoint, part), "
            "planner=SafeLoadPlanner())",
        )
    if strict and missing:
        raise UsageError(f"{where} has no tensor {_spell(missing)}", hint=hint)
    if strict and left_over:
        raise UsageError(
            f"{where} has tensors that have no place here: {_spell(left_over)}", hint=hint
        )
    return missing


def _spell(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "none"
