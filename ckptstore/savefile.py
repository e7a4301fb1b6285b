"""A file of a checkpoint that is written through a file object."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ckptstore.backends.base import Writer
from ckptstore.hashing import BLOCK_SIZE, block_digest
from ckptstore.manifest import FileEntry


class SaveFile(io.RawIOBase):
    """A file of a checkpoint, written front to back.

    It counts only when it is closed without an error: leaving its ``with`` block by an exception,
    or forgetting it, gives it up.
    """

    def __init__(
        self,
        writer: Writer,
        path: str,
        *,
        executable: bool,
        complete: Callable[[FileEntry, int], None],
        given_up: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._tell_given_up = given_up
        self._complete = complete
        self._path = path
        self._writer = writer
        self._executable = executable
        self._buffer = bytearray()
        self._offset = 0
        self._blocks: list[str] = []
        self._given_up = False

    def writable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._offset + len(self._buffer)

    def write(self, data: Any) -> int:
        """Append ``data`` (any buffer). Returns its length in bytes."""
        if self.closed:
            raise ValueError("write to a closed file")
        view = memoryview(data).cast("B")
        length = len(view)
        while view:
            part = view[: BLOCK_SIZE - len(self._buffer)]
            self._buffer += part
            view = view[len(part) :]
            if len(self._buffer) == BLOCK_SIZE:
                self._flush_block()
        return length

    def _flush_block(self) -> None:
        self._blocks.append(block_digest(self._buffer))
        with memoryview(self._buffer) as view:
            self._writer.write(self._offset, view)
        self._offset += len(self._buffer)
        self._buffer = bytearray()  # not cleared: a client may hold a view of what it has sent

    def close(self) -> None:
        """Complete the file."""
        if self.closed:
            return
        try:
            if not self._given_up:
                if self._buffer:
                    self._flush_block()
                self._writer.finish(self._offset)
                entry = FileEntry.build(
                    self._path,
                    self._offset,
                    self._blocks,
                    executable=self._executable,
                    crc64nvme=self._writer.crc64nvme,
                )
                self._complete(entry, self._offset)
        finally:
            self._writer.abort()
            super().close()

    def give_up(self) -> None:
        """Close it without making it part of the checkpoint."""
        self._given_up = True
        self.close()
        self._tell_given_up(self._path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.give_up()
        else:
            self.close()

    def __del__(self) -> None:
        if not self.closed:
            self.give_up()
