"""The index of a distributed checkpoint, ``.metadata``: a pickle, read as untrusted input."""

from __future__ import annotations

import io
import pathlib
import pickle
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as words
from torch.distributed.checkpoint.metadata import Metadata

from ckptstore.errors import IntegrityError

T = TypeVar("T")

METADATA = ".metadata"
STATE = "state.json"
DATA_SUFFIX = ".distcp"
SIZE_LIMIT = 1 << 30
"""A ``.metadata`` longer than this is not read."""

_WORDS = {
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
}
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class _Unpickler(pickle.Unpickler):
    """Finds the classes that a ``.metadata`` consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class; see :class:`pickle.Unpickler`."""
        if module == words.__name__ and name in _WORDS:
            return getattr(words, name)
        if (module, name) == (filesystem.__name__, "_StorageInfo"):
            return filesystem._StorageInfo
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return pathlib.PurePosixPath  # the directory it was once written to: only a word here
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it names the layout {name!r}")
    return torch.strided


def decode_metadata(data: bytes, what: str) -> Metadata:
    """The index in ``data``; no code in it is run.

    Raises:
        IntegrityError: it is something else, or names anything but the classes it consists of.
    """
    before = _attributes()
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        if isinstance(found, Metadata):
            _check(found)
    except Exception as error:  # a hostile pickle can raise anything
        raise IntegrityError(f"{what} cannot be understood: {error}") from error
    finally:
        changed = _put_back(before)
    if changed:
        raise IntegrityError(f"{what} cannot be understood: it changes what it names")
    if not isinstance(found, Metadata):
        raise IntegrityError(f"{what} is no index of a distributed checkpoint")
    return found


def _attributes() -> list[tuple[Any, dict[str, Any]]]:
    """What all that a pickle can name is made of: a pickle can set attributes, also of a class."""
    named: list[Any] = [getattr(words, name) for name in _WORDS]
    named += [*words._MEM_FORMAT_ENCODING, filesystem._StorageInfo, pathlib.PurePosixPath]
    return [(one, dict(vars(one))) for one in named]


def _put_back(before: list[tuple[Any, dict[str, Any]]]) -> bool:
    """Undo changes; returns whether there were any."""
    changed = False
    for one, attributes in before:
        kind = type if isinstance(one, type) else object
        now = dict(vars(one))
        for name in now.keys() - attributes.keys():
            changed = True
            kind.__delattr__(one, name)
        for name, value in attributes.items():
            if now.get(name, before) is not value:
                changed = True
                kind.__setattr__(one, name, value)
    return changed


def _check(metadata: Metadata) -> None:
    """Raise something unless all that is read of the index later on is what it must be."""
    for key, kind in metadata.state_dict_metadata.items():
        _require(key, str)
        if isinstance(kind, words.BytesStorageMetadata):
            continue
        _require(kind, words.TensorStorageMetadata)
        _require(kind.properties.dtype, torch.dtype)
        _require(kind.size, torch.Size)
        for chunk in _require(kind.chunks, list):
            _require(chunk, words.ChunkStorageMetadata)
            within = len(chunk.offsets) == len(chunk.sizes) == len(kind.size)
            if not within or any(
                low < 0 or length < 0 or low + length > whole
                for low, length, whole in zip(chunk.offsets, chunk.sizes, kind.size, strict=True)
            ):
                raise ValueError(f"a piece of {key} lies outside of it")
    for index, info in _require(metadata.storage_data, dict).items():
        _require(index, words.MetadataIndex)
        _require(info, filesystem._StorageInfo)
        _require(info.relative_path, str)
        _require(info.offset, int)
        _require(info.length, int)


def _require(value: T, kind: type) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"it holds {value!r:.100} where a {kind.__name__} must be")
    return value


def encode_metadata(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``, as stock tools read them."""
    return pickle.dumps(metadata, protocol=4)
