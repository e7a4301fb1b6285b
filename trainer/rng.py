"""The random generators of a process, as a checkpoint keeps them.

Nothing in the trainer draws from them: samples, orders and initial weights have keys of their own.
A reward function of the user's may.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The state of all of them, as JSON can hold it."""
    version, internal, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = numpy
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Go on with what :func:`rng_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


@contextmanager
def rng_untouched() -> Iterator[None]:
    """Whatever the block draws, the generators are afterwards as they were before."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
