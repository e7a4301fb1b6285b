"""One digest over everything that a resume must bring back, to compare two trainings with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from blake3 import blake3
from torch import Tensor

from ckptstore.torch.segments import bytes_of
from trainer.models import whole
from trainer.roles import Learner


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of named tensors, whole, so that sharding does not matter. A collective."""
    hasher = blake3()
    for name, tensor in tensors:
        full = whole(tensor).cpu().contiguous()
        hasher.update(f"{name} {full.dtype} {tuple(full.shape)}\n".encode())
        hasher.update(bytes_of(full))
    return hasher.hexdigest()


def learner_digest(learner: Learner) -> str:
    """Digest of a learner's parameters, optimizer and schedule. A collective."""

    def tensors() -> Iterable[tuple[str, Tensor]]:
        yield from learner.model_state().items()
        for name, own in learner.optimizer_state().items():
            yield from ((f"{name}/{key}", value) for key, value in own.items())

    return values_digest({"tensors": tensors_digest(tensors()), **learner.schedule_state()})


def values_digest(values: Mapping[str, Any]) -> str:
    """Digest of plain values."""
    return blake3(msgspec.json.encode(values, order="deterministic")).hexdigest()
