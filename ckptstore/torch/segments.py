"""Memory as a file: what the data mover reads when tensors are saved, and fills when they load."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ckptstore.backends.base import Reader, Writer


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes that can be written where it can.

    (``reshape(-1)`` would not do: a single element keeps whatever stride it has.)
    """
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy().data).cast("B")


class Segments(Reader):
    """Pieces of memory, one behind the other, read as one file.

    Args:
        pieces: The pieces; they must not change before the reader is closed.
    """

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = [np.frombuffer(p, dtype=np.uint8) for p in pieces if len(p)]
        self._starts = [0]
        for piece in self._pieces:
            self._starts.append(self._starts[-1] + len(piece))
        self.size = self._starts[-1]

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Reader`."""
        target = np.frombuffer(buffer, dtype=np.uint8)
        done = 0
        index = bisect_right(self._starts, offset) - 1
        while done < len(target) and index < len(self._pieces):
            start = offset + done - self._starts[index]
            part = self._pieces[index][start : start + len(target) - done]
            target[done : done + len(part)] = part  # copied without the interpreter's lock
            done += len(part)
            index += 1
        return done

    def view(self, offset: int, length: int) -> memoryview | None:
        """See :class:`Reader`."""
        index = bisect_right(self._starts, offset) - 1
        if index >= len(self._pieces) or offset + length > self._starts[index + 1]:
            return None
        start = offset - self._starts[index]
        return self._pieces[index][start : start + length].data

    def close(self) -> None:
        """See :class:`Reader`."""


class Scatter(Writer):
    """Takes blocks of a file and copies what was asked for to where it belongs.

    Args:
        ranges: ``(offset in the file, memory)``.
    """

    def __init__(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        ordered = sorted(((o, m) for o, m in ranges if len(m)), key=lambda r: r[0])
        self._offsets = [offset for offset, _ in ordered]
        self._targets = [np.frombuffer(memory, dtype=np.uint8) for _, memory in ordered]
        # Ranges may overlap (tied weights): the end of the furthest one up to each.
        self._reach = list(accumulate((o + len(m) for o, m in ordered), max))

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`Writer`."""
        source = np.frombuffer(data, dtype=np.uint8)
        end = offset + len(source)
        index = bisect_right(self._reach, offset)
        while index < len(self._offsets) and self._offsets[index] < end:
            start, target = self._offsets[index], self._targets[index]
            low, high = max(start, offset), min(start + len(target), end)
            if low < high:
                target[low - start : high - start] = source[low - offset : high - offset]
            index += 1

    def skip_zeros(self, offset: int, length: int) -> bool:
        """See :class:`Writer`. The memory may hold anything: zeros are written like all else."""
        del offset, length
        return False

    def finish(self, size: int) -> None:
        """See :class:`Writer`."""

    def abort(self) -> None:
        """See :class:`Writer`."""
