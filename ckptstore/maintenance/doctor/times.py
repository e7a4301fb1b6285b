"""Clocks, and how long things take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median

from ckptstore.backends.base import Backend
from ckptstore.backends.findings import Finding
from ckptstore.durations import spell_moment
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.leases import STALE_SECONDS
from ckptstore.maintenance.doctor.bench import Bench

SKEW_WARNING = 5.0
"""Seconds that clocks may be apart; object stores tell whole seconds only."""

SKEW_FAILURE = STALE_SECONDS / 2
"""A quarter of an hour: S3 refuses requests from then on, and between the clocks of one storage it
is half of what a lease lives."""

SLOW_BYTES = 50e6
"""Below so many bytes a second a checkpoint of 100 GB takes more than half an hour."""

SLOW_REQUEST = 0.2
"""Seconds of a small request: a listing of 1,000 checkpoints then takes many."""

_LOOKS = 11
_CHECKPOINT = 100e9


def clock(bench: Bench) -> Finding:
    """The storage's clock agrees with itself, and with this machine's."""
    check = "clock"
    ahead = [_ahead(client) for client in (bench.here, bench.other, bench.here)]
    skew, spread = median(ahead), max(ahead) - min(ahead)
    numbers = {"skew_seconds": round(skew, 3), "spread_seconds": round(spread, 3)}
    if spread > SKEW_WARNING:
        detail = f"the storage's clock jumps: three looks at it are {spread:.0f} s apart"
        hint = "set the clocks of its nodes: a live save could be taken for dead"
        kind = Finding.failed if spread > SKEW_FAILURE else Finding.warning
        return kind(check, detail, hint, **numbers)
    if abs(skew) > SKEW_WARNING:
        side = "ahead of" if skew > 0 else "behind"
        detail = f"the storage's clock is {abs(skew):.0f} s {side} this machine's"
        hint = "set the clock of the one that is wrong (chronyc tracking, timedatectl)"
        kind = Finding.failed if abs(skew) > SKEW_FAILURE else Finding.warning
        return kind(check, detail, hint, **numbers)
    return Finding.ok(check, f"within {max(1.0, abs(skew)):.0f} s of this machine's", **numbers)


def _ahead(client: Backend) -> float:
    """How far the storage's clock is ahead of this machine's, in seconds."""
    before = time.time()
    told = client.clock()
    after = time.time()
    return told - min(max(told, before), after)


def latency(bench: Bench) -> Finding:
    """How long a small request takes."""
    check, key = "latency", bench.key("small")
    writes = [_seconds(lambda: bench.here.put(key, b"small")) for _ in range(_LOOKS // 2)]
    looks = [_seconds(lambda: bench.other.stat(key)) for _ in range(_LOOKS)]
    look, write = median(looks), median(writes)
    detail = f"{spell_moment(look)} for a look, {spell_moment(write)} for a small write (median)"
    numbers = {"look_seconds": round(look, 6), "write_seconds": round(write, 6)}
    if look > SLOW_REQUEST:
        hint = "many small files take long here: is the place near, and not behind a slow proxy?"
        return Finding(check, "slow", detail, hint, numbers=numbers)
    return Finding.ok(check, detail, **numbers)


def _seconds(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def upload(bench: Bench) -> Finding:
    """How fast a large object is stored, durably."""
    key, blocks = bench.key("large"), _Blocks(bench.size)
    writer = bench.here.open_writer(key, size=bench.size)
    start = time.monotonic()
    try:
        parallel = bench.here.capabilities.in_parallel(bench.size)
        with ThreadPoolExecutor(_threads(bench.here) if parallel else 1) as pool:
            list(pool.map(lambda at: writer.write(at, blocks.at(at)), blocks.offsets))
        writer.finish(bench.size)
        seconds = time.monotonic() - start
    finally:
        writer.abort()
    return _speed("upload", bench.size, seconds)


def download(bench: Bench) -> Finding:
    """How fast a large object is read, from the storage and not from this machine's memory."""
    key = bench.key("large")
    if bench.other.stat(key) is None:
        return Finding.skipped("download", "there is nothing to read: the upload failed")
    _forget(bench.other.local_path(key))
    reader = bench.other.open_reader(key)
    try:

        def read(offset: int) -> bool:
            length = min(BLOCK_SIZE, reader.size - offset)
            into = bytearray(length)
            return reader.read_into(offset, memoryview(into)) == length

        start = time.monotonic()
        with ThreadPoolExecutor(_threads(bench.other)) as pool:
            whole = list(pool.map(read, range(0, reader.size, BLOCK_SIZE)))
        seconds = time.monotonic() - start
    finally:
        reader.close()
    if not all(whole) or reader.size != bench.size:
        return Finding.failed("download", "a large object came back shorter than it was written")
    return _speed("download", bench.size, seconds)


def _threads(backend: Backend) -> int:
    return backend.capabilities.threads or os.cpu_count() or 1


class _Blocks:
    """Bytes that no storage can compress, a block at a time and without holding them all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._random = memoryview(os.urandom(BLOCK_SIZE) * 2)
        self.offsets = range(0, size, BLOCK_SIZE)

    def at(self, offset: int) -> memoryview:
        start = offset // BLOCK_SIZE * 7919 % BLOCK_SIZE
        return self._random[start : start + min(BLOCK_SIZE, self._size - offset)]


def _forget(path: str | None) -> None:
    """Have the kernel drop a file from its cache, where it can."""
    if path is None or not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _speed(check: str, size: int, seconds: float) -> Finding:
    rate = size / max(seconds, 1e-6)
    minutes = _CHECKPOINT / rate / 60
    took = f"{minutes * 60:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
    if minutes > 120:
        took = f"{minutes / 60:.0f} h"
    detail = f"{rate / 1e6:.0f} MB/s: a checkpoint of 100 GB takes {took}"
    numbers = {"bytes": size, "seconds": round(seconds, 6), "bytes_per_second": round(rate)}
    if rate < SLOW_BYTES:
        hint = "save less often, or keep checkpoints nearer; --size 1GB measures longer"
        return Finding(check, "slow", detail, hint, numbers=numbers)
    return Finding.ok(check, detail, **numbers)
