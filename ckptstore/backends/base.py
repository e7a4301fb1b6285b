"""The contract between the store and a kind of storage.

Everything the store asks of a disk, an object store or HDFS goes through :class:`Backend`. The
docstrings below are the contract; ``ckptstore.testing.conformance`` checks it against real storage.

Keys are relative POSIX paths below the root, checked by the caller (``ckptstore.layout``). They are
always exact: no pattern characters, no guessing whether a key is a directory.

Errors: every method raises only the exceptions of ``ckptstore.errors``. "Not there" is said
(``None``, an empty list, :class:`NotFoundError`) only after the storage itself has said so; a
connection that failed or a permission that is missing is an error. A root that has vanished looks
empty, so the caller checks the store's marker before it believes that there is nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from ckptstore.backends.findings import Finding


@dataclass(frozen=True)
class Capabilities:
    """What a kind of storage can do.

    Attributes:
        exclusive_create: Of any number of concurrent ``create_exclusive`` calls for one key exactly
            one succeeds. Without it saves still work (names are unique), but orphans are not
            collected automatically.
        moves_no_bytes: ``copy`` does not send the bytes through this machine.
        takes: ``take`` works here.
        durable_sync: After ``sync`` (and ``finish``) data survives a power cut.
        parallel_blocks: A writer takes its blocks from several threads in any order.
        parallel_limit: Up to how many bytes of a file that is so; ``None`` is no limit.
        parallel_reads: How many small reads are worth having in flight at once.
        threads: How many blocks are worth having in flight at once; 0 is one for each core.
        old_listings: A listing may be some seconds old (a size, a name); ``stat`` is not.
        keeps_checksums: The storage keeps a checksum with each object, and ``checksum`` tells it
            without reading the object.
        resumes: ``open_writer`` takes up what an interrupted writer left, when asked to; elsewhere
            each begins anew.
        forbidden: Characters that a path cannot hold here.
    """

    exclusive_create: bool = True
    moves_no_bytes: bool = True
    takes: bool = False
    durable_sync: bool = True
    parallel_blocks: bool = True
    parallel_limit: int | None = None
    parallel_reads: int = 1
    threads: int = 0
    old_listings: bool = False
    keeps_checksums: bool = False
    resumes: bool = False
    forbidden: str = ""

    def in_parallel(self, size: int) -> bool:
        """Whether the blocks of a file of ``size`` bytes may be written in any order."""
        limit = self.parallel_limit
        return self.parallel_blocks and (limit is None or size <= limit)


class Entry(msgspec.Struct, frozen=True, gc=False):
    """What a listing or a stat says of a key.

    Attributes:
        key: The key.
        size: Bytes; 0 for a directory, -1 for what is neither a file nor a directory.
        modified: Seconds since the epoch by the storage's clock; 0.0 for a directory, which has no
            time on an object store.
        is_directory: Whether other keys lie below it.
    """

    key: str
    size: int
    modified: float
    is_directory: bool = False


Entries = list[Entry]
"""A listing. (``Backend.list`` hides the built-in name where it is needed.)"""

CopyKind = Literal["reflink", "link", "server", "bytes"]
"""How ``copy`` did it; ``bytes`` went through this machine."""


class Reader(ABC):
    """An open object. Safe to use from several threads at once.

    Attributes:
        size: Bytes when it was opened.
    """

    size: int

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` with the bytes from ``offset`` on.

        Returns:
            How many were read: fewer than asked for only at the object's end.
        """

    def view(self, offset: int, length: int) -> memoryview | None:
        """The bytes from ``offset`` on, where they are in memory as one piece; else ``None``."""
        del offset, length
        return None

    def check_unchanged(self) -> None:  # noqa: B027 - stored objects never change
        """Raise :class:`SourceChangedError` if what was read may not be one state of the file."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it. May be called twice."""


class Unfinished(NamedTuple):
    """An object that somebody began to write and did not finish.

    Attributes:
        key: The key it would have.
        started: Seconds since the epoch, by the storage's clock.
        token: What the storage calls it.
    """

    key: str
    started: float
    token: str


class Writer(ABC):
    """An object being written. Nothing is visible at its key before ``finish`` returns.

    Attributes:
        crc64nvme: After ``finish``: the checksum that the storage keeps with the object, as 16
            hexadecimal digits; ``None`` when it keeps none.
    """

    crc64nvme: str | None = None

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``.

        Offsets are multiples of the block size; every block is whole but the last. Where
        ``Capabilities.in_parallel`` says so this is called from several threads and in any order;
        elsewhere front to back.
        """

    def kept(self, offset: int, data: memoryview) -> bool:
        """Whether exactly these bytes lie at ``offset`` of what was taken up.

        Asked right before ``write`` or ``skip_zeros`` of the same block, in the same order and from
        the same threads. What is kept must not be written again.
        """
        del offset, data
        return False

    @abstractmethod
    def skip_zeros(self, offset: int, length: int) -> bool:
        """Leave ``length`` zero bytes at ``offset`` unwritten, where the storage reads them as 0.

        Returns:
            Whether that is so; otherwise the caller writes them.
        """

    @abstractmethod
    def finish(self, size: int) -> None:
        """Make the object of ``size`` bytes complete, durable and visible at its key.

        Where clients remember what they listed (NFS), the others see it at the latest after the
        ``sync`` of its directory.

        Raises:
            ConflictError: the key exists. It is left as it was. Of two writers that took up the
                same, the second may meet this already in ``write``; also when both replace.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give it up and leave nothing behind. May be called twice, and after ``finish``.

        One that was opened to be resumed leaves what it has for the next such writer.
        """


class Backend(ABC):
    """A place where a store is kept. Safe to use from several threads, and after a fork.

    Attributes:
        uri: The root, without secrets, for messages.
        capabilities: What this place can do.
    """

    uri: str
    capabilities: Capabilities

    @abstractmethod
    def stat(self, key: str) -> Entry | None:
        """What lies at ``key``; ``None`` after a successful look found nothing."""

    @abstractmethod
    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        """What lies below the directory ``prefix`` (``""`` is the root), unsorted, never cached.

        Not recursive: the entries directly below, directories included. Recursive: all files at any
        depth, without directories. Empty when there is no such directory. Keys created or deleted
        during the call may or may not be in it. What is neither a file nor a directory (a
        symbolic link, a FIFO) is shown with a size of -1 and never followed or read. A size may be
        that of some seconds ago, where another client wrote the file; ``stat`` asks for it.
        """

    @abstractmethod
    def read(self, key: str, limit: int) -> bytes:
        """The whole of a small object.

        Raises:
            NotFoundError: there is none.
            IntegrityError: it is longer than ``limit``; nothing was read.
        """

    @abstractmethod
    def open_reader(self, key: str) -> Reader:
        """Open an object for ranged reads.

        Raises:
            NotFoundError: there is none.
        """

    @abstractmethod
    def open_writer(
        self,
        key: str,
        *,
        size: int | None = None,
        executable: bool = False,
        replace: bool = False,
        resume: bool = False,
    ) -> Writer:
        """Begin an object at a key that must be free; directories above it are made as needed.

        Args:
            key: The key.
            size: How many bytes it will have; ``None`` when that is not known, and then it is
                written front to back.
            executable: The exec bit, where the storage has one.
            replace: The key need not be free: ``finish`` puts the object in place of what is there,
                in one step. A reader sees the old bytes or the new, and another name (a hard link)
                of what was there keeps the old ones. Only for an object that was found damaged.
            resume: Take up what an earlier such writer of this key and ``size``, which must be
                given, left when its process was killed or when it was aborted. Only for content
                that the key determines, and that is verified before it is written: two processes
                may write into the same at once, and then both write the same bytes. Whoever
                finishes second meets a :class:`ConflictError`, or, where the storage cannot tell
                its object from the other's, nothing. Where it cannot be done (see
                ``Capabilities.resumes``) the object is begun anew.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write or replace a small object atomically. Only for keys with a single writer."""

    @abstractmethod
    def create_exclusive(self, key: str, data: bytes) -> bool:
        """Create a small object, whole and durable, if the key is free.

        After an error it is unknown whether it was created: the caller reads it back.

        Returns:
            Whether it was created; ``False`` when the key exists.
        """

    def is_exclusive(self) -> bool:
        """Whether ``create_exclusive`` is so here. May ask the storage, so only writers call it."""
        return self.capabilities.exclusive_create

    @abstractmethod
    def remove_if(self, key: str, data: bytes) -> bool:
        """Remove a small object if it still holds exactly ``data``.

        Returns:
            Whether it was removed. If it held something else it is there as before.
        """

    @abstractmethod
    def make_directory(self, key: str) -> bool:
        """Claim a directory for a new checkpoint.

        Returns:
            ``False`` when something is there already.
        """

    @abstractmethod
    def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """Make ``target``, which must be free, have the bytes of ``source``, complete and durable.

        Returns:
            How; ``None`` when that cannot be done here without moving bytes (nothing was made).

        Raises:
            NotFoundError: there is no ``source``.
            ConflictError: ``target`` exists.
        """

    def copy_over(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """Put the bytes of ``source`` in place of what is at ``target``, in one step.

        Only where several names can share the bytes on one machine's disk, and for a ``target``
        that was found damaged.

        Returns:
            How; ``None`` when it cannot be done here without moving bytes (nothing was changed).

        Raises:
            NotFoundError: there is no ``source``.
        """
        del source, target, executable
        return None

    def take(self, source: str, target: str) -> bool:
        """Give an object another key, which must be free; nothing is left at the old one.

        Only for what lies in the directory of a save that has been given up: nobody reads there.

        Returns:
            Whether that was done; ``False`` when it cannot be done here (nothing was changed).

        Raises:
            NotFoundError: there is no ``source``.
            ConflictError: ``target`` exists.
        """
        del source, target
        return False

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""

    @abstractmethod
    def remove_tree(self, prefix: str) -> None:
        """Remove everything below a directory, and the directory. Missing is no error."""

    def checksum(self, key: str) -> str | None:
        """The CRC-64/NVME that the storage keeps with an object; ``None`` when it keeps none.

        Raises:
            NotFoundError: there is no object.
        """
        del key
        return None

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """What was begun below a directory, is not finished, and shows in no listing."""
        del prefix
        return ()

    def discard_unfinished(self, uploads: Iterable[Unfinished]) -> None:
        """Give them up. What was finished or given up meanwhile is no error."""
        del uploads

    @abstractmethod
    def sync(self, directories: Iterable[str]) -> None:
        """Make the names in these directories survive a power cut, and show to all clients."""

    @abstractmethod
    def set_hint(self, key: str, target: str) -> None:
        """Point ``key`` at its sibling ``target``, for people: a symlink, else a small object."""

    @abstractmethod
    def clock(self) -> float:
        """Now by the storage's clock: the time of an object written for the purpose, in seconds."""

    def free_space(self) -> int | None:
        """Bytes that can still be stored; ``None`` where that is unknown or has no limit."""
        return None

    def local_path(self, key: str) -> str | None:
        """The path of ``key`` on this machine's file system, if it has one."""
        del key
        return None

    def describe(self) -> Iterable[Finding]:
        """What looking at this kind of place tells, for ``ckpt doctor``. Changes nothing."""
        return ()

    def examine(self, scratch: str) -> Iterable[Finding]:
        """What can be found out only by trying, and only about this kind of place.

        Args:
            scratch: A directory, which exists; nothing is written elsewhere, and it is removed
                afterwards.
        """
        del scratch
        return ()

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of connections. May be called twice."""
