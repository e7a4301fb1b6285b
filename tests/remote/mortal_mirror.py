"""A mirror whose process is killed at an operation on its target: SOURCE TARGET COUNT."""

from __future__ import annotations

import sys

import ckptstore
from ckptstore.maintenance.mirror import How, mirror
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from ckptstore.testing.kills import Countdown

if __name__ == "__main__":
    source, target, count = sys.argv[1:]
    inner = ckptstore.open_store(target).backend
    backend = HookedBackend(inner, Countdown(int(count)).hook)
    mirror(ckptstore.open_store(source), Store(backend), How(threads=1))
