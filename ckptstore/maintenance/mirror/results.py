"""What came of a pass of a mirror."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckptstore.errors import CkptError
from ckptstore.records import Commit, moment


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that could not be copied.

    Attributes:
        ref: Which one.
        reason: Why not, for people.
        hint: What to do about it.
    """

    ref: str
    reason: str
    hint: str | None = None


@dataclass(frozen=True)
class Lag:
    """How far a mirror is behind.

    Attributes:
        checkpoints: How many it lacks.
        bytes: Bytes in them.
        seconds: Age of the oldest of them, by the clocks of their writers and of this host.
    """

    checkpoints: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, commits: Iterable[Commit]) -> Lag:
        """The lag of a mirror that lacks ``commits``."""
        lacking = list(commits)
        now = time.time()
        ages = [now - t for c in lacking if (t := moment(c.created)) is not None]
        return cls(len(lacking), sum(c.size for c in lacking), max([0.0, *ages]))

    def __add__(self, other: Lag) -> Lag:
        return Lag(
            self.checkpoints + other.checkpoints,
            self.bytes + other.bytes,
            max(self.seconds, other.seconds),
        )


@dataclass(frozen=True)
class MirrorResult:
    """What a pass did.

    Attributes:
        target: The mirror's URI.
        copied: REFs of what was copied (in a dry run: would be), in the order of copying.
        sent_bytes: Bytes that went to the mirror.
        skipped: What could not be copied.
        deleted: REFs of what was deleted there because the source has deleted it.
        behind: What the mirror still lacks.
        seconds: How long it took.
        failure: The error that ended the pass early.
    """

    target: str
    copied: tuple[str, ...] = ()
    sent_bytes: int = 0
    skipped: tuple[Skipped, ...] = ()
    deleted: tuple[str, ...] = ()
    behind: Lag = Lag()
    seconds: float = 0.0
    failure: CkptError | None = None

    @property
    def ok(self) -> bool:
        """Whether the mirror holds all that it is owed."""
        return not self.skipped and self.failure is None
