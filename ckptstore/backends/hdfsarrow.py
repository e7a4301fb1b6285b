"""HDFS through pyarrow and libhdfs: where only Hadoop's own Java client will do.

Three things of it need care. A look (``get_file_info``) answers "not found" after any failure, so
absence is believed only after the directory above was listed, which does tell errors apart. A move
onto a file *deletes* that file, so there is no exclusive creation. And a move onto a directory puts
the source inside it. A JVM does not survive a fork.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pyarrow import fs

from ckptstore.backends.deadline import Caller, DeadlinePassed
from ckptstore.backends.hadoopclient import (
    HadoopClient,
    HadoopOptions,
    Sink,
    Source,
    Status,
    silent,
    unreachable,
)
from ckptstore.errors import (
    CkptError,
    NotFoundError,
    TemporaryError,
    UsageError,
    from_os_error,
    printable,
)

T = TypeVar("T")

DATA_FACTOR = 3
"""How many times longer than another request one for a block of data may take."""


_BASIC_PLANE = "\uffff"


class ArrowClient(HadoopClient):
    """A NameNode, or a name service of the Hadoop configuration on the class path.

    Args:
        authority: Host and port, or the name of the service.
        options: What the storage URI says.
    """

    exclusive_rename = False

    def __init__(self, authority: str, options: HadoopOptions) -> None:
        self.address = f"hdfs://{authority}"
        self._options = options
        self._caller = Caller()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._inner: Any = None

    def _connect(self) -> Any:
        with self._lock:
            if self._inner is None:
                host, _, port = self.address.removeprefix("hdfs://").partition(":")
                options = self._options
                milliseconds = str(int(options.timeout * 1000))
                more: dict[str, Any] = {}
                if options.replication:
                    more["replication"] = options.replication
                if options.block_size:
                    more["default_block_size"] = options.block_size
                try:
                    self._inner = fs.HadoopFileSystem(
                        host,
                        int(port or 0),
                        user=os.environ.get("HADOOP_USER_NAME"),
                        extra_conf={
                            "ipc.client.connect.timeout": milliseconds,
                            "ipc.client.connect.max.retries": "2",
                            "ipc.client.rpc-timeout.ms": milliseconds,
                            "dfs.client.socket-timeout": milliseconds,
                        },
                        **more,
                    )
                except OSError as error:
                    if "libhdfs" in str(error) or "libjvm" in str(error):
                        raise UsageError(
                            f"libhdfs cannot be loaded: {printable(str(error))}",
                            hint="set ARROW_LIBHDFS_DIR, JAVA_HOME and "
                            "CLASSPATH=$(hadoop classpath --glob), or leave out client=pyarrow",
                        ) from error
                    raise
            return self._inner

    def call(self, what: str, function: Callable[[Any], T], *, data: bool = False) -> T:
        """Run one call with the file system.

        Args:
            what: The path, for messages.
            function: The call.
            data: Whether it moves data, to or from DataNodes.

        Raises:
            CkptError: what its error means.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"{self.address} was opened with client=pyarrow before a fork, and Java does not "
                "survive one",
                hint="leave out client=pyarrow, or start processes by spawn",
            )
        self.check_path(what)
        seconds = self._options.timeout * (DATA_FACTOR if data else 1)
        try:
            return self._caller.call(lambda: function(self._connect()), seconds)
        except DeadlinePassed:
            raise silent(self.address, seconds) from None
        except OSError as error:
            raise self._meaning(error, f"{self.address}{what}") from error
        except UnicodeDecodeError as error:
            raise CkptError(
                f"{self.address}{printable(what)} holds a name that libhdfs cannot show",
                hint="leave out client=pyarrow",
            ) from error

    def check_path(self, path: str) -> None:
        """See :class:`HadoopClient`. Java takes characters beyond the first plane for two."""
        if max(path) > _BASIC_PLANE:
            raise UsageError(
                f"{printable(path)!r} cannot be named through libhdfs: it changes emoji and other "
                "characters beyond Unicode's first plane",
                hint="leave out client=pyarrow",
            )

    def _meaning(self, error: OSError, what: str) -> CkptError:
        """What libhdfs means; it knows most of Java's exceptions only as 255 or EIO."""
        if error.errno in (errno.EACCES, errno.ENOENT, errno.EDQUOT, errno.EINVAL, errno.EEXIST):
            return from_os_error(error, what)
        if error.errno == 255:
            return unreachable(self.address, "Java's exception is in its log")
        return TemporaryError(f"{printable(what)}: {printable(str(error))}")

    def status(self, path: str) -> Status | None:
        """See :class:`HadoopClient`."""
        found = self.call(path, lambda inner: _statuses([inner.get_file_info(path)]))
        if found:
            return found[0]
        if path == "/":  # it always exists
            raise unreachable(self.address, "it does not show its root")
        above, _, name = path.rpartition("/")
        return next((one for one in self.list(above or "/") or () if one.name == name), None)

    def list(self, path: str) -> list[Status] | None:
        """See :class:`HadoopClient`."""
        try:
            return self.call(
                path, lambda inner: _statuses(inner.get_file_info(fs.FileSelector(path)))
            )
        except NotFoundError:
            return None
        except TemporaryError:
            one = self.call(path, lambda inner: inner.get_file_info(path))
            if one.type == fs.FileType.File:  # "expects a directory"
                return None
            raise

    def open(self, path: str) -> Source:
        """See :class:`HadoopClient`."""
        return _ArrowSource(self, path)

    def create(self, path: str, *, executable: bool = False) -> Sink:
        """See :class:`HadoopClient`. It would replace, but the name is a new one."""
        del executable  # libhdfs has no way to say it when it creates
        self.make_directories(path.rpartition("/")[0] or "/")
        return _ArrowSink(self, path)

    def make_directories(self, path: str) -> None:
        """See :class:`HadoopClient`."""
        self.call(path, lambda inner: inner.create_dir(path, recursive=True))

    def rename(self, source: str, target: str, *, replace: bool = False) -> bool:
        """See :class:`HadoopClient`. A file that is made between the look and the move is lost.

        To replace a file libhdfs deletes it first: for a moment there is none, and a client that is
        killed just then leaves the new one, whole, under its temporary name only.
        """
        if not replace and self.status(target) is not None:
            return False
        try:
            self.call(target, lambda inner: inner.move(source, target))
        except TemporaryError:
            for path in (source, target.rpartition("/")[0] or "/"):
                if self.status(path) is None:
                    raise NotFoundError(f"{self.address}{printable(path)} is not there") from None
            raise
        inside = f"{target}/{source.rpartition('/')[2]}"
        if self.status(inside) is not None:  # a directory came in between
            self.delete(inside, recursive=True)
            return False
        return True

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """See :class:`HadoopClient`."""
        found = self.status(path)
        if found is None:
            return
        try:
            if not found.is_directory:
                self.call(path, lambda inner: inner.delete_file(path))
            elif recursive or not self.list(path):
                self.call(path, lambda inner: inner.delete_dir(path))
        except CkptError:
            if self.status(path) is not None:
                raise

    def close(self) -> None:
        """See :class:`HadoopClient`."""
        if self._process == os.getpid():
            self._inner = None
            self._caller.close()


def _statuses(found: Sequence[Any]) -> list[Status]:
    """What was found of it. (Within a call: it may turn out here that a name cannot be shown.)"""
    sizes = {fs.FileType.Directory: 0}
    return [
        Status(
            name=one.path.rpartition("/")[2],
            size=one.size if one.type == fs.FileType.File else sizes.get(one.type, -1),
            modified=one.mtime_ns / 1e9 if one.mtime_ns is not None else 0.0,
            is_directory=one.type == fs.FileType.Directory,
        )
        for one in found
        if one.type != fs.FileType.NotFound
    ]


class _ArrowSource(Source):
    def __init__(self, client: ArrowClient, path: str) -> None:
        self._client = client
        self._path = path
        found = client.status(path)
        if found is None or found.is_directory:
            raise NotFoundError(f"{client.address}{printable(path)}: no such file")
        self._inner: Any = client.call(path, lambda inner: inner.open_input_file(path))
        self.size = found.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Source`."""
        call = partial(self._inner.read_at, len(buffer), offset)
        data = self._client.call(self._path, lambda _: call(), data=True)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """See :class:`Source`."""
        inner, self._inner = self._inner, None
        if inner is not None:
            self._client.call(self._path, lambda _: inner.close())


class _ArrowSink(Sink):
    def __init__(self, client: ArrowClient, path: str) -> None:
        self._client = client
        self._path = path
        self._inner: Any = client.call(path, lambda inner: inner.open_output_stream(path))

    def write(self, data: memoryview) -> None:
        """See :class:`Sink`."""
        self._client.call(self._path, lambda _: self._inner.write(data), data=True)

    def close(self) -> None:
        """See :class:`Sink`."""
        self._client.call(self._path, lambda _: self._inner.close(), data=True)

    def abort(self) -> None:
        """See :class:`Sink`."""
        try:
            self._client.call(self._path, lambda _: self._inner.close())
        except CkptError:
            return  # it is deleted next, or gc does it
