"""Is a place safe for checkpoints? It is tried out, in a directory that is removed afterwards."""

from __future__ import annotations

from ckptstore.backends.findings import Finding, Verdict
from ckptstore.maintenance.doctor.examination import (
    DEFAULT_SIZE,
    PATIENCE,
    SCRATCH_PREFIX,
    examine,
    verdict_code,
)

__all__ = [
    "DEFAULT_SIZE",
    "PATIENCE",
    "SCRATCH_PREFIX",
    "Finding",
    "Verdict",
    "examine",
    "verdict_code",
]
