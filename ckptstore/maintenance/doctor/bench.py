"""What the checks share: two clients of one place, and a directory to try things in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError
from ckptstore.hashing import BLOCK_SIZE


@dataclass(frozen=True)
class Bench:
    """A place on the bench.

    Attributes:
        make: Makes another client of it.
        here: The client that changes things.
        other: A second client, which looks at what the first one did.
        scratch: The directory that all trials are in.
        size: Bytes of the speed test.
        patience: Seconds to wait for what a listing must show.
    """

    make: Callable[[], Backend]
    here: Backend
    other: Backend
    scratch: str
    size: int
    patience: float

    def key(self, name: str) -> str:
        """A key in the scratch directory."""
        return f"{self.scratch}/{name}"

    def within_patience(self, holds: Callable[[], bool]) -> float | None:
        """Seconds until ``holds`` did; 0.0 when it did at once, ``None`` when it never did."""
        start = time.monotonic()
        pause = 0.05
        if holds():
            return 0.0
        while (spent := time.monotonic() - start) < self.patience:
            time.sleep(min(pause, self.patience - spent))
            pause *= 1.5
            if holds():
                return time.monotonic() - start
        return None


def write_object(backend: Backend, key: str, data: memoryview) -> str | None:
    """Write an object as a save does; returns the checksum that the storage keeps, if any.

    Where blocks may come in any order the last one comes first.
    """
    size = len(data)
    writer = backend.open_writer(key, size=size)
    try:
        offsets = list(range(0, size, BLOCK_SIZE))
        if backend.capabilities.in_parallel(size):
            offsets.reverse()
        for offset in offsets:
            writer.write(offset, data[offset : offset + BLOCK_SIZE])
        writer.finish(size)
    finally:
        writer.abort()
    return writer.crc64nvme


def read_object(backend: Backend, key: str) -> bytes:
    """All bytes of an object, read by blocks as a load does."""
    reader = backend.open_reader(key)
    try:
        data = bytearray(reader.size)
        view = memoryview(data)
        for offset in range(0, reader.size, BLOCK_SIZE):
            part = view[offset : offset + BLOCK_SIZE]
            if reader.read_into(offset, part) != len(part):
                raise CkptError(f"{key}: it ends before byte {reader.size}, its size")
        return bytes(data)
    finally:
        reader.close()
