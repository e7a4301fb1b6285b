"""Files on this machine: reading ranges, and writing under a temporary name until complete."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat as stat_module
import sys
from contextlib import suppress
from typing import Any

from ckptstore.backends.base import Reader, Writer
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    from_os_error,
    printable,
    translate_os_errors,
)
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.ids import random_letters
from ckptstore.layout import TEMPORARY_PREFIX

_ENOTSUPP = 524  # the kernel's own, which NFS lets through
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS, _ENOTSUPP}
"""What ``link`` says where it cannot link at all."""

_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range: Any = getattr(_libc, "sync_file_range", None)  # Linux has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hang us
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalReader(Reader):
    """A file open for ranged reads.

    Attributes:
        modified: The time it was last written to, when it was opened.
    """

    def __init__(self, path: str) -> None:
        self._what = path
        try:
            self._fd = os.open(path, READ)
        except OSError as error:
            raise open_error(error, path) from error
        try:
            status = os.fstat(self._fd)
            if not stat_module.S_ISREG(status.st_mode):
                raise NotFoundError(f"{printable(path)} is not a file")
        except OSError as error:  # NFS: removed elsewhere a moment ago
            self.close()
            raise from_os_error(error, path) from error
        except NotFoundError:
            self.close()
            raise
        self.size = status.st_size
        self.modified = status.st_mtime

    def fileno(self) -> int:
        """The file descriptor."""
        return self._fd

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Reader`."""
        done = 0
        with translate_os_errors(self._what):
            while done < len(buffer):
                count = self._pread(buffer[done:], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def _pread(self, buffer: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [buffer], offset)
        except OSError as error:
            if error.errno == errno.EIO:  # on a disk that is damage
                raise IntegrityError(
                    f"{printable(self._what)} cannot be read: {error.strerror}"
                ) from error
            raise

    def close(self) -> None:
        """See :class:`Reader`."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # first: an interrupt here must not close it twice
            os.close(fd)


class LocalWriter(Writer):
    """A file under a temporary name until it is complete.

    Args:
        path: The name it gets then.
        executable: The exec bit.
        replace: Whether it gets the name also when something else has it.
    """

    _temporary: str | None

    def __init__(self, path: str, *, executable: bool = False, replace: bool = False) -> None:
        self._path = path
        self._replace = replace
        self._temporary = temporary_path(os.path.dirname(path))
        self._fd = os.open(self._temporary, CREATE, 0o555 if executable else 0o444)

    def fileno(self) -> int:
        """The file descriptor."""
        return self._fd

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`Writer`."""
        with translate_os_errors(self._path):
            write_all(self._fd, data, offset)
        start_writing_back(self._fd, offset, len(data))

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
            self._place(self._temporary)
            self._temporary = None

    def _place(self, temporary: str) -> None:
        """Give the complete file its name."""
        self._close()  # before the unlink: NFS keeps what is removed while it is open
        if self._replace:
            os.rename(temporary, self._path)
            return
        try:
            link_or_copy(temporary, self._path)
        except FileExistsError:
            raise ConflictError(f"{printable(self._path)} exists already") from None
        os.unlink(temporary)

    def abort(self) -> None:
        """See :class:`Writer`."""
        with suppress(OSError):  # NFS says here that the disk is full: too late to matter
            self._close()
        if self._temporary is not None:
            with translate_os_errors(self._path), suppress(FileNotFoundError):
                os.unlink(self._temporary)
            self._temporary = None

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # first: an interrupt here must not close it twice
            os.close(fd)


_NFS = 0x6969


def is_on_nfs(path: str) -> bool:
    """Whether ``path`` is, or would be made, on NFS; one that does not answer counts as NFS."""
    buffer = ctypes.create_string_buffer(512)  # a struct statfs, which begins with the type
    statfs: Any = getattr(_libc, "statfs", None)
    if sys.platform != "linux" or statfs is None:
        return False
    while statfs(os.fsencode(path), buffer) != 0:
        if ctypes.get_errno() not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return True
        if path in ("/", ""):
            return False
        path = os.path.dirname(path)
    return ctypes.c_long.from_buffer(buffer).value == _NFS


def open_error(error: OSError, path: str) -> CkptError:
    """What a failed ``open`` means; files of a store are never symbolic links."""
    if error.errno == errno.ELOOP:
        return IntegrityError(f"{printable(path)} is a symbolic link")
    return from_os_error(error, path)


def temporary_path(directory: str) -> str:
    """A new name in ``directory`` that readers and gc know as that of something incomplete."""
    return f"{directory}/{TEMPORARY_PREFIX}{random_letters()}"


def link_or_copy(source: str, target: str) -> None:
    """``link``, or, where the file system has no links, an exclusive copy of the whole file.

    The copy is exclusive too, but a crash can leave it torn; readers find that by its digest.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then meets its own link.
        if not os.path.samestat(os.lstat(source), os.lstat(target)):
            raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _copy_exclusive(source, target)


def rename_aside(path: str, aside: str) -> None:
    """Give a file a new name that nobody else knows."""
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        # NFS repeats a request whose answer was lost, and then misses what it has moved itself.
        if not os.path.lexists(aside):
            raise


def _copy_exclusive(source: str, target: str) -> None:
    with open(source, "rb") as reader:
        mode = stat_module.S_IMODE(os.fstat(reader.fileno()).st_mode)
        fd = os.open(target, CREATE, mode)
        try:
            with open(fd, "wb") as writer:
                shutil.copyfileobj(reader, writer, BLOCK_SIZE)
                writer.flush()
                os.fsync(writer.fileno())
        except OSError:
            os.unlink(target)  # ours: it was created exclusively
            raise


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def start_writing_back(fd: int, offset: int, length: int) -> None:
    """Have the kernel write a range to the disk now, so that ``fsync`` finds little left to do.

    Otherwise nothing is written before a tenth of the memory is full of it, and a save would first
    copy and hash all of its bytes, and then wait for the disk.
    """
    if _sync_file_range is not None:
        _sync_file_range(
            fd, offset, length, _SYNC_FILE_RANGE_WRITE
        )  # a hint: what fails is no harm


def make_directories(path: str) -> None:
    """Make a directory and those above it; what is new survives a power cut."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_directories(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    else:
        sync_directory(parent)


def sync_directory(path: str) -> None:
    """Make the names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
