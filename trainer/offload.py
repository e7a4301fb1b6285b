"""An optimizer's state in host memory while the optimizer does not step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptstore.torch.staging import Staging


class HostState:
    """Keeps what an optimizer remembers in host memory, and on the device while it steps.

    The host's memory is one piece that is kept, page-locked where the device is a GPU. The state is
    in ``optimizer.state`` at either place, so that whoever saves it, or loads into it, finds it.

    Args:
        optimizer: The optimizer; its parameters may be sharded (DTensors).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._staging = Staging()
        self._rests = False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Has the state on the device, and then in host memory again."""
        for parameter, own in self._optimizer.state.items():
            for key in _moved(own):
                local = _local(own[key]).to(_local(parameter).device, copy=True, non_blocking=True)
                own[key] = _as(own[key], local)
        self._rests = False
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        """Move the state to host memory, if it is not there."""
        if self._rests:
            return
        states = self._optimizer.state
        tensors = {(p, key): _local(own[key]) for p, own in states.items() for key in _moved(own)}
        for (parameter, key), local in self._staging.copy(tensors).items():
            states[parameter][key] = _as(states[parameter][key], local)
        self._rests = True


def _moved(own: dict[str, Tensor]) -> list[str]:
    """What of a parameter's state is moved: all but the count of steps, which is on the host."""
    return [key for key in own if key != "step"]


def _local(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local.detach()
    return tensor.detach()


def _as(tensor: Tensor, local: Tensor) -> Tensor:
    """Another memory for a tensor, sharded like it.

    Not by ``from_local``, which would move the memory back to the mesh's device.
    """
    if not isinstance(tensor, DTensor):
        return local
    make: Any = DTensor
    made: Tensor = make(local, tensor._spec, requires_grad=False)  # noqa: SLF001
    return made
