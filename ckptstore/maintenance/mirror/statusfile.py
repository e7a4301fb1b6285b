"""What a mirror that runs by itself lets others know: a small JSON file on this machine."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from ckptstore.errors import translate_os_errors
from ckptstore.ids import random_letters
from ckptstore.maintenance.mirror.following import problems
from ckptstore.maintenance.mirror.results import Lag
from ckptstore.maintenance.mirror.several import Outcome
from ckptstore.records import timestamp


class MirrorState(msgspec.Struct, frozen=True, kw_only=True):
    """One mirror after its last pass.

    Attributes:
        ok: Whether it holds all that it is owed.
        updated: When the pass ended.
        behind: What it lacks; ``None`` when that is not known, for the pass could not begin.
        problem: What is wrong, for people.
    """

    ok: bool
    updated: str
    behind: Lag | None
    problem: str | None

    @property
    def is_in_step(self) -> bool:
        """Whether it lacks nothing, not even what another process is copying."""
        return self.ok and self.behind is not None and not self.behind.checkpoints


class MirrorStates(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.

    Attributes:
        source: The store that is mirrored.
        pid: The process that mirrors.
        mirrors: By URI.
    """

    source: str
    pid: int
    mirrors: dict[str, MirrorState]


class StatusFile:
    """Writes the file anew, atomically, after each pass of each mirror.

    Args:
        path: The file.
        source: The store that is mirrored.
    """

    def __init__(self, path: str, source: str) -> None:
        self._path = Path(path)
        self._source = source
        self._lock = threading.Lock()
        self._states: dict[str, MirrorState] = {}

    def update(self, outcome: Outcome) -> None:
        """Take what came of a pass.

        Raises:
            CkptError: the file could not be written.
        """
        result = outcome.result
        state = MirrorState(
            ok=outcome.ok,
            updated=timestamp(),
            behind=result.behind if result is not None else None,
            problem=next(iter(problems([outcome])), None) if not outcome.waits else None,
        )
        with self._lock, translate_os_errors(str(self._path)):
            self._states[outcome.target] = state
            body = MirrorStates(source=self._source, pid=os.getpid(), mirrors=self._states)
            aside = self._path.with_name(f".{self._path.name}.{random_letters()}")
            aside.write_bytes(msgspec.json.format(msgspec.json.encode(body)) + b"\n")
            aside.replace(self._path)


def read_states(path: str | os.PathLike[str]) -> MirrorStates | None:
    """What stands in the file; ``None`` while there is none that can be read."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=MirrorStates)
    except (OSError, msgspec.DecodeError):
        return None
