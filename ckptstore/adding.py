"""Adding files to a checkpoint that is being written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ckptstore.backends.base import Backend, Reader
from ckptstore.errors import UsageError, printable, translate_os_errors
from ckptstore.layout import Name, RunKeys, check_new_path
from ckptstore.manifest import FileEntry
from ckptstore.savefile import SaveFile
from ckptstore.saveoptions import SaveOptions
from ckptstore.transfer import Moved, Mover, SourceFile, SourceIdentity, Transfer


class Adding:
    """The files of a checkpoint that is being written.

    :class:`ckptstore.saving.Save` is one, with a lease and a commit. The other ranks of a save
    that several write have this alone: it writes files and says what they are.

    ``add_file``, ``add_bytes`` and ``open`` may be called from several threads.

    Args:
        backend: Where the store is.
        run, name: The checkpoint; its directory has been claimed.
        options: What the save was told.

    Attributes:
        run, name: The checkpoint.
        sent_bytes: Bytes that went to the store so far, without the manifest.
    """

    def __init__(self, backend: Backend, run: str, name: Name, options: SaveOptions) -> None:
        self._backend = backend
        self._options = options
        self.run = run
        self.name = name
        self._keys = RunKeys(run)
        self._lock = threading.RLock()  # a file that is collected as garbage comes back here
        self._process = os.getpid()
        self._entries: dict[str, FileEntry] = {}
        self._empty: list[str] = []
        self._open: set[str] = set()
        self._ended = False
        self.sent_bytes = 0

    @property
    def mover(self) -> Mover:
        """A mover with this save's threads, progress and cancellation."""
        options = self._options
        threads = options.threads or self._backend.capabilities.threads
        return Mover(threads=threads, progress=options.progress, cancel=options.cancel)

    @property
    def paths(self) -> frozenset[str]:
        """The files that are complete."""
        with self._lock:
            return frozenset(self._entries)

    @property
    def entries(self) -> list[FileEntry]:
        """What is complete.

        Raises:
            UsageError: a file is still open.
        """
        with self._lock:
            if self._open:
                raise UsageError(f"{printable(min(self._open))!r} is still open in the save")
            return list(self._entries.values())

    def add_file(self, path: str, source: str | os.PathLike[str]) -> None:
        """Store a file of this machine as ``path``.

        Raises:
            SourceChangedError: the file changed while it was read.
        """
        source = os.path.realpath(source)
        with translate_os_errors(source):
            status = os.stat(source)
        identity = SourceIdentity.of(status)
        executable = bool(status.st_mode & 0o100)
        reader = partial(SourceFile, source, identity)
        self.add_transfers([self.transfer(path, status.st_size, reader, executable=executable)])

    def transfer(
        self, path: str, size: int, open_reader: Callable[[], Reader], *, executable: bool = False
    ) -> Transfer:
        """The transfer that stores ``size`` bytes of a reader as ``path``."""
        key = self._keys.file(self.name, path)
        return Transfer(
            path,
            size,
            open_reader=open_reader,
            open_writer=lambda: self._backend.open_writer(key, size=size, executable=executable),
            executable=executable,
            sequential=not self._backend.capabilities.in_parallel(size),
        )

    def add_transfers(self, transfers: Sequence[Transfer]) -> None:
        """Store many files at once, in parallel over files and blocks."""
        self._check_running()
        for transfer in transfers:
            self._reserve(transfer.path)
        self.mover.run(transfers, done=self._moved)

    def _moved(self, moved: Moved) -> None:
        assert moved.entry is not None
        self.complete(moved.entry, moved.written)

    def add_bytes(self, path: str, data: bytes) -> None:
        """Store ``data`` as ``path``."""
        with self.open(path) as f:
            f.write(data)

    def open(self, path: str, *, executable: bool = False) -> SaveFile:
        """A binary file to write ``path`` through; it is complete when it is closed."""
        self._check_running()
        self._reserve(path)
        key = self._keys.file(self.name, path)
        writer = self._backend.open_writer(key, executable=executable)
        with self._lock:
            self._open.add(path)
        return SaveFile(
            writer, path, executable=executable, complete=self.complete, given_up=self._forget
        )

    def add_empty_directory(self, path: str) -> None:
        """Keep a directory that holds nothing."""
        self._check_running()
        check_new_path(path)
        self._empty.append(path)

    def adopt(self, entry: FileEntry, source_key: str, *, given_up: bool = False) -> bool:
        """Take a stored file, known to have the content of ``entry``, without moving its bytes.

        Args:
            entry: What it is.
            source_key: Where it is.
            given_up: It belongs to a save that was given up, so it may also be taken from there.

        Returns:
            Whether that could be done here.
        """
        self._check_running()
        target = self._keys.file(self.name, entry.path)
        if self._backend.copy(source_key, target, executable=entry.exec) is None and not (
            given_up and self._backend.take(source_key, target)
        ):
            return False
        self._reserve(entry.path)
        self.complete(entry, 0)
        return True

    def _reserve(self, path: str) -> None:
        check_new_path(path)
        forbidden = sorted(set(path) & set(self._backend.capabilities.forbidden))
        if forbidden:
            raise UsageError(
                f"{printable(path)!r} cannot be stored in {self._backend.uri}: "
                f"a name cannot hold {' '.join(forbidden)} there"
            )
        with self._lock:
            if path in self._entries or path in self._open:
                raise UsageError(f"{printable(path)!r} was added to the save before")

    def complete(self, entry: FileEntry, written: int) -> None:
        """Count a file whose bytes are in place, ``written`` of them sent."""
        with self._lock:
            self._open.discard(entry.path)
            self._entries[entry.path] = entry
            self.sent_bytes += written

    def _forget(self, path: str) -> None:
        with self._lock:
            self._open.discard(path)

    def _check_running(self) -> None:
        if self._ended:
            raise UsageError("the save has ended")
        if os.getpid() != self._process:
            raise UsageError("a save goes on only in the process that began it, not in a fork")
