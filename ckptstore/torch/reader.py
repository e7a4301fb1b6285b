"""Reading distributed checkpoints: torch's ``StorageReader`` over a stored checkpoint."""

from __future__ import annotations

import io
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptstore.errors import IntegrityError, NotFoundError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.manifest import FileEntry
from ckptstore.reading import Checkpoint
from ckptstore.torch.envelope import envelope
from ckptstore.torch.metadata import METADATA, SIZE_LIMIT, decode_metadata
from ckptstore.torch.segments import Scatter, bytes_of

HELD_BYTES = 256 * 1024 * 1024
"""Host memory for rows on their way to a GPU, or to a tensor of another layout, at once."""


class StoreReader(StorageReader):
    """Reads one part of a stored checkpoint; every byte is verified before it is used.

    Only the blocks (16 MiB) that this rank's share lies in are read, in parallel, and go straight
    into CPU tensors. It also reads what a stock writer wrote, tensor by tensor.

    Args:
        checkpoint: The checkpoint.
        part: Directory inside it; ``""`` is the checkpoint itself.
        threads: Blocks in flight.
    """

    def __init__(self, checkpoint: Checkpoint, part: str = "", *, threads: int | None = None):
        self._checkpoint = checkpoint
        self._prefix = f"{part}/" if part else ""
        self._threads = threads
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one load to another."""
        del checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read as untrusted input.

        Raises:
            NotFoundError: the checkpoint has no such part.
            IntegrityError: the index is damaged, or is none.
        """
        if self._metadata is None:
            path = self._prefix + METADATA
            what = f"{self._checkpoint.ref}: {path}"
            entry = self._checkpoint.entry(path)
            if entry.size > SIZE_LIMIT:
                raise IntegrityError(f"{what} is too long for an index: {entry.size} bytes")
            self._metadata = decode_metadata(self._checkpoint.read_bytes(path), what)
            self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the index that the ranks agreed on."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors.

        Raises:
            IntegrityError: stored bytes differ, or the index names what is not there.
        """
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._info(item).relative_path].append(item)
        for name, items in sorted(by_file.items()):
            self._read_file(name, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A checkpoint is not chosen by an id."""
        del checkpoint_id
        return False

    def _info(self, item: ReadItem) -> _StorageInfo:
        assert self._metadata is not None
        info = (self._metadata.storage_data or {}).get(item.storage_index)
        if not isinstance(info, _StorageInfo) or info.transform_descriptors:
            raise IntegrityError(
                f"{self._checkpoint.ref}: {self._prefix}{METADATA} does not say where "
                f"{item.storage_index.fqn} is, or in a way that is not known"
            )
        return info

    def _read_file(self, name: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        path = self._prefix + name
        try:
            entry = self._checkpoint.entry(path)
        except NotFoundError as error:
            raise IntegrityError(f"{self._checkpoint.ref}: its index names {path!r}") from error
        reads: list[_Read] = []
        foreign: list[ReadItem] = []
        held = 0
        for item in sorted(items, key=lambda i: self._info(i).offset):
            info = self._info(item)
            if min(info.offset, info.length) < 0 or info.offset + info.length > entry.size:
                raise IntegrityError(f"{self._checkpoint.ref}: {path} is not as its index says")
            read = self._direct(item, info, planner)
            if read is None:
                foreign.append(item)
                continue
            reads.append(read)
            held += 0 if read.into is read.target else read.into.nbytes
            if held > HELD_BYTES:
                foreign += self._read_all(entry, reads, planner)
                reads, held = [], 0
        foreign += self._read_all(entry, reads, planner)
        if foreign:
            self._read_foreign(path, foreign, planner)

    def _direct(self, item: ReadItem, info: _StorageInfo, planner: LoadPlanner) -> _Read | None:
        """How to read an item without unpacking it; ``None`` when it must be."""
        assert self._metadata is not None
        kind = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if item.type is not LoadItemType.TENSOR or not isinstance(kind, TensorStorageMetadata):
            return None
        shape = _chunk_shape(kind, item)
        dtype = kind.properties.dtype
        if shape is None:
            return None
        head, tail = envelope(dtype, shape)
        row_bytes = dtype.itemsize * math.prod(shape[1:])
        if len(head) + (shape[0] if shape else 1) * row_bytes + len(tail) != info.length:
            return None
        target = planner.resolve_tensor(item).detach()
        rows, first = (
            (shape, 0) if not shape else ((item.lengths[0], *shape[1:]), item.storage_offsets[0])
        )
        whole = tuple(rows) == tuple(target.shape) == tuple(item.lengths)
        if (
            whole
            and target.device.type == "cpu"
            and target.dtype == dtype
            and target.is_contiguous()
            and not target.is_conj()
            and not target.is_neg()
        ):
            into = target
        else:
            into = torch.empty(rows, dtype=dtype, device="cpu")
        return _Read(
            item, target, into, info.offset, head, info.offset + len(head) + first * row_bytes
        )

    def _read_all(
        self, entry: FileEntry, reads: Sequence[_Read], planner: LoadPlanner
    ) -> list[ReadItem]:
        """Read items; returns those that turn out not to be of our writer."""
        found = [bytearray(len(r.head)) for r in reads]
        ranges = [(r.offset, memoryview(b)) for r, b in zip(reads, found, strict=True)]
        ranges += [(r.data, bytes_of(r.into)) for r in reads]
        self._fill(entry, ranges)
        foreign = []
        for read, head in zip(reads, found, strict=True):
            if head != read.head:
                foreign.append(read.item)
                continue
            if read.into is not read.target:
                read.target.copy_(_columns(read.item, read.into))
            planner.commit_tensor(read.item, read.target)
        return foreign

    def _fill(self, entry: FileEntry, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read the blocks that the ranges lie in, verified, and copy the ranges out of them."""
        blocks: set[int] = set()
        for offset, memory in ranges:
            if len(memory):
                blocks.update(
                    range(offset // BLOCK_SIZE, (offset + len(memory) - 1) // BLOCK_SIZE + 1)
                )
        self._checkpoint.read_blocks(entry, sorted(blocks), Scatter(ranges), threads=self._threads)

    def _read_foreign(self, path: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read items of a stock writer, through one open file: neighbours lie in one block."""
        with self._checkpoint.open(path) as f:
            for item in sorted(items, key=lambda i: self._info(i).offset):
                info = self._info(item)
                f.seek(info.offset)
                self._unpack(path, item, io.BytesIO(f.read(info.length)), planner)

    def _unpack(self, path: str, item: ReadItem, data: io.BytesIO, planner: LoadPlanner) -> None:
        try:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, data)
                return
            stored = torch.load(data, map_location="cpu", weights_only=True)
            part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
        except Exception as error:  # what is no archive, or a hostile one, can raise anything
            raise IntegrityError(
                f"{self._checkpoint.ref}: {item.storage_index.fqn} in {path} cannot be understood: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)


@dataclass
class _Read:
    """A tensor's rows on their way from a file.

    Attributes:
        item: What is read.
        target: Where it belongs.
        into: Where its rows are read to: the target itself, or host memory of its own.
        offset, head: Where the item starts, and the bytes it must start with.
        data: Where the first row starts.
    """

    item: ReadItem
    target: torch.Tensor
    into: torch.Tensor
    offset: int
    head: bytes
    data: int


def _chunk_shape(kind: TensorStorageMetadata, item: ReadItem) -> tuple[int, ...] | None:
    """The shape of the stored piece that an item is read from."""
    offset = item.storage_index.offset
    for chunk in kind.chunks:
        if offset is None or tuple(chunk.offsets) == tuple(offset):
            return tuple(chunk.sizes)
    return None


def _columns(item: ReadItem, rows: torch.Tensor) -> torch.Tensor:
    """What an item asks for, out of the whole rows that were read."""
    for dimension in range(1, rows.dim()):
        rows = rows.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
    return rows
