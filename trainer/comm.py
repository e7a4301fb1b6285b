"""The ranks that train together: their devices, and sums over all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Comm:
    """This rank among all.

    Attributes:
        rank, size: Its number, and how many there are.
        device: Where it computes.
        mesh: All of them, for sharding.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this rank writes logs and decides what all do."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, of its own type, on its own device."""
        if self.size == 1:
            return values
        moved = values.to(self.device, copy=True)
        dist.all_reduce(moved)
        return moved.to(values.device)

    def all(self, flag: bool) -> bool:
        """Whether the flag is set on every rank."""
        return not self.any(not flag)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return bool(self.sum(torch.tensor(float(flag), dtype=torch.float64)) > 0)


def connect(timeout: float) -> Comm:
    """Join the ranks that torchrun started (or be alone), and take this rank's device.

    Args:
        timeout: Seconds after which a rank that does not answer is an error.
    """
    on_gpu = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=limit)
    else:
        store = torch._C._distributed_c10d.HashStore()  # noqa: SLF001 - not exported by name
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    size = dist.get_world_size()
    return Comm(dist.get_rank(), size, device, init_device_mesh(device.type, (size,)))


def lost_others(error: BaseException | None) -> bool:
    """Whether an error comes from a collective that another rank has left."""
    while error is not None:
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def disconnect() -> None:
    """Leave the ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
