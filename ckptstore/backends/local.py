"""A store on a file system.

What makes it safe there: data is written under a temporary name, fsynced, and then *linked* to its
final name, because ``link`` is the one operation that never replaces anything on any POSIX file
system, NFS included (a rename clobbers when the client has a stale idea of the directory). Files
are read-only from then on: several checkpoints may share one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat as stat_module
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, get_args

from ckptstore.backends import localfacts
from ckptstore.backends.base import Backend, Capabilities, CopyKind, Entries, Entry, Reader, Writer
from ckptstore.backends.findings import Finding
from ckptstore.backends.localfile import (
    CREATE,
    NO_LINKS,
    READ,
    LocalReader,
    LocalWriter,
    link_or_copy,
    make_directories,
    open_error,
    rename_aside,
    sync_directory,
    temporary_path,
    write_all,
)
from ckptstore.backends.localresume import open_resumable
from ckptstore.errors import (
    IntegrityError,
    TemporaryError,
    UsageError,
    from_os_error,
    printable,
    translate_os_errors,
)
from ckptstore.ids import random_letters
from ckptstore.layout import TEMPORARY_PREFIX
from ckptstore.uri import StoreURI

Dedupe = Literal["reflink", "link", "none"]

_FICLONE = 0x40049409


class LocalBackend(Backend):
    """A directory on a disk.

    Args:
        root: Absolute path of the store.
        dedupe: How an unchanged file is shared between checkpoints: ``reflink`` (own inode, shared
            blocks; falls back to a link where the file system has none), ``link`` (one inode), or
            ``none`` (each checkpoint has its own copy).
    """

    def __init__(self, root: str, *, dedupe: Dedupe = "reflink") -> None:
        self.root = root
        self.uri = root
        self.dedupe = dedupe
        self._reflinks = dedupe == "reflink"
        self.capabilities = Capabilities(resumes=True)

    @classmethod
    def from_uri(cls, uri: StoreURI) -> LocalBackend:
        """The backend that a ``file`` URI names.

        Raises:
            UsageError: an option is unknown.
        """
        options = dict(uri.options)
        given = options.pop("dedupe", "reflink")
        if options:
            raise UsageError(
                f"unknown option for a file store: {', '.join(map(printable, sorted(options)))}",
                hint="known: dedupe",
            )
        known: tuple[Dedupe, ...] = get_args(Dedupe)
        for dedupe in known:
            if dedupe == given:
                return cls(uri.path, dedupe=dedupe)
        raise UsageError(
            f"dedupe={printable(given)} is not known", hint=f"known: {', '.join(known)}"
        )

    def _path(self, key: str) -> str:
        """The path of a key.

        Raises:
            IntegrityError: a directory on the way is a symbolic link: it could lead anywhere.
        """
        parts = key.split("/")
        path = self.root
        for part in parts[:-1]:
            path = f"{path}/{part}"
            if os.path.islink(path):
                raise IntegrityError(f"{printable(path)} is a symbolic link")
        return f"{path}/{parts[-1]}" if key else path

    def local_path(self, key: str) -> str | None:
        """The path of ``key``."""
        return f"{self.root}/{key}" if key else self.root

    def stat(self, key: str) -> Entry | None:
        """See :class:`Backend`. Symbolic links are not followed and count as nothing."""
        try:
            found = os.lstat(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise from_os_error(error, self._path(key)) from error
        if stat_module.S_ISDIR(found.st_mode):
            return Entry(key, 0, found.st_mtime, is_directory=True)
        if not stat_module.S_ISREG(found.st_mode):
            return None
        return Entry(key, found.st_size, found.st_mtime)

    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        """See :class:`Backend`."""
        found: Entries = []
        try:
            self._scan(prefix, found, recursive)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise from_os_error(error, self._path(prefix)) from error
        return found

    def _scan(self, prefix: str, found: Entries, recursive: bool) -> None:
        pending = [prefix]
        while pending:
            directory = pending.pop()
            try:
                entries = os.scandir(self._path(directory))
            except FileNotFoundError:
                if directory == prefix:
                    raise
                continue  # deleted meanwhile
            with entries:
                for entry in entries:
                    key = f"{directory}/{entry.name}" if directory else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if recursive:
                            pending.append(key)
                        else:
                            found.append(Entry(key, 0, 0.0, is_directory=True))
                        continue
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        size = status.st_size if stat_module.S_ISREG(status.st_mode) else -1
                        found.append(Entry(key, size, status.st_mtime))

    def read(self, key: str, limit: int) -> bytes:
        """See :class:`Backend`."""
        path = self._path(key)
        try:
            fd = os.open(path, READ)
        except OSError as error:
            raise open_error(error, path) from error
        try:
            status = os.fstat(fd)
            if not stat_module.S_ISREG(status.st_mode):
                raise IntegrityError(f"{printable(path)} is not a file")
            size = status.st_size
            if size > limit:
                raise IntegrityError(f"{printable(path)} is {size} bytes long, over {limit}")
            data = os.read(fd, size + 1)
            while len(data) < size and (more := os.read(fd, size - len(data))):
                data += more
            return data
        except OSError as error:
            raise from_os_error(error, path) from error
        finally:
            os.close(fd)

    def open_reader(self, key: str) -> Reader:
        """See :class:`Backend`."""
        return LocalReader(self._path(key))

    def open_writer(
        self,
        key: str,
        *,
        size: int | None = None,
        executable: bool = False,
        replace: bool = False,
        resume: bool = False,
    ) -> Writer:
        """See :class:`Backend`."""
        path = self._path(key)
        with translate_os_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if resume:
                assert size is not None
                return open_resumable(path, size, executable=executable, replace=replace)
            return LocalWriter(path, executable=executable, replace=replace)

    def put(self, key: str, data: bytes) -> None:
        """See :class:`Backend`."""
        path = self._path(key)
        with translate_os_errors(path), self._complete(path, data) as temporary:
            os.rename(temporary, path)

    def create_exclusive(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        path = self._path(key)
        with translate_os_errors(path):
            with self._complete(path, data) as temporary:
                try:
                    link_or_copy(temporary, path)
                except FileExistsError:
                    return False
            sync_directory(os.path.dirname(path))
            return True

    @contextmanager
    def _complete(self, path: str, data: bytes) -> Iterator[str]:
        """A complete, durable temporary file beside ``path``; gone afterwards."""
        directory = os.path.dirname(path)
        make_directories(directory)
        temporary = temporary_path(directory)
        fd = os.open(temporary, CREATE, 0o444)
        try:
            try:
                write_all(fd, memoryview(data), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            yield temporary
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def remove_if(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`.

        The object is looked at, renamed aside, looked at again, and put back if it is another one:
        unlinking after a look could remove what came in between.
        """
        path = self._path(key)
        directory = os.path.dirname(path)
        aside = temporary_path(directory)
        with translate_os_errors(path):
            try:
                if not _holds(path, data):
                    return False
                rename_aside(path, aside)
            except FileNotFoundError:
                return False
            same = False
            try:
                same = _holds(aside, data)
            finally:
                if not same:
                    _put_back(aside, path)
            if same:
                os.unlink(aside)
            sync_directory(directory)
            return same

    def make_directory(self, key: str) -> bool:
        """See :class:`Backend`."""
        path = self._path(key)
        with translate_os_errors(path):
            make_directories(os.path.dirname(path))
            try:
                os.mkdir(path)
            except FileExistsError:
                return False
            return True

    def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """See :class:`Backend`. A link shares the inode, so it also shares the exec bit."""
        if self.dedupe == "none":
            return None
        from_path, to_path = self._path(source), self._path(target)
        with translate_os_errors(to_path):
            os.makedirs(os.path.dirname(to_path), exist_ok=True)
        if self._reflinks:
            if self._reflink(from_path, to_path, executable):
                return "reflink"
            self._reflinks = False
        with translate_os_errors(to_path):
            status = os.lstat(from_path)
            if bool(status.st_mode & 0o100) != executable or not stat_module.S_ISREG(
                status.st_mode
            ):
                return None
            try:
                os.link(from_path, to_path, follow_symlinks=False)
            except OSError as error:
                if error.errno in NO_LINKS:
                    return None
                raise
        return "link"

    def copy_over(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """See :class:`Backend`."""
        directory, slash, _ = target.rpartition("/")
        aside = f"{directory}{slash}{TEMPORARY_PREFIX}{random_letters()}"
        kind = self.copy(source, aside, executable=executable)
        if kind is None:
            return None
        from_path, path = self._path(aside), self._path(target)
        with translate_os_errors(path):
            try:
                os.rename(from_path, path)
            finally:
                with suppress(FileNotFoundError):  # two names of one file: a rename does nothing
                    os.unlink(from_path)
            sync_directory(os.path.dirname(path))
        return kind

    @staticmethod
    def _reflink(source: str, target: str, executable: bool) -> bool:
        reader = LocalReader(source)
        try:
            writer = LocalWriter(target, executable=executable)
            try:
                fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
                writer.finish(reader.size)
            except OSError:  # EOPNOTSUPP, EXDEV, ENOTTY, EINVAL: no reflinks here
                return False
            finally:
                writer.abort()
        except OSError as error:
            raise from_os_error(error, target) from error
        finally:
            reader.close()
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`Backend`."""
        directories: set[str] = set()
        for key in keys:
            path = self._path(key)
            with translate_os_errors(path), suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
                directories.add(os.path.dirname(path))
        for directory in directories:
            with translate_os_errors(directory), suppress(FileNotFoundError):
                sync_directory(directory)

    def remove_tree(self, prefix: str) -> None:
        """See :class:`Backend`."""
        path = self._path(prefix)
        with translate_os_errors(path), suppress(FileNotFoundError):
            shutil.rmtree(path)
            sync_directory(os.path.dirname(path))

    def sync(self, directories: Iterable[str]) -> None:
        """See :class:`Backend`."""
        for key in directories:
            with translate_os_errors(self._path(key)):
                sync_directory(self._path(key))

    def set_hint(self, key: str, target: str) -> None:
        """See :class:`Backend`."""
        path = self._path(key)
        temporary = temporary_path(os.path.dirname(path))
        with translate_os_errors(path):
            os.symlink(target, temporary)
            try:
                os.rename(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise

    def clock(self) -> float:
        """See :class:`Backend`."""
        temporary = temporary_path(self.root)
        with translate_os_errors(self.root):
            fd = os.open(temporary, CREATE, 0o600)
            try:
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)
                os.unlink(temporary)

    def free_space(self) -> int | None:
        """See :class:`Backend`. A quota may leave less."""
        return localfacts.free_space(self.root)

    def describe(self) -> Iterable[Finding]:
        """See :class:`Backend`."""
        return localfacts.describe(self.root)

    def examine(self, scratch: str) -> Iterable[Finding]:
        """See :class:`Backend`."""
        return localfacts.examine(self._path(scratch))


def _holds(path: str, data: bytes) -> bool:
    with open(os.open(path, READ), "rb") as f:
        return f.read(len(data) + 1) == data


def _put_back(aside: str, path: str) -> None:
    """Undo a rename, without replacing what may stand there now."""
    os.utime(aside)  # gc leaves young temporaries alone
    try:
        link_or_copy(aside, path)
    except FileExistsError:
        raise TemporaryError(
            f"{printable(path)} was replaced while it was looked at",
            hint=f"what it was is kept in {printable(aside)}",
        ) from None
    os.unlink(aside)
