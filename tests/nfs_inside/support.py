"""Where the mounts are."""

from __future__ import annotations

import os
from pathlib import Path

from tests.servers.nfs import INSIDE

MOUNTS = Path(os.environ.get(INSIDE, "/nonexistent"))
"""Holds ``v3`` and ``v4``, both with mounts ``a`` and ``b`` of an ext4; ``xfs/a``; ``small/a``."""
