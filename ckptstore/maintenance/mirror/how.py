"""How a mirror works: limits, order, and the ways to end it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ckptstore.transfer import ProgressCallback
from ckptstore.transfer.throttle import Throttle

MAX_DELETE = 10
"""``--delete`` removes this many checkpoints in a pass at most, unless told otherwise."""


@dataclass(frozen=True)
class How:
    """What a mirror is told.

    Attributes:
        runs: Patterns of the runs to mirror; none is all.
        newest_first: Copy the newest checkpoint first instead of the oldest.
        throttle: A limit on bytes a second, for all copies that share it.
        delete: Also delete what the source has deleted.
        max_delete: If that were more checkpoints than this, none is deleted.
        dry_run: Only say what would be done.
        threads: Blocks in flight.
        progress: Told of every block.
        stop: Set it to end the work after the files that have been begun.
        cancel: Set it to end the work now; a later pass goes on inside the files.
    """

    runs: Sequence[str] = ()
    newest_first: bool = False
    throttle: Throttle | None = None
    delete: bool = False
    max_delete: int = MAX_DELETE
    dry_run: bool = False
    threads: int | None = None
    progress: ProgressCallback | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def ending(self) -> bool:
        """Whether nothing new shall be begun."""
        return self.stop.is_set() or self.cancel.is_set()

    def wants(self, run: str) -> bool:
        """Whether the run shall be mirrored."""
        return not self.runs or any(fnmatchcase(run, pattern) for pattern in self.runs)
