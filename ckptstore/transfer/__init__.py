"""The data mover: every byte that is saved, pushed, pulled, verified or copied goes through it."""

from __future__ import annotations

from ckptstore.transfer.mover import Moved, Mover, OnMismatch, ProgressCallback, Transfer
from ckptstore.transfer.source import SourceFile, SourceIdentity

__all__ = [
    "Moved",
    "Mover",
    "OnMismatch",
    "ProgressCallback",
    "SourceFile",
    "SourceIdentity",
    "Transfer",
]
