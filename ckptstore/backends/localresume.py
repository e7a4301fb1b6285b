"""A file that is written on by the next process, when the one that began it was killed.

Its temporary name follows from the name that it will get, so the next finds it. Nobody owns it:
two processes may write the same bytes into it at once. So nothing is done to it on opening, and
whoever finishes first takes it to a name of its own before it is looked at, and shown.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat as stat_module
from contextlib import suppress

from ckptstore.backends.localfile import LocalWriter, rename_aside, temporary_path
from ckptstore.errors import ConflictError, TemporaryError, printable, translate_os_errors
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import TEMPORARY_PREFIX

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NOT_OURS = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO}
_ATTEMPTS = 10
_PIECE = 1024 * 1024


def open_resumable(
    path: str, size: int, *, executable: bool = False, replace: bool = False
) -> LocalWriter:
    """A writer that takes up what is there; one that begins anew where that cannot be written."""
    name = os.fsencode(os.path.basename(path))
    kind = f"{size} {executable} ".encode()
    digest = hashlib.blake2b(kind + name, digest_size=16).hexdigest()
    shared = f"{os.path.dirname(path)}/{TEMPORARY_PREFIX}{digest}"
    taken = _take_up(shared, 0o755 if executable else 0o644)
    if taken is None:
        return LocalWriter(path, executable=executable, replace=replace)
    return _ResumableWriter(path, shared, *taken, replace=replace)


def _take_up(shared: str, mode: int) -> tuple[int, int] | None:
    """The open file and how many bytes it had; ``None`` when it is not a file of our own."""
    for _ in range(_ATTEMPTS):
        with suppress(FileExistsError):
            return os.open(shared, _OPEN | os.O_CREAT | os.O_EXCL, mode), 0
        try:
            fd = os.open(shared, _OPEN)
        except FileNotFoundError:  # finished meanwhile
            continue
        except OSError as error:
            if error.errno in _NOT_OURS:
                return None
            raise
        status = os.fstat(fd)
        if stat_module.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return fd, status.st_size
        os.close(fd)
        if status.st_nlink > 0:  # a stored file must not be written to under another name
            return None
    return None


class _ResumableWriter(LocalWriter):
    """A file under a temporary name that others may know, too.

    Args:
        path: The name it gets when it is complete.
        shared: The name it has.
        fd: It, open.
        held: How many bytes it had when it was opened; what they are is not known.
        replace: See :class:`LocalWriter`.
    """

    def __init__(self, path: str, shared: str, fd: int, held: int, *, replace: bool) -> None:
        self._path = path
        self._shared = shared
        self._fd = fd
        self._held = held
        self._replace = replace
        self._temporary = None

    def kept(self, offset: int, data: memoryview) -> bool:
        """See :class:`Writer`."""
        if offset + len(data) > self._held:
            return False
        for start in range(0, len(data), _PIECE):
            part = data[start : start + _PIECE]
            there = bytearray(len(part))
            try:
                count = os.preadv(self._fd, [there], offset + start)
            except OSError:  # what cannot be read is written anew
                return False
            if count != len(part) or there != part:
                return False
        return True

    def skip_zeros(self, offset: int, length: int) -> bool:
        """See :class:`Writer`. Where something lay it was not zeros, or it would be kept."""
        return length == BLOCK_SIZE and offset >= self._held

    def finish(self, size: int) -> None:
        """See :class:`Writer`."""
        with translate_os_errors(self._path):
            try:
                os.ftruncate(self._fd, size)
                os.fsync(self._fd)
            except OSError:
                # What the disk did not take may read well from memory until the power is cut, and
                # no later fsync complains again: nobody may take it up.
                with suppress(OSError):
                    os.unlink(self._shared)
                raise
            self._temporary = self._claim()
            os.fchmod(self._fd, os.fstat(self._fd).st_mode & 0o555)
            self._place(self._temporary)
            self._temporary = None

    def _claim(self) -> str:
        """A name that nobody else knows, for the very file that this writer has completed."""
        own = temporary_path(os.path.dirname(self._path))
        try:
            rename_aside(self._shared, own)
        except FileNotFoundError:
            raise self._overtaken() from None
        if not os.path.samestat(os.fstat(self._fd), os.lstat(own)):
            os.rename(own, self._shared)  # another one that has been begun since
            raise self._overtaken()
        return own

    def _overtaken(self) -> ConflictError | TemporaryError:
        path = printable(self._path)
        if os.path.lexists(self._path):
            return ConflictError(f"{path} exists already")
        return TemporaryError(
            f"{path}: what was written of it was taken away by another process", hint="try again"
        )
