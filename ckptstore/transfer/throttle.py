"""A limit on bytes a second, shared by all that is written at the same time."""

from __future__ import annotations

import threading
import time

from ckptstore.backends.base import Writer
from ckptstore.errors import CancelledError


class Throttle:
    """Lets ``rate`` bytes a second through, whoever asks, after a burst of a second's worth.

    Args:
        rate: Bytes a second.
        cancel: Set it, and nobody waits any longer.
    """

    def __init__(self, rate: int, cancel: threading.Event | None = None) -> None:
        self.rate = rate
        self._cancel = cancel or threading.Event()
        self._lock = threading.Lock()
        self._free_at = time.monotonic() - 1.0

    def take(self, count: int) -> None:
        """Wait until ``count`` more bytes may go.

        Raises:
            CancelledError: ``cancel`` was set.
        """
        with self._lock:
            now = time.monotonic()
            begin = max(self._free_at, now - 1.0)
            self._free_at = begin + count / self.rate
            wait = self._free_at - now
        if wait > 0 and self._cancel.wait(wait):
            raise CancelledError("cancelled")


class ThrottledWriter(Writer):
    """A writer that waits its turn before each block."""

    def __init__(self, inner: Writer, throttle: Throttle) -> None:
        self._inner = inner
        self._throttle = throttle

    def kept(self, offset: int, data: memoryview) -> bool:
        """See :class:`Writer`."""
        return self._inner.kept(offset, data)

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`Writer`."""
        self._throttle.take(len(data))
        self._inner.write(offset, data)

    def skip_zeros(self, offset: int, length: int) -> bool:
        """See :class:`Writer`."""
        return self._inner.skip_zeros(offset, length)

    def finish(self, size: int) -> None:
        """See :class:`Writer`."""
        self._inner.finish(size)
        self.crc64nvme = self._inner.crc64nvme

    def abort(self) -> None:
        """See :class:`Writer`."""
        self._inner.abort()
