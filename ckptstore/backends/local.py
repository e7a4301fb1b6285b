"""A store on a file system.

What makes it safe there: data is written under a temporary name, fsynced, and then *linked* to its
final name, because ``link`` is the one operation that never replaces anything on any POSIX file
system, NFS included (a rename clobbers when the client has a stale idea of the directory). Files
are read-only from then on: several checkpoints may share one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat as stat_module
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, get_args

from ckptstore.backends.base import Backend, Capabilities, CopyKind, Entries, Entry, Reader, Writer
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    TemporaryError,
    UsageError,
    from_os_error,
    printable,
    translate_os_errors,
)
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.ids import random_letters
from ckptstore.layout import TEMPORARY_PREFIX, is_temporary
from ckptstore.uri import StoreURI

Dedupe = Literal["reflink", "link", "none"]

_FICLONE = 0x40049409
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


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
        self.capabilities = Capabilities()

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
        return f"{self.root}/{key}" if key else self.root

    def local_path(self, key: str) -> str | None:
        """The path of ``key``."""
        return self._path(key)

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
            with os.scandir(self._path(directory)) as entries:
                for entry in entries:
                    key = f"{directory}/{entry.name}" if directory else entry.name
                    is_directory = entry.is_dir(follow_symlinks=False)
                    if not is_directory and not entry.is_file(follow_symlinks=False):
                        continue
                    if is_directory and recursive:
                        pending.append(key)
                        continue
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        size = 0 if is_directory else status.st_size
                        found.append(Entry(key, size, status.st_mtime, is_directory))

    def read(self, key: str, limit: int) -> bytes:
        """See :class:`Backend`."""
        path = self._path(key)
        try:
            fd = os.open(path, _READ)
        except OSError as error:
            raise _open_error(error, path) from error
        try:
            size = os.fstat(fd).st_size
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

    def open_writer(self, key: str, *, executable: bool = False) -> Writer:
        """See :class:`Backend`."""
        path = self._path(key)
        with translate_os_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return LocalWriter(path, executable=executable)

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
                    _link(temporary, path)
                except FileExistsError:
                    return False
            _sync_directory(os.path.dirname(path))
            return True

    @contextmanager
    def _complete(self, path: str, data: bytes) -> Iterator[str]:
        """A complete, durable temporary file beside ``path``; gone afterwards."""
        directory = os.path.dirname(path)
        os.makedirs(directory, exist_ok=True)
        temporary = _temporary(directory)
        fd = os.open(temporary, _CREATE, 0o444)
        try:
            try:
                _write_all(fd, memoryview(data), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            yield temporary
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def remove_if(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`.

        The object is renamed aside, looked at, and put back if it is another one: looking first
        and unlinking then could remove what came in between.
        """
        path = self._path(key)
        directory = os.path.dirname(path)
        aside = _temporary(directory)
        with translate_os_errors(path):
            try:
                os.rename(path, aside)
            except FileNotFoundError:
                return False
            with open(aside, "rb") as f:
                same = f.read(len(data) + 1) == data
            if not same:
                try:
                    os.link(aside, path)
                except FileExistsError:
                    raise TemporaryError(
                        f"{printable(path)} was replaced while it was looked at",
                        hint=f"what it was is kept in {aside}",
                    ) from None
            os.unlink(aside)
            _sync_directory(directory)
            return same

    def make_directory(self, key: str) -> bool:
        """See :class:`Backend`."""
        path = self._path(key)
        with translate_os_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
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
                if error.errno in _NO_LINKS:
                    return None
                raise
        return "link"

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
                _sync_directory(directory)

    def remove_tree(self, prefix: str) -> None:
        """See :class:`Backend`."""
        path = self._path(prefix)
        with translate_os_errors(path), suppress(FileNotFoundError):
            shutil.rmtree(path)
            _sync_directory(os.path.dirname(path))

    def sync(self, directories: Iterable[str]) -> None:
        """See :class:`Backend`."""
        for key in directories:
            with translate_os_errors(self._path(key)):
                _sync_directory(self._path(key))

    def set_hint(self, key: str, target: str) -> None:
        """See :class:`Backend`."""
        path = self._path(key)
        temporary = _temporary(os.path.dirname(path))
        with translate_os_errors(path):
            os.symlink(target, temporary)
            os.rename(temporary, path)

    def clock(self) -> float:
        """See :class:`Backend`."""
        temporary = _temporary(self.root)
        with translate_os_errors(self.root):
            fd = os.open(temporary, _CREATE, 0o600)
            try:
                os.write(fd, b"\n")
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)
                os.unlink(temporary)


class LocalReader(Reader):
    """A file open for ranged reads."""

    def __init__(self, path: str) -> None:
        self._what = path
        try:
            self._fd = os.open(path, _READ)
        except OSError as error:
            raise _open_error(error, path) from error
        status = os.fstat(self._fd)
        if not stat_module.S_ISREG(status.st_mode):
            self.close()
            raise NotFoundError(f"{printable(path)} is not a file")
        self.size = status.st_size

    def fileno(self) -> int:
        """The file descriptor."""
        return self._fd

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Reader`."""
        done = 0
        with translate_os_errors(self._what):
            while done < len(buffer):
                try:
                    count = os.preadv(self._fd, [buffer[done:]], offset + done)
                except OSError as error:
                    if error.errno == errno.EIO:
                        raise IntegrityError(
                            f"{printable(self._what)} cannot be read: {error.strerror}"
                        ) from error
                    raise
                if count == 0:
                    break
                done += count
        return done

    def close(self) -> None:
        """See :class:`Reader`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalWriter(Writer):
    """A file under a temporary name until it is complete."""

    def __init__(self, path: str, *, executable: bool = False) -> None:
        self._path = path
        self._temporary: str | None = _temporary(os.path.dirname(path))
        self._fd = os.open(self._temporary, _CREATE, 0o555 if executable else 0o444)

    def fileno(self) -> int:
        """The file descriptor."""
        return self._fd

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`Writer`."""
        with translate_os_errors(self._path):
            _write_all(self._fd, data, offset)

    def skip_zeros(self, offset: int, length: int) -> bool:
        """See :class:`Writer`. A hole in a file reads as zeros."""
        del offset
        return length == BLOCK_SIZE

    def finish(self, size: int) -> None:
        """See :class:`Writer`."""
        assert self._temporary is not None
        with translate_os_errors(self._path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
            try:
                _link(self._temporary, self._path)
            except FileExistsError:
                raise ConflictError(f"{printable(self._path)} exists already") from None
            os.unlink(self._temporary)
            self._temporary = None
        self.abort()

    def abort(self) -> None:
        """See :class:`Writer`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            with translate_os_errors(self._path), suppress(FileNotFoundError):
                os.unlink(self._temporary)
            self._temporary = None


def _open_error(error: OSError, path: str) -> CkptError:
    if error.errno == errno.ELOOP:
        return IntegrityError(f"{printable(path)} is a symbolic link")
    return from_os_error(error, path)


def _temporary(directory: str) -> str:
    path = f"{directory}/{TEMPORARY_PREFIX}{random_letters()}"
    assert is_temporary(path)
    return path


def _link(source: str, target: str) -> None:
    """``link``, or, where the file system has no links, an exclusive copy of the whole file.

    The copy is exclusive too, but a crash can leave it torn; readers find that by its digest.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _copy_exclusive(source, target)


def _copy_exclusive(source: str, target: str) -> None:
    with open(source, "rb") as reader:
        mode = stat_module.S_IMODE(os.fstat(reader.fileno()).st_mode)
        fd = os.open(target, _CREATE, mode)
        try:
            with open(fd, "wb") as writer:
                shutil.copyfileobj(reader, writer, BLOCK_SIZE)
                writer.flush()
                os.fsync(writer.fileno())
        except OSError:
            os.unlink(target)  # ours: it was created exclusively
            raise


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
