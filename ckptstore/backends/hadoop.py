"""A store on HDFS, through any client of it.

What makes it safe there: everything is written under a temporary name, completed, and then renamed
to its key, and a rename without the option to overwrite fails when anything is at the target. The
NameNode does it in one step, so of many that create a record one wins, and what stands at a key is
whole: a writer that dies leaves a temporary file, whatever its length and whoever holds its lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from ckptstore.backends.base import Backend, Capabilities, CopyKind, Entries, Entry, Reader, Writer
from ckptstore.backends.hadoopclient import HadoopClient, Sink, Source, Status
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    TemporaryError,
    UsageError,
    printable,
)
from ckptstore.ids import random_letters
from ckptstore.layout import TEMPORARY_PREFIX

PARALLEL_READS = 8


class HadoopBackend(Backend):
    """A directory on HDFS.

    Args:
        client: How the NameNode is reached.
        root: Absolute path of the store, without a slash at its end; empty for all of HDFS.
    """

    def __init__(self, client: HadoopClient, root: str) -> None:
        self._client = client
        self._root = root
        self.uri = f"{client.address}{root}"
        self.capabilities = Capabilities(
            exclusive_create=client.exclusive_rename,
            moves_no_bytes=False,
            takes=client.exclusive_rename,
            durable_sync=client.durable,
            parallel_blocks=False,
            parallel_reads=PARALLEL_READS,
            forbidden=":",
        )

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root or "/"

    def _new_path(self, key: str) -> str:
        """The path of a key that shall be made.

        Raises:
            UsageError: HDFS keeps such a name for itself.
        """
        if ".snapshot" in key.split("/"):
            raise UsageError(
                f"{printable(key)!r} cannot be stored in {self.uri}: "
                "HDFS keeps the name .snapshot for itself"
            )
        self._client.check_path(key)
        return self._path(key)

    def stat(self, key: str) -> Entry | None:
        """See :class:`Backend`."""
        found = self._client.status(self._path(key))
        return None if found is None or found.size < 0 else _entry(key, found)

    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        """See :class:`Backend`."""
        entries: Entries = []
        pending = [prefix]
        while pending:
            directory = pending.pop()
            start = f"{directory}/" if directory else ""
            # One that is not there was deleted meanwhile, or never was.
            for found in self._client.list(self._path(directory)) or ():
                key = start + found.name
                if not (recursive and found.is_directory):
                    entries.append(_entry(key, found))
                else:
                    pending.append(key)
        return entries

    def read(self, key: str, limit: int) -> bytes:
        """See :class:`Backend`."""
        return self._client.read(self._path(key), limit)

    def open_reader(self, key: str) -> Reader:
        """See :class:`Backend`."""
        return _HadoopReader(self._client.open(self._path(key)))

    def open_writer(
        self,
        key: str,
        *,
        size: int | None = None,
        executable: bool = False,
        replace: bool = False,
        resume: bool = False,
    ) -> Writer:
        """See :class:`Backend`. Nothing is resumed inside a file, and pyarrow replaces with a gap.

        What a killed writer leaves has a lease for up to an hour, and of its last block nobody
        knows how long it is before that was recovered, which not all clients can ask for.
        """
        del size, resume
        path = self._new_path(key)
        return _HadoopWriter(self._client, path, executable=executable, replace=replace)

    def put(self, key: str, data: bytes) -> None:
        """See :class:`Backend`."""
        self._create(self._path(key), data, replace=True)

    def create_exclusive(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        return self._create(self._new_path(key), data)

    def _create(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        """Write a file whole, then give it its name. Returns whether it has it."""
        temporary = _beside(path)
        self._write(temporary, data)
        try:
            created = self._client.rename(temporary, path, replace=replace)
        except CkptError:
            with suppress(CkptError):  # a temporary that stays is for gc
                self._client.delete(temporary)
            raise
        if not created:
            self._client.delete(temporary)
        return created

    def _write(self, path: str, data: bytes) -> Status:
        sink = self._client.create(path)
        try:
            sink.write(memoryview(data))
            sink.close()
        except BaseException:
            sink.abort()
            with suppress(CkptError):
                self._client.delete(path)
            raise
        found = self._client.status(path)
        if found is None or found.size != len(data):
            raise TemporaryError(f"{self.uri}: a file that was written is not there, or not whole")
        return found

    def remove_if(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`.

        The object is looked at, renamed aside, looked at again, and put back if it is another one:
        deleting after a look could remove what came in between.
        """
        path = self._path(key)
        aside = _beside(path)
        try:
            if not self._holds(path, data) or not self._client.rename(path, aside):
                return False
        except NotFoundError:
            return False
        same = False
        try:
            same = self._holds(aside, data)
        finally:
            if not same and not self._client.rename(aside, path):
                raise TemporaryError(
                    f"{printable(path)} was replaced while it was looked at",
                    hint=f"what it was is kept in {printable(aside)}",
                )
        if same:
            self._client.delete(aside)
        return same

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            return self._client.read(path, len(data)) == data
        except IntegrityError:  # it is longer
            return False

    def make_directory(self, key: str) -> bool:
        """See :class:`Backend`.

        Making a directory that exists is no error on HDFS, so one of another name is renamed.
        """
        path = self._new_path(key)
        temporary = _beside(path)
        self._client.make_directories(temporary)
        try:
            if self._client.rename(temporary, path):
                return True
        except CkptError:
            with suppress(CkptError):
                self._client.delete(temporary)
            raise
        self._client.delete(temporary)
        return False

    def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """See :class:`Backend`. HDFS has neither links nor copies on its own side."""
        del source, target, executable
        return None

    def take(self, source: str, target: str) -> bool:
        """See :class:`Backend`."""
        if not self.capabilities.takes:
            return False
        from_path, to_path = self._path(source), self._new_path(target)
        self._client.make_directories(to_path.rpartition("/")[0])
        if not self._client.rename(from_path, to_path):
            raise ConflictError(f"{printable(target)} exists already")
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`Backend`."""
        for key in keys:
            self._client.delete(self._path(key))

    def remove_tree(self, prefix: str) -> None:
        """See :class:`Backend`."""
        self._client.delete(self._path(prefix), recursive=True)

    def sync(self, directories: Iterable[str]) -> None:
        """See :class:`Backend`. The NameNode has a name on its disks before it answers."""

    def set_hint(self, key: str, target: str) -> None:
        """See :class:`Backend`."""
        self.put(key, f"{target}\n".encode())

    def clock(self) -> float:
        """See :class:`Backend`."""
        temporary = _beside(self._path("x"))
        try:
            return self._write(temporary, b"").modified
        finally:
            with suppress(CkptError):
                self._client.delete(temporary)

    def close(self) -> None:
        """See :class:`Backend`."""
        self._client.close()


def _entry(key: str, found: Status) -> Entry:
    return Entry(key, found.size, found.modified, is_directory=found.is_directory)


def _beside(path: str) -> str:
    """A new name beside ``path`` that readers and gc know as that of something incomplete."""
    return f"{path.rpartition('/')[0]}/{TEMPORARY_PREFIX}{random_letters()}"


class _HadoopReader(Reader):
    """A file open for ranged reads."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.size = source.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Reader`."""
        wanted = max(0, min(len(buffer), self.size - offset))
        done = 0
        while done < wanted:
            count = self._source.read_into(offset + done, buffer[done:wanted])
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        """See :class:`Reader`."""
        self._source.close()


class _HadoopWriter(Writer):
    """A file under a temporary name until it is complete."""

    def __init__(self, client: HadoopClient, path: str, *, executable: bool, replace: bool) -> None:
        self._client = client
        self._path = path
        self._replace = replace
        self._temporary = _beside(path)
        self._position = 0
        self._done = False
        self._cut_off = False
        self._sink: Sink = client.create(self._temporary, executable=executable)

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`Writer`."""
        assert offset == self._position
        try:
            self._sink.write(data)
        except TemporaryError:
            self._cut_off = True
            raise
        self._position += len(data)

    def skip_zeros(self, offset: int, length: int) -> bool:
        """See :class:`Writer`. HDFS has no holes."""
        del offset, length
        return False

    def finish(self, size: int) -> None:
        """See :class:`Writer`."""
        assert size == self._position
        try:
            self._sink.close()
            free = self._client.rename(self._temporary, self._path, replace=self._replace)
        except TemporaryError:
            self._cut_off = True
            raise
        if not free:
            raise ConflictError(f"{printable(self._path)} exists already")
        self._done = True

    def abort(self) -> None:
        """See :class:`Writer`.

        What cannot be deleted now goes with its directory: by the save that failed, or by gc.
        """
        if self._done:
            return
        self._done = True
        self._sink.abort()
        if not self._cut_off:  # else each file would wait for a server that does not answer
            with suppress(CkptError):
                self._client.delete(self._temporary)
