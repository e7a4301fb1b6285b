"""A store in this process's memory: for tests, and as the smallest example of a backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ckptstore.backends.base import Backend, Capabilities, CopyKind, Entries, Entry, Reader, Writer
from ckptstore.backends.findings import Finding
from ckptstore.errors import ConflictError, IntegrityError, NotFoundError, UsageError, printable
from ckptstore.uri import StoreURI


@dataclass
class Space:
    """What one memory store holds.

    Attributes:
        objects: Data and time by key.
        directories: Those that were made on purpose.
        unfinished: What interrupted writers left, by key and size.
    """

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    unfinished: dict[tuple[str, int], bytearray] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def copy(self) -> Space:
        """An independent space with the same content."""
        with self.lock:
            unfinished = {which: bytearray(data) for which, data in self.unfinished.items()}
            return Space(dict(self.objects), set(self.directories), unfinished)


_spaces: dict[str, Space] = {}
_spaces_lock = threading.Lock()


class MemoryBackend(Backend):
    """Objects in a dictionary; everything is atomic.

    Args:
        space: Where the objects are.
        name: The store's name in ``memory://name``.
        clock: Seconds since the epoch, the time that new objects get.
    """

    def __init__(
        self, space: Space, name: str = "anonymous", clock: Callable[[], float] = time.time
    ) -> None:
        self.space = space
        self.uri = f"memory://{name}"
        self.capabilities = Capabilities(durable_sync=False, parallel_blocks=False, resumes=True)
        self._clock = clock

    @classmethod
    def from_uri(cls, uri: StoreURI) -> MemoryBackend:
        """The backend that a ``memory`` URI names; one space for each name in a process.

        Raises:
            UsageError: an option is given.
        """
        if uri.options:
            raise UsageError(f"unknown option for a memory store: {', '.join(uri.options)}")
        with _spaces_lock:
            return cls(_spaces.setdefault(uri.path, Space()), uri.path)

    def stat(self, key: str) -> Entry | None:
        """See :class:`Backend`."""
        with self.space.lock:
            found = self.space.objects.get(key)
            if found is not None:
                return Entry(key, len(found[0]), found[1])
            if key in self.space.directories or any(
                other.startswith(f"{key}/") for other in self.space.objects
            ):
                return Entry(key, 0, 0.0, is_directory=True)
            return None

    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        """See :class:`Backend`."""
        start = f"{prefix}/" if prefix else ""
        found: dict[str, Entry] = {}
        with self.space.lock:
            for key, (data, modified) in self.space.objects.items():
                if not key.startswith(start):
                    continue
                below, slash, _ = key[len(start) :].partition("/")
                if slash and not recursive:
                    found[start + below] = Entry(start + below, 0, 0.0, is_directory=True)
                else:
                    found[key] = Entry(key, len(data), modified)
            for key in self.space.directories:
                if key.startswith(start) and not recursive:
                    child = start + key[len(start) :].partition("/")[0]
                    found[child] = Entry(child, 0, 0.0, is_directory=True)
        return list(found.values())

    def read(self, key: str, limit: int) -> bytes:
        """See :class:`Backend`."""
        data = self._get(key)
        if len(data) > limit:
            raise IntegrityError(f"{printable(key)} is {len(data)} bytes long, over {limit}")
        return data

    def _get(self, key: str) -> bytes:
        with self.space.lock:
            found = self.space.objects.get(key)
        if found is None:
            raise NotFoundError(f"{self.uri}/{printable(key)}: no such object")
        return found[0]

    def open_reader(self, key: str) -> Reader:
        """See :class:`Backend`."""
        return _MemoryReader(self._get(key))

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
        del executable
        if not resume:
            return _MemoryWriter(self, key, bytearray(), replace=replace)
        assert size is not None
        with self.space.lock:
            data = self.space.unfinished.setdefault((key, size), bytearray())
        return _MemoryWriter(self, key, data, replace=replace)

    def put(self, key: str, data: bytes) -> None:
        """See :class:`Backend`."""
        with self.space.lock:
            self.space.objects[key] = (data, self._clock())

    def create_exclusive(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        with self.space.lock:
            if key in self.space.objects:
                return False
            self.put(key, data)
            return True

    def remove_if(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        with self.space.lock:
            found = self.space.objects.get(key)
            if found is None or found[0] != data:
                return False
            del self.space.objects[key]
            return True

    def make_directory(self, key: str) -> bool:
        """See :class:`Backend`."""
        with self.space.lock:
            if self.stat(key) is not None:
                return False
            self.space.directories.add(key)
            return True

    def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """See :class:`Backend`."""
        del executable
        if not self.create_exclusive(target, self._get(source)):
            raise ConflictError(f"{self.uri}/{printable(target)} exists already")
        return "server"

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`Backend`."""
        with self.space.lock:
            for key in keys:
                self.space.objects.pop(key, None)

    def remove_tree(self, prefix: str) -> None:
        """See :class:`Backend`."""
        with self.space.lock:
            self.delete([e.key for e in self.list(prefix, recursive=True)])
            self.space.directories = {
                d for d in self.space.directories if d != prefix and not d.startswith(f"{prefix}/")
            }

    def sync(self, directories: Iterable[str]) -> None:
        """See :class:`Backend`. Memory does not survive a power cut."""

    def set_hint(self, key: str, target: str) -> None:
        """See :class:`Backend`."""
        self.put(key, target.encode() + b"\n")

    def clock(self) -> float:
        """See :class:`Backend`."""
        return self._clock()

    def describe(self) -> Iterable[Finding]:
        """See :class:`Backend`."""
        hint = "it is for tests: nothing is left of it when the process ends"
        return [Finding.warning("place", "this process's memory", hint)]


class _MemoryReader(Reader):
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


class _MemoryWriter(Writer):
    def __init__(self, backend: MemoryBackend, key: str, data: bytearray, *, replace: bool) -> None:
        self._backend = backend
        self._key = key
        self._data = data
        self._replace = replace

    def write(self, offset: int, data: memoryview) -> None:
        self._data[offset : offset + len(data)] = data

    def kept(self, offset: int, data: memoryview) -> bool:
        return self._data[offset : offset + len(data)] == data

    def skip_zeros(self, offset: int, length: int) -> bool:
        del offset, length
        return False

    def finish(self, size: int) -> None:
        assert len(self._data) == size
        with self._backend.space.lock:
            unfinished = self._backend.space.unfinished
            if unfinished.get((self._key, size)) is self._data:
                del unfinished[self._key, size]
        if self._replace:
            self._backend.put(self._key, bytes(self._data))
        elif not self._backend.create_exclusive(self._key, bytes(self._data)):
            raise ConflictError(f"{self._backend.uri}/{printable(self._key)} exists already")

    def abort(self) -> None:
        self._data = bytearray()
