from __future__ import annotations

import functools
import os
import pathlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as words
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptstore.errors import IntegrityError
from ckptstore.torch.metadata import decode_metadata, encode_metadata
from tests.torch.support import dcp


class Reduced:
    """Pickles as a call."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def make(**changed: Any) -> words.Metadata:
    """An index of one tensor in two pieces."""
    kind = words.TensorStorageMetadata(
        words.TensorProperties(torch.float32),
        torch.Size([4, 2]),
        [
            words.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 2])),
            words.ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([1, 2])),
        ],
    )
    fields: dict[str, Any] = {
        "state_dict_metadata": {"w": kind, "lr": words.BytesStorageMetadata()},
        "planner_data": {"w": ("model", "w"), "lr": ("groups", 0, "lr")},
        "storage_data": {
            words.MetadataIndex("w", [0, 0]): _StorageInfo("__0_0.distcp", 0, 100),
            words.MetadataIndex("w", [3, 0]): _StorageInfo("__1_0.distcp", 0, 100),
            words.MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 100, 10),
        },
        "storage_meta": words.StorageMeta(
            checkpoint_id=pathlib.PosixPath("/old/place"), save_id="x", modules=["a"]
        ),
    }
    return words.Metadata(**(fields | changed))


def test_an_index_comes_back() -> None:
    found = decode_metadata(encode_metadata(make()), "it")
    assert found.state_dict_metadata == make().state_dict_metadata
    assert found.storage_data == make().storage_data
    assert found.planner_data == make().planner_data


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_stock_writer_wrote_is_read(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(3, 2), "half": torch.ones(2, dtype=torch.bfloat16)},
        "frozen": torch.nn.Parameter(torch.ones(1)),
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "name": "x",
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    assert decode_metadata(data, "it").state_dict_metadata == (
        pickle.loads(data).state_dict_metadata
    )


ATTACKS: list[Callable[[str], Any]] = [
    lambda path: Reduced(os.system, (f"touch {path}",)),
    lambda path: Reduced(eval, (f"open({path!r}, 'w')",)),
    lambda path: Reduced(open, (path, "w")),
    lambda path: Reduced(functools.partial(os.mkdir, path), ()),
    lambda path: Reduced(functools.reduce, (os.open, [path, os.O_CREAT])),
    lambda path: Reduced(torch.save, ({}, path)),
    lambda path: Reduced(torch.ones(1).to, ("cpu",)),
    lambda path: Reduced(torch.load, (path,)),
    lambda path: Reduced(getattr, (Reduced(open, (path, "w")), "write")),
    lambda path: Reduced(torch.serialization._get_layout, (f"torch.{path}",)),
    lambda path: Reduced(pathlib.Path, (Reduced(os.system, (f"touch {path}",)),)),
    lambda path: {"deep": [Reduced(words.StorageMeta, (Reduced(os.mkdir, (path,)),))]},
]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in an index"])
@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, number: int, inside: bool) -> None:
    mark = tmp_path / "mark"
    attack = ATTACKS[number](str(mark))
    data = pickle.dumps(make(planner_data=attack) if inside else attack)
    with pytest.raises(IntegrityError, match=r"^it cannot be understood: "):
        decode_metadata(data, "it")
    assert not mark.exists()


def test_a_hostile_pickle_changes_no_class() -> None:
    """BUILD with a pair sets attributes of whatever object is there, classes included."""
    targets: list[Any] = [words.MetadataIndex, words.Metadata, _StorageInfo, pathlib.PurePosixPath]
    for target in targets:
        before = dict(vars(target))
        for attribute in ("__hash__", "brand_new", "__setstate__"):
            data = (
                b"\x80\x02c"
                + f"{'pathlib' if target is pathlib.PurePosixPath else target.__module__}\n"
                f"{target.__qualname__}\n".encode()
                + b"N}X"
                + len(attribute).to_bytes(4, "little")
                + attribute.encode()
                + b"ctorch\nSize\ns\x86b."
            )
            with pytest.raises(IntegrityError, match="it changes what it names"):
                decode_metadata(data, "it")
            assert dict(vars(target)) == before
    encoding = words._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    with pytest.raises(IntegrityError, match="it changes what it names"):
        decode_metadata(
            b"\x80\x02c" + words.__name__.encode() + b"\n_MEM_FORMAT_ENCODING\nK\x00\x85R"
            b"}X\x07\x00\x00\x00_value_K\x05sb.",
            "it",
        )
    assert encoding.value == 0


WRONG = {
    "no index": {"a": 1},
    "a class": words.Metadata,
    "no tensors": make(state_dict_metadata=None),
    "no places": make(storage_data=None),
    "a key": make(state_dict_metadata={1: words.BytesStorageMetadata()}),
    "a kind": make(state_dict_metadata={"w": words.StorageMeta()}),
    "a place": make(storage_data={words.MetadataIndex("w"): "somewhere"}),
    "an index": make(storage_data={"w": _StorageInfo("a", 0, 1)}),
    "an offset": make(storage_data={words.MetadataIndex("w"): _StorageInfo("a", "0", 1)}),  # type: ignore[arg-type]
    "a piece": make(
        state_dict_metadata={
            "w": words.TensorStorageMetadata(
                words.TensorProperties(torch.float32),
                torch.Size([2]),
                [words.ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))],
            )
        }
    ),
    "a type": make(
        state_dict_metadata={
            "w": words.TensorStorageMetadata(
                words.TensorProperties(torch.Size),  # type: ignore[arg-type]
                torch.Size([2]),
                [],
            )
        }
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_index_is_refused(what: str) -> None:
    with pytest.raises(IntegrityError, match=r"^it "):
        decode_metadata(pickle.dumps(WRONG[what]), "it")


def test_garbage_and_every_truncation_are_refused() -> None:
    whole = encode_metadata(make())
    for end in range(len(whole)):
        with pytest.raises(IntegrityError):
            decode_metadata(whole[:end], "it")
    for data in (b"\x00" * 100, b"(" * 10_000, b"PK\x03\x04", os.urandom(1000)):
        with pytest.raises(IntegrityError):
            decode_metadata(data, "it")


def test_any_single_changed_byte_is_refused_or_gives_an_index() -> None:
    whole = encode_metadata(make())
    for place in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[place] ^= 0x15
        try:
            found = decode_metadata(bytes(changed), "it")
        except IntegrityError:
            continue
        assert isinstance(found, words.Metadata)
