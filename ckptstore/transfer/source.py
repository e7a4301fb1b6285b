"""Source files: what is pushed from this machine's disk."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptstore.backends.localfile import READ, LocalReader
from ckptstore.errors import SourceChangedError, printable


@dataclass(frozen=True)
class SourceIdentity:
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> SourceIdentity:
        """The identity in a stat result."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    @classmethod
    def now(cls, path: str) -> SourceIdentity:
        """The identity of what is at ``path``. It is opened: by name, NFS can tell old news.

        Raises:
            OSError: there is nothing.
        """
        try:
            fd = os.open(path, READ)
        except FileNotFoundError:
            raise
        except OSError:  # it is no file any more, or may not be read
            return cls.of(os.lstat(path))
        try:
            return cls.of(os.fstat(fd))
        finally:
            os.close(fd)

    def check(self, path: str) -> None:
        """Raise :class:`SourceChangedError` when the file at ``path`` is not this any more."""
        try:
            now = SourceIdentity.now(path)
        except FileNotFoundError:
            raise _changed(path, "vanished") from None
        if now != self:
            raise _changed(path, "changed")


def _changed(path: str, what: str) -> SourceChangedError:
    return SourceChangedError(
        f"{printable(path)} {what} while it was read",
        hint="push a directory that nothing writes to any more",
    )


class SourceFile(LocalReader):
    """A file on this machine that must stay as it was when the directory was scanned.

    Args:
        path: Where it is; symbolic links are resolved.
        identity: What it was.

    Raises:
        SourceChangedError: it is gone, or not what it was.
    """

    def __init__(self, path: str, identity: SourceIdentity) -> None:
        self._path = path
        self._identity = identity
        self.check_unchanged()
        super().__init__(path)
        if SourceIdentity.of(os.fstat(self.fileno())) != identity:
            self.close()
            raise _changed(path, "changed")

    def check_unchanged(self) -> None:
        """See :class:`ckptstore.backends.base.Reader`."""
        self._identity.check(self._path)
