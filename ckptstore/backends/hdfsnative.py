"""HDFS through hdfs-native: Hadoop's own protocol, spoken without a JVM.

The package's calls wait for a silent server for ever, so each runs with a deadline. It also keeps
connections to DataNodes for three seconds in a place that all its clients share, and a process
that was forked in these seconds would wait for ever on one that is its parent's.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import hdfs_native
from hdfs_native import WriteOptions

from ckptstore.backends.deadline import Caller, DeadlinePassed
from ckptstore.backends.hadoopclient import (
    HadoopClient,
    HadoopOptions,
    Sink,
    Source,
    Status,
    from_remote,
    silent,
    unreachable,
)
from ckptstore.errors import (
    CkptError,
    ConflictError,
    NotFoundError,
    TemporaryError,
    UsageError,
    printable,
)

T = TypeVar("T")

DATA_FACTOR = 3
"""How many times longer than another request one for a block of data may take."""

_REMOTE = re.compile(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)', re.DOTALL)
_WRAPPED = re.compile(r'\w+\("([^\[{"]+?):? *[\[{"]')
_KEPT_SECONDS = 3.0  # hdfs-native keeps idle connections to DataNodes that long


_PIECE = 4 * 1024 * 1024
"""Bytes that are given to the library at once; it copies them."""


class _LastData:
    """When this process last used a connection to a DataNode."""

    process = os.getpid()
    moment = -_KEPT_SECONDS

    @classmethod
    def touch(cls) -> None:
        cls.process, cls.moment = os.getpid(), time.monotonic()

    @classmethod
    def outwait(cls) -> None:
        """In a child after a fork: wait until none of the parent's connections is used again."""
        if cls.process != os.getpid():
            time.sleep(max(0.0, cls.moment + _KEPT_SECONDS + 0.2 - time.monotonic()))
            cls.process = os.getpid()


class NativeClient(HadoopClient):
    """A NameNode, or a name service of the Hadoop configuration (``HADOOP_CONF_DIR``).

    Args:
        authority: Host and port, or the name of the service.
        options: What the storage URI says.
    """

    durable = True

    def __init__(self, authority: str, options: HadoopOptions) -> None:
        self.address = f"hdfs://{authority}"
        self.options = options
        self._caller = Caller()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._inner: hdfs_native.Client | None = None

    def inner(self) -> hdfs_native.Client:
        """This process's client."""
        if self._process != os.getpid():
            # The parent's threads are not here: its client would wait for them when it is freed.
            if self._inner is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._inner))
            self._lock = threading.Lock()
            self._process, self._inner = os.getpid(), None
        with self._lock:
            if self._inner is None:
                config = {"dfs.client.socket-timeout": str(int(self.options.timeout * 1000))}
                if ":" in self.address.removeprefix("hdfs://"):
                    # One NameNode: the defaults, made for failing over, try for minutes.
                    config["dfs.client.failover.max.attempts"] = "1"
                self._inner = hdfs_native.Client(self.address, config)
            return self._inner

    def call(self, what: str, function: Callable[[], T], *, data: bool = False) -> T:
        """Run one call of hdfs-native.

        Args:
            what: The path, for messages.
            function: The call.
            data: Whether it moves data, to or from DataNodes.

        Raises:
            CkptError: what its error means.
        """
        seconds = self.options.timeout * (DATA_FACTOR if data else 1)
        if data:
            _LastData.outwait()
        try:
            return self._caller.call(function, seconds)
        except DeadlinePassed:
            self._inner = None  # its connection is not to be trusted any more
            raise silent(self.address, seconds) from None
        except CkptError:
            raise
        except Exception as error:
            raise self._meaning(error, f"{self.address}{what}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # how a bug of hdfs-native shows
                raise
            raise CkptError(f"{self.address}{printable(what)}: hdfs-native: {error}") from error
        finally:
            if data:
                _LastData.touch()

    def _meaning(self, error: Exception, what: str) -> CkptError:
        text = str(error)
        reason = text.partition("\n")[0]
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"{printable(what)}: no such file or directory")
        if isinstance(error, FileExistsError):
            return ConflictError(f"{printable(what)} exists already")
        remote = _REMOTE.match(text)
        if remote is not None:
            message = remote[2].removesuffix('")').replace("\\n", "\n").replace('\\"', '"')
            return from_remote(remote[1], message, what)
        if "NameNode hosts" in text:
            return UsageError(
                f"{self.address}: the Hadoop configuration knows no name service of this name",
                hint="add the NameNode's port (often 8020), or set HADOOP_CONF_DIR",
            )
        if any(word in text for word in ("SASL", "GSSAPI", "Kerberos")):
            return from_remote("AccessControlException", reason, what)
        if isinstance(error, OSError):
            return unreachable(self.address, reason)
        if text.startswith("InvalidPath"):
            return UsageError(f"{printable(what)}: {printable(reason)}")
        if text.startswith("ChecksumError"):
            return from_remote("ChecksumException", reason, what)
        plain = _WRAPPED.match(reason)  # without the list of DataNodes in Rust's notation
        reason = plain[1] if plain is not None else reason
        return TemporaryError(f"{printable(what)}: {printable(reason)}")

    def status(self, path: str) -> Status | None:
        """See :class:`HadoopClient`."""
        try:
            return _status(self.call(path, lambda: self.inner().get_file_info(path)))
        except NotFoundError:
            return None

    def list(self, path: str) -> list[Status] | None:
        """See :class:`HadoopClient`."""
        try:
            found = self.call(path, lambda: list(self.inner().list_status(path)))
        except NotFoundError:
            return None
        if len(found) == 1 and found[0].path == path:  # a file lists itself
            return None
        return [_status(one) for one in found]

    def open(self, path: str) -> Source:
        """See :class:`HadoopClient`."""
        return _NativeSource(self, path)

    def create(self, path: str, *, executable: bool = False) -> Sink:
        """See :class:`HadoopClient`."""
        return _NativeSink(self, path, executable=executable)

    def make_directories(self, path: str) -> None:
        """See :class:`HadoopClient`."""
        self.call(path, lambda: self.inner().mkdirs(path, create_parent=True))

    def rename(self, source: str, target: str, *, replace: bool = False) -> bool:
        """See :class:`HadoopClient`."""
        try:
            self.call(target, lambda: self.inner().rename(source, target, replace))
        except ConflictError:
            return False
        except TemporaryError as error:
            if " must both be " in str(error):  # a file and a directory
                return False
            raise
        return True

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """See :class:`HadoopClient`."""
        self.call(path, lambda: self.inner().delete(path, recursive))

    def close(self) -> None:
        """See :class:`HadoopClient`."""
        if self._process == os.getpid():
            self._inner = None
            self._caller.close()


def _status(found: hdfs_native.FileStatus) -> Status:
    return Status(
        name=found.path.rpartition("/")[2],
        size=0 if found.isdir else found.length,
        modified=found.modification_time / 1000,
        is_directory=found.isdir,
        block_size=found.blocksize or 0,
    )


class _NativeSource(Source):
    def __init__(self, client: NativeClient, path: str) -> None:
        self._client = client
        self._path = path
        self._open()
        self.size = len(self._reader)

    def _open(self) -> None:
        client, path = self._client, self._path
        self._process = os.getpid()
        self._reader = client.call(path, lambda: client.inner().read(path))

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Source`."""
        if self._process != os.getpid():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._reader))  # as the parent's client
            self._open()
        call = partial(self._reader.read_range, offset, len(buffer))
        data = self._client.call(self._path, call, data=True)
        buffer[: len(data)] = data
        return len(data)


class _NativeSink(Sink):
    """A file being written.

    ``hsync`` has the DataNodes write the HDFS block at hand to their disks; blocks before it are
    out of its reach, so it is called at the end of each.
    """

    def __init__(self, client: NativeClient, path: str, *, executable: bool) -> None:
        self._client = client
        self._path = path
        options = WriteOptions(
            block_size=client.options.block_size,
            replication=client.options.replication,
            permission=0o755 if executable else 0o644,
            create_parent=True,
        )
        self._inner: hdfs_native.FileWriter | None = client.call(
            path, lambda: client.inner().create(path, options)
        )
        self._block = client.options.block_size or 0
        self._position = 0

    def write(self, data: memoryview) -> None:
        """See :class:`Sink`."""
        inner = self._inner
        assert inner is not None
        if not self._block:
            found = self._client.status(self._path)
            self._block = found.block_size if found is not None else 0
        while data:
            left = self._block - self._position % self._block if self._block else len(data)
            part, data = data[: min(left, _PIECE)], data[min(left, _PIECE) :]
            # It takes bytes whole, and anything else byte by byte, ten times as slowly.
            self._client.call(self._path, partial(inner.write, bytes(part)), data=True)
            self._position += len(part)
            if len(part) == left and self._block:
                self._client.call(self._path, inner.hsync, data=True)

    def close(self) -> None:
        """See :class:`Sink`."""
        inner = self._inner
        assert inner is not None
        if self._position and (not self._block or self._position % self._block):
            self._client.call(self._path, inner.hsync, data=True)
        self._client.call(self._path, inner.close, data=True)
        self._inner = None

    def abort(self) -> None:
        """See :class:`Sink`. The lease ends with the file, which is deleted next."""
        self._inner = None
