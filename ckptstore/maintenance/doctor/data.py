"""Large objects: what was sent comes back, what was given up leaves nothing, copies are whole."""

from __future__ import annotations

import os

from ckptstore.backends.findings import Finding
from ckptstore.errors import ConflictError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.maintenance.doctor.bench import Bench, read_object, write_object

_SECOND_PART = 100_000
_SMALL = 70_000

_CHECKSUM_HINT = (
    "some servers store checksums that they do not know as if they were data: put checksums=md5 "
    "into the store's URI, and run this again"
)

_HOW = {
    "reflink": "a copy shares its blocks with the original (reflink)",
    "link": "a copy is a hard link to the original",
    "server": "the server copies, no bytes move",
    "bytes": "a copy moves its bytes through this machine",
}


def two_parts(bench: Bench) -> Finding:
    """An object of two blocks (on an object store: two parts) is what was sent."""
    check = "two-parts"
    data = os.urandom(BLOCK_SIZE + _SECOND_PART)
    key = bench.key("two-parts")
    sums = bench.here.capabilities.keeps_checksums
    hint = _CHECKSUM_HINT if sums else "do not keep checkpoints here"
    crc = write_object(bench.here, key, memoryview(data))
    entry = bench.other.stat(key)
    if entry is None:
        return Finding.failed(check, "an object of two parts is not found when it is complete")
    if entry.size != len(data):
        told = f"{len(data)} bytes were written in two parts, and {entry.size} are stored"
        return Finding.failed(check, told, hint)
    back = read_object(bench.other, key)
    if back != data:
        return Finding.failed(check, f"{_difference(data, back)}, in an object of two parts", hint)
    stored = bench.other.checksum(key) if sums else None
    if stored is not None and crc is not None and stored != crc:
        told = f"the server's checksum of two parts is {stored}, and that of the bytes is {crc}"
        return Finding.failed(check, told, hint)
    also = ", and so is the checksum that the server keeps" if stored and crc else ""
    if sums and not also:
        also = "; the server keeps no checksum of the whole"
    return Finding.ok(check, f"{len(data) / 1e6:.1f} MB in two parts are stored exactly{also}")


def _difference(sent: bytes, back: bytes) -> str:
    if len(sent) != len(back):
        return f"{len(sent)} bytes were sent, and {len(back)} came back"
    if back == sent[BLOCK_SIZE:] + sent[:BLOCK_SIZE]:
        return "the parts were joined in the wrong order"
    first = next(i for i, (a, b) in enumerate(zip(sent, back, strict=True)) if a != b)
    return f"what came back differs from byte {first} on"


def abort(bench: Bench) -> Finding:
    """An object that was given up half-way leaves nothing that takes space."""
    check, directory = "abort", bench.key("given-up")
    writer = bench.here.open_writer(f"{directory}/object", size=2 * BLOCK_SIZE)
    try:
        writer.write(0, memoryview(bytes(BLOCK_SIZE)))
    finally:
        writer.abort()
    left = [entry.key for entry in bench.other.list(directory, recursive=True)]
    begun = bench.other.unfinished(directory)
    if left or begun:
        count = len(left) + len(begun)
        return Finding.failed(check, f"a write that was given up left {count} things behind")
    return Finding.ok(check, "a write that is given up leaves nothing behind")


def copy(bench: Bench) -> Finding:
    """A copy is whole, replaces nothing, and outlives its original."""
    check = "copy"
    source, target, third = bench.key("original"), bench.key("copies/copy"), bench.key("third")
    data = os.urandom(_SMALL)
    write_object(bench.here, source, memoryview(data))
    how = bench.here.copy(source, target)
    if how is None:
        if bench.other.stat(target) is not None:
            return Finding.failed(check, "a copy that cannot be made was made nevertheless")
        return Finding.ok(check, "not without moving bytes: each checkpoint stores all its files")
    if read_object(bench.other, target) != data:
        return Finding.failed(check, f"{_HOW[how]}, and is not the same", "do not keep any here")
    write_object(bench.here, third, memoryview(b"another"))
    try:
        bench.here.copy(third, target)
    except ConflictError:
        pass
    else:
        return Finding.failed(check, "a copy replaced what was there")
    bench.here.delete([source])
    if bench.other.stat(target) is None or read_object(bench.other, target) != data:
        return Finding.failed(check, "a copy did not outlive its original", "do not keep any here")
    return Finding.ok(check, _HOW[how])
