"""Which tensors a rank writes, and where they are when they are written."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem


class SavePlanner(DefaultSavePlanner):
    """Plans the save of one part while the state is there, and remembers no more than the plan.

    The plan and the tensors it names are taken when this is made. Until they are written, each of
    them can be replaced by a copy, so that training may go on and change the state.

    Args:
        state: A nest of mappings with tensors (also DTensors) at its leaves.
        is_coordinator: Whether this is rank 0.

    Attributes:
        local_plan: What this rank could write, before the ranks agree who writes what they share.
        tensors: The local tensor of each item.
    """

    def __init__(self, state: dict[str, Any], *, is_coordinator: bool) -> None:
        super().__init__()
        super().set_up_planner(state, None, is_coordinator)
        self.local_plan = super().create_local_plan()
        self.tensors: dict[MetadataIndex, torch.Tensor] = {
            item.index: self.lookup_object(item.index) for item in self.local_plan.items
        }
        self.state_dict = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: that was done when this was made."""

    def create_local_plan(self) -> SavePlan:
        """The plan that was made."""
        return self.local_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor of an item, or its copy."""
        return self.tensors[write_item.index]


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads what a stock writer pickled with ``weights_only``: no code of a checkpoint is run."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one stored value where it belongs in the state."""
        loaded = torch.load(value, weights_only=True)
        super().load_bytes(read_item, _pickled(loaded))


def _pickled(value: Any) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out
