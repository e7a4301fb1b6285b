"""Host memory that a save is copied to, kept from one save to the next."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

log = logging.getLogger(__name__)

K = TypeVar("K")

_ALIGNMENT = 64


class Staging:
    """One piece of host memory, as large as the tensors of a save and reused by the next one.

    The first copy spends most of its time in page faults; later ones run at the memory's speed.
    (Huge pages would not help: where page caches fill the memory, the kernel compacts it first, and
    that took three times as long as the faults.) Where there is a GPU the memory is page-locked, so
    that copies run at the bus's speed.
    """

    def __init__(self) -> None:
        self._arena: torch.Tensor | None = None
        self._locked = 0

    @property
    def size(self) -> int:
        """Bytes of host memory that are held."""
        return 0 if self._arena is None else self._arena.numel()

    def copy(self, tensors: Mapping[K, torch.Tensor]) -> dict[K, torch.Tensor]:
        """Copies of tensors, valid until the next call.

        Several names of one tensor share one copy.

        Args:
            tensors: Of any device; what is not a plain strided tensor has been unwrapped.

        Returns:
            Contiguous CPU tensors.
        """
        place: dict[Any, int] = {}
        size = 0
        for tensor in tensors.values():
            identity = _identity(tensor)
            if identity not in place:
                place[identity] = size
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(t.device.type == "cuda" for t in tensors.values())
        if self.size < size:
            self._allocate(size, lock=on_gpu)
        copies: dict[Any, torch.Tensor] = {}
        for tensor in tensors.values():
            identity = _identity(tensor)
            if identity not in copies:
                copies[identity] = self._copy(tensor.detach(), place[identity])
        for device in _cuda_devices(tensors.values()):
            torch.cuda.synchronize(device)
        return {key: copies[_identity(tensor)] for key, tensor in tensors.items()}

    def _copy(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        assert self._arena is not None
        flat = self._arena[offset : offset + tensor.nbytes].view(tensor.dtype)
        return flat.view(tensor.shape).copy_(tensor, non_blocking=True)

    def _allocate(self, size: int, *, lock: bool) -> None:
        self.close()
        self._arena = torch.empty(max(size, 1), dtype=torch.uint8, device="cpu")
        if lock:
            address = self._arena.data_ptr()
            if int(_runtime().cudaHostRegister(address, self._arena.numel(), 0)) == 0:
                self._locked = address
            else:  # the limit on locked memory; the copy is slower and right
                log.warning("%d bytes of host memory could not be page-locked", size)

    def close(self) -> None:
        """Give the memory back."""
        if self._locked:
            _runtime().cudaHostUnregister(self._locked)
            self._locked = 0
        self._arena = None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two names of the same elements."""
    seen_as = (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
    return (tensor.data_ptr(), tensor.device, *seen_as)


def _cuda_devices(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    return {t.device for t in tensors if t.device.type == "cuda"}
