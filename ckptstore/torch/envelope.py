"""A tensor in a file as ``torch.load`` reads it: the bytes before and after its raw data.

Stock tools for distributed checkpoints read each tensor with ``torch.load``, that is, as a ZIP
archive with one uncompressed record for the data. Everything in such an archive but the data
follows from the tensor's type and shape. So the data can go straight from where it is into the
file, and back from the file to where it belongs, without a copy of the tensor in between; and equal
tensors give equal bytes.

The CRC-32 of the data record is 0: PyTorch does not read it (it can leave it out itself, see
``torch.serialization.set_crc32_options``), and every byte has a better digest in the manifest.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import _utils

_ALIGNMENT = 64
"""The data record starts at a multiple of this, counted from the archive's start."""

_LIMIT = 0xFFFFFFFF
_ZIP64_VERSION = 45


@lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """The bytes before and after the data of a contiguous tensor.

    Args:
        dtype: Its type.
        shape: Its shape.
    """
    size = _count(shape) * dtype.itemsize
    archive = _Archive()
    archive.add("archive/data.pkl", _pickled(dtype, shape))
    archive.add("archive/byteorder", b"little")
    archive.add("archive/version", b"3\n")
    archive.begin_data("archive/data/0", size)
    return archive.head, archive.tail()


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


class _Storage:
    """Stands for the storage where a tensor is pickled.

    Args:
        kind: The class that names its type, as ``torch.save`` writes it.
        count: Elements, or bytes where ``kind`` has no type.
    """

    def __init__(self, kind: Any, count: int) -> None:
        self.kind = kind
        self.count = count


class _Tensor:
    """Pickles as a contiguous tensor does."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        stride, strides = 1, []
        for length in reversed(self._shape):
            strides.append(stride)
            stride *= max(length, 1)
        layout: tuple[Any, ...] = (0, self._shape, tuple(reversed(strides)), False, OrderedDict())
        count = _count(self._shape)
        kind = _storage_kinds().get(self._dtype)
        if kind is not None:
            return _utils._rebuild_tensor_v2, (_Storage(getattr(torch, kind), count), *layout)
        storage = _Storage(torch.UntypedStorage, count * self._dtype.itemsize)
        return _utils._rebuild_tensor_v3, (storage, *layout, self._dtype)


def _storage_kinds() -> dict[torch.dtype, str]:
    kinds: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
    return kinds


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """What stands for a storage in the pickle."""
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, "0", "cpu", obj.count)
        return None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(_Tensor(dtype, shape))
    return out.getvalue()


class _Archive:
    """A ZIP archive of stored records whose last one is the data.

    The layout is that of APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16.
    """

    def __init__(self) -> None:
        self.head = b""
        self._directory: list[tuple[bytes, int, int, int]] = []  # name, CRC, size, offset
        self._size = 0

    def add(self, name: str, data: bytes) -> None:
        """Append a small record."""
        crc = zlib.crc32(data)
        self._directory.append((name.encode(), crc, len(data), len(self.head)))
        self.head += self._local(name.encode(), crc, len(data), b"") + data

    def begin_data(self, name: str, size: int) -> None:
        """Append the header of the record whose data follow the head."""
        self._directory.append((name.encode(), 0, size, len(self.head)))
        zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT else b""
        unpadded = len(self.head) + 30 + len(name) + len(zip64) + 4
        padding = b"Z" * (-unpadded % _ALIGNMENT)
        extra = zip64 + b"FB" + struct.pack("<H", len(padding)) + padding
        self.head += self._local(name.encode(), 0, size, extra)
        self._size = size

    @staticmethod
    def _local(name: bytes, crc: int, size: int, extra: bytes) -> bytes:
        version = _ZIP64_VERSION if size >= _LIMIT else 20
        stored = min(size, _LIMIT)
        fields = (b"PK\3\4", version, 0, 0, 0, 0, crc, stored, stored, len(name), len(extra))
        return struct.pack("<4s5H3L2H", *fields) + name + extra

    def tail(self) -> bytes:
        """The central directory and the end records."""
        start = len(self.head) + self._size
        entries = b""
        for name, crc, size, offset in self._directory:
            zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT else b""
            version = _ZIP64_VERSION if zip64 else 20
            stored = min(size, _LIMIT)
            fields = (b"PK\1\2", version, version, 0, 0, 0, 0, crc, stored, stored, len(name))
            entries += struct.pack("<4s6H3LH", *fields)
            entries += struct.pack("<HHHHLL", len(zip64), 0, 0, 0, 0, offset) + name + zip64
        count = len(self._directory)
        end = b""
        if start >= _LIMIT:
            fields64 = (b"PK\6\6", 44, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, count, count)
            end += struct.pack("<4sQHHLLQQ", *fields64) + struct.pack("<QQ", len(entries), start)
            end += struct.pack("<4sLQL", b"PK\6\7", 0, start + len(entries), 1)
        short = (b"PK\5\6", 0, 0, count, count, len(entries), min(start, _LIMIT), 0)
        return entries + end + struct.pack("<4s4H2LH", *short)
