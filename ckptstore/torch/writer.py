"""Writing distributed checkpoints: torch's ``StorageWriter`` over a save of several ranks."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore.errors import CkptError, UsageError
from ckptstore.torch.envelope import envelope
from ckptstore.torch.metadata import DATA_SUFFIX, METADATA, encode_metadata
from ckptstore.torch.segments import Segments, bytes_of
from ckptstore.torch.shared import SharedSave


class StoreWriter(StorageWriter):
    """Writes one part of a save: a directory that stock tools for distributed checkpoints read.

    Every rank writes one file with all its tensors, in the order of their names; equal states give
    equal files. The save commits when its block ends, not here, so that several parts become one
    checkpoint:

        with SharedSave(store, run, step, group) as save:
            dcp.save(actor_state, storage_writer=StoreWriter(save, "actor"), process_group=group)
            dcp.save(critic_state, storage_writer=StoreWriter(save, "critic"), process_group=group)

    Args:
        save: The save.
        part: Directory inside the checkpoint; ``""`` is the checkpoint itself.
    """

    def __init__(self, save: SharedSave, part: str = "") -> None:
        self._save = save
        self._prefix = f"{part}/" if part else ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to another."""
        if checkpoint_id is not None:
            raise UsageError(
                "a store has no checkpoint_id", hint="the save says the run, the step and the part"
            )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse to be driven by another group than the save's."""
        if is_coordinator != self._save.ranks.is_coordinator:
            raise UsageError(
                "the save and dcp.save must have the same process group",
                hint="give dcp.save the group that the save was made with",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items.

        Raises:
            CkptError: the storage failed.
        """
        name = f"__{self._save.ranks.rank}_0{DATA_SUFFIX}"
        pieces: list[bytes | memoryview] = []
        results = []
        offset = 0
        for item in sorted(plan.items, key=_order):
            item_pieces = _pieces(item, planner)
            length = sum(map(len, item_pieces))
            pieces += item_pieces
            results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            offset += length
        if results:
            self._save.add(self._prefix + name, lambda: Segments(pieces), offset)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once all ranks have written: the index of what they wrote.

        Raises:
            CkptError: a rank or a part of a tensor is missing; the save must not commit.
        """
        if len(results) != self._save.ranks.size:
            raise CkptError(f"{len(results)} of {self._save.ranks.size} ranks have written")
        stored = {r.index: r.storage_data for rank in results for r in rank}
        missing = [i for i in _expected(metadata) if i not in stored]
        if missing:
            raise CkptError(
                f"no rank wrote {_spell(missing[0])}"
                + (f" (nor {len(missing) - 1} others)" if len(missing) > 1 else "")
            )
        complete = dataclasses.replace(metadata, storage_data=stored, storage_meta=StorageMeta())
        self._save.add_bytes(self._prefix + METADATA, encode_metadata(complete))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A store is not chosen by an id."""
        del checkpoint_id
        return False


def _order(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset or ())


def _pieces(item: WriteItem, planner: SavePlanner) -> list[bytes | memoryview]:
    data = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        return [data.getbuffer()]
    assert isinstance(data, torch.Tensor)
    tensor = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
    head, tail = envelope(tensor.dtype, tuple(tensor.shape))
    return [head, bytes_of(tensor), tail]


def _expected(metadata: Metadata) -> Iterable[MetadataIndex]:
    """Everything that the index promises."""
    for key, kind in metadata.state_dict_metadata.items():
        if isinstance(kind, TensorStorageMetadata):
            yield from (MetadataIndex(key, chunk.offsets) for chunk in kind.chunks)
        else:
            yield MetadataIndex(key)


def _spell(index: MetadataIndex) -> str:
    where = f" from {tuple(index.offset)} on" if index.offset else ""
    return f"{index.fqn}{where}"
