"""Saving the state of a PyTorch training loop, from all ranks, into a store.

    from ckptstore.torch import Checkpointer

    checkpointer = Checkpointer("s3://bucket/ckpts", "gsm8k")  # on every rank
    checkpointer.save(step, {"model": model_state, "optimizer": optimizer_state}, wait=False)

:class:`Checkpointer` is what a training loop needs. Below it: :class:`SharedSave` with
:class:`StoreWriter`, and :class:`StoreReader`, which ``torch.distributed.checkpoint`` takes as
storage.
"""

from __future__ import annotations

from ckptstore.torch.checkpointer import Checkpointer, PendingSave
from ckptstore.torch.loading import load_part, parts_of
from ckptstore.torch.planning import SafeLoadPlanner
from ckptstore.torch.ranks import Ranks
from ckptstore.torch.reader import StoreReader
from ckptstore.torch.shared import SharedSave
from ckptstore.torch.writer import StoreWriter
from ckptstore.torch.writing import Files

__all__ = [
    "Checkpointer",
    "Files",
    "PendingSave",
    "Ranks",
    "SafeLoadPlanner",
    "SharedSave",
    "StoreReader",
    "StoreWriter",
    "load_part",
    "parts_of",
]
