"""A backend around a backend that tells of every operation, before and after it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from ckptstore.backends.base import (
    Backend,
    CopyKind,
    Entries,
    Entry,
    Reader,
    Unfinished,
    Writer,
)
from ckptstore.backends.findings import Finding

T = TypeVar("T")
Phase = Literal["before", "after"]
Hook = Callable[[str, str, Phase], None]
"""Called with the operation's name, its key, and whether it is about to happen or has happened.

What it raises takes the operation's place: ``before`` it was never done, ``after`` it was done and
its answer was lost.
"""


class HookedBackend(Backend):
    """Does what ``inner`` does, and calls ``hook`` around each operation."""

    def __init__(self, inner: Backend, hook: Hook) -> None:
        self.inner = inner
        self.hook = hook
        self.uri = inner.uri
        self.capabilities = inner.capabilities

    def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
        """Call ``call`` between the two phases of the hook."""
        self.hook(operation, key, "before")
        result = call()
        self.hook(operation, key, "after")
        return result

    def stat(self, key: str) -> Entry | None:
        """See :class:`Backend`."""
        return self.around("stat", key, lambda: self.inner.stat(key))

    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        """See :class:`Backend`."""
        return self.around("list", prefix, lambda: self.inner.list(prefix, recursive=recursive))

    def read(self, key: str, limit: int) -> bytes:
        """See :class:`Backend`."""
        return self.around("read", key, lambda: self.inner.read(key, limit))

    def open_reader(self, key: str) -> Reader:
        """See :class:`Backend`."""
        return self.around("open_reader", key, lambda: self.inner.open_reader(key))

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
        writer = self.around(
            "open_writer",
            key,
            lambda: self.inner.open_writer(
                key, size=size, executable=executable, replace=replace, resume=resume
            ),
        )
        return _HookedWriter(self, key, writer)

    def put(self, key: str, data: bytes) -> None:
        """See :class:`Backend`."""
        self.around("put", key, lambda: self.inner.put(key, data))

    def create_exclusive(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        return self.around("create_exclusive", key, lambda: self.inner.create_exclusive(key, data))

    def remove_if(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        return self.around("remove_if", key, lambda: self.inner.remove_if(key, data))

    def make_directory(self, key: str) -> bool:
        """See :class:`Backend`."""
        return self.around("make_directory", key, lambda: self.inner.make_directory(key))

    def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """See :class:`Backend`."""
        return self.around(
            "copy", target, lambda: self.inner.copy(source, target, executable=executable)
        )

    def copy_over(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """See :class:`Backend`."""
        return self.around(
            "copy_over",
            target,
            lambda: self.inner.copy_over(source, target, executable=executable),
        )

    def take(self, source: str, target: str) -> bool:
        """See :class:`Backend`."""
        return self.around("take", target, lambda: self.inner.take(source, target))

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`Backend`. Every key is an operation of its own."""
        for key in keys:
            self.around("delete", key, lambda key=key: self.inner.delete([key]))  # type: ignore[misc]

    def remove_tree(self, prefix: str) -> None:
        """See :class:`Backend`. Every file is an operation of its own."""
        self.delete(sorted(e.key for e in self.inner.list(prefix, recursive=True)))
        self.around("remove_tree", prefix, lambda: self.inner.remove_tree(prefix))

    def sync(self, directories: Iterable[str]) -> None:
        """See :class:`Backend`."""
        for directory in directories:
            self.around(
                "sync",
                directory,
                lambda directory=directory: self.inner.sync([directory]),  # type: ignore[misc]
            )

    def is_exclusive(self) -> bool:
        """See :class:`Backend`. It is not one of the operations."""
        return self.inner.is_exclusive()

    def checksum(self, key: str) -> str | None:
        """See :class:`Backend`."""
        return self.around("checksum", key, lambda: self.inner.checksum(key))

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """See :class:`Backend`."""
        return self.around("unfinished", prefix, lambda: self.inner.unfinished(prefix))

    def discard_unfinished(self, uploads: Iterable[Unfinished]) -> None:
        """See :class:`Backend`."""
        for upload in uploads:
            self.around(
                "discard_unfinished",
                upload.key,
                lambda upload=upload: self.inner.discard_unfinished([upload]),  # type: ignore[misc]
            )

    def set_hint(self, key: str, target: str) -> None:
        """See :class:`Backend`."""
        self.around("set_hint", key, lambda: self.inner.set_hint(key, target))

    def clock(self) -> float:
        """See :class:`Backend`."""
        return self.around("clock", "", self.inner.clock)

    def local_path(self, key: str) -> str | None:
        """See :class:`Backend`."""
        return self.inner.local_path(key)

    def describe(self) -> Iterable[Finding]:
        """See :class:`Backend`. It is not one of the operations."""
        return self.inner.describe()

    def examine(self, scratch: str) -> Iterable[Finding]:
        """See :class:`Backend`. It is not one of the operations."""
        return self.inner.examine(scratch)

    def close(self) -> None:
        """See :class:`Backend`."""
        self.inner.close()


class _HookedWriter(Writer):
    def __init__(self, backend: HookedBackend, key: str, inner: Writer) -> None:
        self._backend = backend
        self._key = key
        self._inner = inner

    def write(self, offset: int, data: memoryview) -> None:
        self._backend.around("write", self._key, lambda: self._inner.write(offset, data))

    def kept(self, offset: int, data: memoryview) -> bool:
        return self._inner.kept(offset, data)

    def skip_zeros(self, offset: int, length: int) -> bool:
        return self._inner.skip_zeros(offset, length)

    def finish(self, size: int) -> None:
        self._backend.around("finish", self._key, lambda: self._inner.finish(size))
        self.crc64nvme = self._inner.crc64nvme

    def abort(self) -> None:
        self._inner.abort()
