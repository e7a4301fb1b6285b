"""What a store on HDFS needs of a client: the few operations that every HDFS client has.

:class:`ckptstore.backends.hadoop.HadoopBackend` makes a backend of one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    ConflictError,
    IntegrityError,
    NoSpaceError,
    NotFoundError,
    TemporaryError,
    UsageError,
    printable,
)
from ckptstore.uri import StoreURI


@dataclass(frozen=True)
class Status:
    """What the NameNode says of a path.

    Attributes:
        name: The last part of the path.
        size: Bytes; -1 for what is neither a file nor a directory.
        modified: Seconds since the epoch, by the NameNode's clock.
        is_directory: Whether it is one.
        block_size: Bytes in an HDFS block of the file; 0 where the client does not say.
    """

    name: str
    size: int
    modified: float
    is_directory: bool
    block_size: int = 0


@dataclass(frozen=True)
class HadoopOptions:
    """What a storage URI says besides the place.

    Attributes:
        replication, block_size: For files that are written; ``None`` is the cluster's default.
        timeout: Seconds that one request may take; a block of data may take three times as long.
    """

    replication: int | None = None
    block_size: int | None = None
    timeout: float = 60.0

    @classmethod
    def take(cls, options: dict[str, str], uri: StoreURI) -> HadoopOptions:
        """Take these options out of ``options``.

        Raises:
            UsageError: a value cannot be, or an option is left that nobody knows.
        """
        replication = options.pop("replication", "")
        block_size = options.pop("block_size", "")
        timeout = options.pop("timeout", "60")
        if options:
            more = ", client" if uri.scheme == "hdfs" else ""
            raise UsageError(
                f"unknown option for an HDFS store: {', '.join(map(printable, sorted(options)))}",
                hint=f"known: replication, block_size, timeout{more}",
            )
        return cls(
            replication=_number("replication", replication) if replication else None,
            block_size=_bytes("block_size", block_size) if block_size else None,
            timeout=_number("timeout", timeout),
        )


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 100_000):
        raise UsageError(f"{name}={printable(text)} is not a whole number over 0")
    return int(text)


def _bytes(name: str, text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,11})([kmg]?)", text.lower())
    size = int(match[1]) * 1024 ** " kmg".index(match[2] or " ") if match else 0
    if size <= 0 or size % 512:
        raise UsageError(
            f"{name}={printable(text)} is not a number of bytes that 512 divides",
            hint=f"for example {name}=256m",
        )
    return size


def split_location(uri: StoreURI) -> tuple[str, str]:
    """Host and port, and the path of the root without a slash at its end, of an HDFS URI.

    Raises:
        UsageError: it names a user, or a path that HDFS cannot have.
    """
    authority, _, path = uri.path.partition("/")
    if not authority:
        raise UsageError(
            f"{uri.scheme}:///{printable(path)} names no NameNode",
            hint=f"{uri.scheme}://HOST:PORT/{printable(path)}",
        )
    if "@" in authority:
        raise UsageError(
            f"{uri.scheme}://{printable(authority)} names a user",
            hint="name the user in HADOOP_USER_NAME",
        )
    parts = [part for part in path.split("/") if part]
    bad = next((p for p in parts if p in (".", "..", ".snapshot") or ":" in p), None)
    if bad is not None:
        raise UsageError(f"{printable(bad)!r} cannot be in a path on HDFS")
    return authority, "".join(f"/{part}" for part in parts)


class Source(ABC):
    """A file open for reading, from several threads.

    Attributes:
        size: Bytes.
    """

    size: int

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` on; both lie inside the file. Returns how many came."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of it. May be called twice."""


class Sink(ABC):
    """A new file open for writing, front to back, by one thread at a time."""

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append. ``data`` is not used after the return."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file: durable where the client can have that."""

    @abstractmethod
    def abort(self) -> None:
        """Stop writing. The file stays, in whatever state. May be called twice."""


class HadoopClient(ABC):
    """A client of a NameNode. Paths are absolute. Safe from several threads, and after a fork.

    Every method raises only errors of ``ckptstore.errors``, and within a bounded time; "not there"
    only when the NameNode has said so.

    Attributes:
        address: The scheme, host and port.
        exclusive_rename: ``rename`` never replaces what another client made meanwhile.
        durable: ``Sink.close`` has the DataNodes write to their disks.
    """

    address: str
    exclusive_rename: bool = True
    durable: bool = False

    @abstractmethod
    def status(self, path: str) -> Status | None:
        """What lies at ``path``; ``None`` when nothing does."""

    @abstractmethod
    def list(self, path: str) -> list[Status] | None:
        """What lies directly in the directory ``path``; ``None`` when there is no such."""

    def check_path(self, path: str) -> None:  # noqa: B027 - most can name all that HDFS can hold
        """Raise :class:`UsageError` if this client cannot name ``path``."""

    def read(self, path: str, limit: int) -> bytes:
        """The whole of a small file, as it was at one moment.

        Raises:
            NotFoundError: there is none.
            IntegrityError: it is longer than ``limit``.
        """
        source = self.open(path)
        try:
            if source.size > limit:
                raise too_long(f"{self.address}{path}", limit)
            data = bytearray(source.size)
            count = source.read_into(0, memoryview(data)) if data else 0
            return bytes(data[:count])
        finally:
            source.close()

    @abstractmethod
    def open(self, path: str) -> Source:
        """Open a file.

        Raises:
            NotFoundError: there is none.
        """

    @abstractmethod
    def create(self, path: str, *, executable: bool = False) -> Sink:
        """Begin a file at a free path; directories above it are made."""

    @abstractmethod
    def make_directories(self, path: str) -> None:
        """Make a directory and those above it; those that exist are no error."""

    @abstractmethod
    def rename(self, source: str, target: str, *, replace: bool = False) -> bool:
        """Rename a file or directory.

        Returns:
            ``False`` when there is something at ``target`` and it shall not be replaced.

        Raises:
            NotFoundError: there is no ``source``, or no directory for ``target``.
        """

    @abstractmethod
    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete; what does not exist is no error."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of connections. May be called twice."""


_TEMPORARY = frozenset(
    [
        "StandbyException",
        "SafeModeException",
        "RetriableException",
        "ObserverRetryOnActiveException",
        "RetryStartFileException",
        "NotReplicatedYetException",
        "RecoveryInProgressException",
        "NoMoreDatanodesException",
        "ServerTooBusyException",
    ]
)
_DENIED = frozenset(
    ["AccessControlException", "AuthorizationException", "SecurityException", "InvalidToken"]
)
_FULL = frozenset(
    [
        "DSQuotaExceededException",
        "NSQuotaExceededException",
        "QuotaExceededException",
        "QuotaByStorageTypeExceededException",
        "DiskOutOfSpaceException",
        "ClusterStorageCapacityExceededException",
    ]
)
_USAGE = frozenset(
    ["InvalidPathException", "PathComponentTooLongException", "MaxDirectoryItemsExceededException"]
)
_ABSENT = frozenset(
    ["FileNotFoundException", "ParentNotDirectoryException", "LeaseExpiredException"]
)
_CONFLICT = frozenset(
    [
        "FileAlreadyExistsException",
        "AlreadyBeingCreatedException",
        "PathIsNotEmptyDirectoryException",
        "PathIsDirectoryException",
    ]
)


def from_remote(exception: str, message: str, what: str) -> CkptError:
    """The error of ours that says what an exception of Hadoop's means.

    Args:
        exception: Its class, with or without the package.
        message: Its message, with or without a stack trace.
        what: The thing it happened to, as it should be named to a person.
    """
    name = exception.rpartition(".")[2]
    reason = printable(message.partition("\n")[0].strip()) or name
    text = f"{printable(what)}: {reason}"
    if name in _DENIED:
        return AccessDeniedError(
            text, hint="the user is that of HADOOP_USER_NAME, or of the Kerberos ticket"
        )
    if name in _TEMPORARY:
        return TemporaryError(text)
    if name in _FULL:
        return NoSpaceError(f"no space left: {text}", hint="free some space or raise the quota")
    if name in _USAGE:
        return UsageError(text)
    if name in _ABSENT:
        return NotFoundError(text)
    if name in _CONFLICT:
        return ConflictError(text)
    if "Checksum" in name:
        return IntegrityError(text)
    # Mostly java.io.IOException: no DataNode to write to, a pipeline that broke, …
    return TemporaryError(text) if name.endswith("IOException") else CkptError(text)


def unreachable(address: str, reason: str) -> TemporaryError:
    """The NameNode, or a DataNode behind it, cannot be reached."""
    return TemporaryError(
        f"{address} cannot be reached: {printable(reason)}",
        hint="is HDFS up, and are its address and port right?",
    )


def too_long(what: str, limit: int) -> IntegrityError:
    """A small file is larger than it can be."""
    return IntegrityError(f"{printable(what)} is over {limit} bytes long")


def silent(address: str, seconds: float) -> TemporaryError:
    """A request was not answered in time."""
    return TemporaryError(
        f"{address} has not answered within {seconds:g} s",
        hint="is HDFS up? A slow cluster may need another ?timeout=SECONDS",
    )
