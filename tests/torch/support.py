"""What the tests of ckptstore.torch share: states, stores, and damage."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from ckptstore.backends.local import LocalBackend
from ckptstore.reading import Checkpoint
from ckptstore.store import Store
from ckptstore.testing.hooks import Hook, HookedBackend

RUN = "run"

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
"""The stock tools; they do not say what they export, so a type checker is told nothing."""

State = dict[str, MutableMapping[str, Any]]


def file_store(root: Path) -> Store:
    """A store on the disk."""
    return Store(LocalBackend(str(root)))


def hooked_store(root: Path, hook: Hook) -> Store:
    """A store on the disk whose operations a hook sees."""
    return Store(HookedBackend(LocalBackend(str(root)), hook))


def make_state(seed: int = 0) -> State:
    """Two parts with tensors of several types and values that are none."""
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(33, 7, generator=chance)
    return {
        "model": {
            "layer": {"weight": weight, "bias": torch.randn(7, generator=chance).bfloat16()},
            "count": torch.tensor(seed),
            "name": f"tiny {seed}",
        },
        "optimizer": {
            "state": {"weight": {"exp_avg": weight * 2, "step": torch.tensor(float(seed))}},
            "lr": 1e-3 / (seed + 1),
        },
    }


def blank(state: Mapping[str, Any]) -> Any:
    """A state of the same form in which everything is something else."""
    other: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            plain = torch.zeros(value.shape, dtype=value.dtype)
            plain.reshape(-1).view(torch.uint8).fill_(1)
            other[key] = plain
        elif isinstance(value, Mapping):
            other[key] = blank(value)
        else:
            other[key] = None
    return other


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors bit by bit."""
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and raw(one) == raw(other)
        )
    return bool(one == other)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    if tensor.numel() == 0:
        return b""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    packed = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return packed.reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(checkpoint: Checkpoint) -> dict[str, bytes]:
    """A checkpoint's files."""
    return {entry.path: checkpoint.read_bytes(entry.path) for entry in checkpoint.files}


def flip(checkpoint: Checkpoint, path: str, offset: int = -1) -> None:
    """Change one byte of a stored file; a negative offset counts from its end."""
    assert checkpoint.path is not None
    file = Path(checkpoint.path) / path
    file.chmod(0o644)
    with file.open("r+b") as f:
        f.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 0x10]))
