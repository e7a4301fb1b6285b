"""The exceptions of ckptstore, arranged by what a caller would do about them.

    CkptError                   exit code 1
    ├── UsageError              2   the call is wrong: correct it
    ├── PartialError            3   some of it was done: look at what was left out
    ├── NotFoundError           4   no such store, run, checkpoint, file or source
    │   └── PlaceNotFoundError      no such bucket to have a store in
    ├── IntegrityError          5   stored bytes are not what they must be: fall back or repair
    ├── ConflictError           6   something else is there or in the way: choose, or wait
    │   ├── VoidedError             the save was given up by someone else; save again
    │   │   └── SupersededError     … by a newer life of the run; end this process
    │   └── SourceChangedError      the source was written to while it was read
    ├── AccessDeniedError       7   permission or credentials
    ├── TemporaryError          8   the same call can succeed later
    │   └── NoSpaceError            the disk or quota is full
    └── CancelledError          130 the caller's own cancellation took effect

Every error carries a sentence that names the thing it happened to, and, where there is one, a
``hint``: what to do next. Neither ever contains a secret.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class CkptError(Exception):
    """Base of every error that ckptstore raises on purpose.

    Attributes:
        hint: What to do next, as a sentence or a command; ``None`` when nothing can be said.
        exit_code: The exit code of ``ckpt`` for this kind of error. Stable.
        kind: A stable name for programs, as in the ``--json`` output.
        on_all_ranks: Whether every rank of a process group is told of it, so that one may speak
            for all.
    """

    exit_code = 1
    kind = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.on_all_ranks = False


class UsageError(CkptError):
    """The call itself is wrong: an unknown scheme, a malformed REF, a negative step."""

    exit_code = 2
    kind = "usage"


class PartialError(CkptError):
    """Part of the work was done; the message says which part was not."""

    exit_code = 3
    kind = "partial"


class NotFoundError(CkptError):
    """A store, run, checkpoint, file or source that a successful look did not find."""

    exit_code = 4
    kind = "not-found"


class ConflictError(CkptError):
    """Something else is there already, or in the way, or in use."""

    exit_code = 6
    kind = "conflict"


class VoidedError(ConflictError):
    """The save's place was voided (by gc, or by a later save that took it over)."""

    kind = "voided"


class SupersededError(VoidedError):
    """A newer life of the run has begun: what belongs to an older one commits nothing any more."""

    kind = "superseded"


class SourceChangedError(ConflictError):
    """A source file changed or vanished while it was being read."""

    kind = "source-changed"


class AccessDeniedError(CkptError):
    """Permission or credentials are missing."""

    exit_code = 7
    kind = "access-denied"


class TemporaryError(CkptError):
    """The storage did not do it now; the same call can succeed later."""

    exit_code = 8
    kind = "temporary"


class NoSpaceError(TemporaryError):
    """The disk, or the quota on it, is full."""

    kind = "no-space"


class CancelledError(CkptError):
    """The caller asked for the operation to end, and it did."""

    exit_code = 130
    kind = "cancelled"


@dataclass(frozen=True)
class Damage:
    """One damaged place: a byte range of a file, or the whole of it.

    Attributes:
        path: Path inside the checkpoint (or the key of a record, manifest or mark).
        offset: First damaged byte.
        length: Bytes in the range; 0 when the file as a whole is meant.
        reason: For people: ``content differs``, ``missing``, ``size is 3, must be 5``.
    """

    path: str
    offset: int
    length: int
    reason: str

    def __str__(self) -> str:
        where = f", bytes {self.offset}-{self.offset + self.length - 1}" if self.length else ""
        return f"{printable(self.path)}{where}: {self.reason}"


class PlaceNotFoundError(NotFoundError):
    """What a store would lie in (a bucket) does not exist."""

    kind = "place-not-found"


class IntegrityError(CkptError):
    """Stored bytes are not what the record and the manifest say they must be.

    Attributes:
        damage: Each damaged place, where it is known.
    """

    exit_code = 5
    kind = "integrity"

    def __init__(
        self, message: str, *, hint: str | None = None, damage: tuple[Damage, ...] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.damage = damage


def printable(text: str) -> str:
    """``text`` with everything escaped that could move a terminal's cursor or hide itself."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text
    )


_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_TEMPORARY = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EMFILE, errno.ENFILE}
_USAGE = {errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}


def from_os_error(error: OSError, what: str) -> CkptError:
    """The exception of ours that says what ``error`` means.

    Args:
        error: The operating system's error.
        what: The thing it happened to, as it should be named to a person.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    message = f"{printable(what)}: {reason}"
    code = error.errno
    if code in _FULL:
        return NoSpaceError(f"no space left: {message}", hint="free some space, then do it again")
    if code in _DENIED:
        return AccessDeniedError(message)
    if code in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError(message)
    if code in (errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR):
        return ConflictError(message)
    if code in _USAGE:
        return UsageError(message)
    if code in _TEMPORARY:
        return TemporaryError(message)
    return CkptError(message)


@contextmanager
def translate_os_errors(what: str) -> Iterator[None]:
    """Turn an ``OSError`` from the block into the matching error of ours, naming ``what``."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, what) from error
