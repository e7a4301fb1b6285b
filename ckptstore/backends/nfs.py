"""A store on NFS: a file system that several clients remember differently.

A client answers from memory for seconds or minutes: that a name is not there, what a directory
holds, how long a file is. It asks the server when something is *opened*. So here nothing counts as
missing before the directories on the way to it were opened, a size is that of the opened file, and
a file that was replaced elsewhere (ESTALE) is looked for again by its name.

Opening a directory helps only if the server gave it a new time. Two changes within one tick of its
clock look like one, and a client that listed the directory in between never asks again; so whoever
changes names touches the directory once more when the tick is over. Locks are not used.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from ckptstore.backends.base import Capabilities, CopyKind, Entries, Entry, Reader
from ckptstore.backends.local import Dedupe, LocalBackend
from ckptstore.backends.localfile import LocalReader
from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    NoSpaceError,
    NotFoundError,
    TemporaryError,
    printable,
    translate_os_errors,
)
from ckptstore.layout import is_silly

log = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 5
_FIRST_PAUSE = 0.01

_TICK_SECONDS = 0.02
"""Longer than the tick of any server's clock (10 ms at most)."""

_PAUSES_FOR_SPACE = (0.1, 0.3, 0.6)


class NfsBackend(LocalBackend):
    """A directory on NFS. See :class:`LocalBackend` for its arguments.

    A change shows at other clients when ``create_exclusive``, ``put``, ``remove_if``, ``delete`` or
    ``sync`` has returned. A new file shows there after the ``sync`` of its directory.
    """

    def __init__(self, root: str, *, dedupe: Dedupe = "reflink") -> None:
        super().__init__(root, dedupe=dedupe)
        # Each read waits for several answers.
        self.capabilities = Capabilities(parallel_reads=16, old_listings=True, resumes=True)
        self._told: set[str] = set()

    # Reading: all of it can be done again.

    def stat(self, key: str) -> Entry | None:
        """See :class:`Backend`."""
        with suppress(NotFoundError):
            return self._sure(key, lambda: self._stat(key))
        return None

    def _stat(self, key: str) -> Entry:
        found = super().stat(key)
        if found is None:
            raise NotFoundError(f"{printable(key)} is not there")
        if not found.is_directory:
            with suppress(AccessDeniedError):
                reader = LocalReader(self._path(key))
                reader.close()
                return Entry(key, reader.size, reader.modified)
        return found

    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        """See :class:`Backend`. Names that NFS itself made are left out.

        Sizes may be those of some seconds ago; ``stat`` gives the one of now.
        """
        listed = self._sure(prefix, lambda: self._listed(prefix, recursive))
        return [entry for entry in listed if not is_silly(entry.key)]

    def _listed(self, prefix: str, recursive: bool) -> Entries:
        listed = super().list(prefix, recursive=recursive)
        if not listed:
            self._look_anew(prefix)
            listed = super().list(prefix, recursive=recursive)
        return listed

    def read(self, key: str, limit: int) -> bytes:
        """See :class:`Backend`."""
        return self._sure(key, lambda: LocalBackend.read(self, key, limit))

    def open_reader(self, key: str) -> Reader:
        """See :class:`Backend`."""
        return self._sure(key, lambda: NfsReader(self._path(key)))

    def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """See :class:`Backend`."""
        return self._sure(
            source, lambda: LocalBackend.copy(self, source, target, executable=executable)
        )

    def _sure(self, key: str, call: Callable[[], T]) -> T:
        """What ``call`` says when it does not rest on what this client remembers."""
        looked = False
        pause = _FIRST_PAUSE
        for attempt in range(_ATTEMPTS):
            try:
                return call()
            except NotFoundError:
                if looked:
                    raise
            except TemporaryError as error:
                if not _is_stale(error) or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(pause)
                pause *= 2
            looked = True
            self._look_anew(key)
        raise AssertionError("the last attempt returns or raises")

    def _look_anew(self, key: str) -> None:
        """Ask the server about every directory on the way to ``key``."""
        path = ""
        for part in f"{self.root}/{key}".split("/")[1:]:
            with suppress(OSError):  # what is wrong with it is said by what comes next
                os.close(os.open(path or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            path = f"{path}/{part}"

    # Writing, and telling the other clients

    def create_exclusive(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        created = _with_space(lambda: LocalBackend.create_exclusive(self, key, data))
        if created:
            self._tell([_parent(key)])
        return created

    def put(self, key: str, data: bytes) -> None:
        """See :class:`Backend`."""
        _with_space(lambda: LocalBackend.put(self, key, data))
        self._tell([_parent(key)])

    def remove_if(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        self._look_anew(key)
        removed = self._sure(key, lambda: LocalBackend.remove_if(self, key, data))
        if removed:
            self._tell([_parent(key)])
        return removed

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`Backend`."""
        keys = list(keys)
        super().delete(keys)
        self._tell({_parent(key) for key in keys})

    def sync(self, directories: Iterable[str]) -> None:
        """See :class:`Backend`."""
        directories = list(directories)
        super().sync(directories)
        self._tell(directories)

    def _tell(self, directories: Iterable[str]) -> None:
        """Touch directories, when the tick in which their names changed is over.

        A directory that was not touched from here before may be new, and then so is its name in the
        one above it.
        """
        changed: set[str] = set()
        for key in directories:
            changed.add(key)
            above = key
            while above and above not in self._told:
                self._told.add(above)
                above = _parent(above)
                changed.add(above)
        if changed:
            time.sleep(_TICK_SECONDS)
        for path in map(self._path, changed):
            # Where it may not be touched nothing was changed either; what is gone needs no touch.
            unchanged = (PermissionError, FileNotFoundError, NotADirectoryError)
            with translate_os_errors(path), suppress(*unchanged):
                os.utime(path)

    def remove_tree(self, prefix: str) -> None:
        """See :class:`Backend`.

        A file that a process of this host has open cannot be removed from NFS: the client renames
        it, and the directory stays until the file is closed. The next collection removes it.
        """
        path = self._path(prefix)
        for attempt in range(_ATTEMPTS):  # another client may be at it, too
            shutil.rmtree(path, ignore_errors=True)
            if not os.path.lexists(path):
                self._tell([_parent(prefix)])
                return
            time.sleep(_FIRST_PAUSE * 2**attempt)
        left = super().list(prefix, recursive=True)
        if not left or not all(is_silly(entry.key) for entry in left):
            super().remove_tree(prefix)  # or says why not
            return
        log.warning(
            "%s stays for now: %d of its files are still open in a process of this host, and NFS "
            "keeps them until they are closed; the next gc removes it",
            printable(path),
            len(left),
        )


class NfsReader(LocalReader):
    """A file that is opened again when the server does not know it any more.

    Files of a store are never changed, so what is at the name now has the same content, or it is
    found by its digest.
    """

    def _pread(self, buffer: memoryview, offset: int) -> int:
        for _ in range(_ATTEMPTS):
            try:
                # An EIO is a server that a `soft` mount gave up on, not damage.
                return os.preadv(self._fd, [buffer], offset)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
            self._open_again()
        return os.preadv(self._fd, [buffer], offset)

    def _open_again(self) -> None:
        again = LocalReader(self._what)
        try:
            if again.size != self.size:
                raise TemporaryError(f"{printable(self._what)} was replaced while it was read")
            os.dup2(again.fileno(), self._fd, inheritable=False)
        finally:
            again.close()


def _with_space(call: Callable[[], T]) -> T:
    """Do it, with patience when the disk is full.

    The files of a save that failed for lack of space have just been removed, and the server frees
    them a moment later; the void that gives the save up must not fail for that.
    """
    for pause in _PAUSES_FOR_SPACE:
        try:
            return call()
        except NoSpaceError:
            time.sleep(pause)
    return call()


def _is_stale(error: CkptError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE


def _parent(key: str) -> str:
    return key.rpartition("/")[0]
