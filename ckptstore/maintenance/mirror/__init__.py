"""Mirroring: a store's checkpoints, copied to other stores.

``copying`` copies one checkpoint, ``passes`` decides what one store lacks of another and copies it,
``following`` does so again and again.
"""

from __future__ import annotations

from ckptstore.maintenance.mirror.following import Follower, problems
from ckptstore.maintenance.mirror.how import How
from ckptstore.maintenance.mirror.onerun import Memory
from ckptstore.maintenance.mirror.passes import mirror, runs_to_mirror
from ckptstore.maintenance.mirror.results import Lag, MirrorResult, Skipped
from ckptstore.maintenance.mirror.several import Outcome, mirror_each

__all__ = [
    "Follower",
    "How",
    "Lag",
    "Memory",
    "MirrorResult",
    "Outcome",
    "Skipped",
    "mirror",
    "mirror_each",
    "problems",
    "runs_to_mirror",
]
