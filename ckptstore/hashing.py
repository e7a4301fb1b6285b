"""Digests: blocks, files, and the content of a checkpoint.

A file is hashed in blocks of 16 MiB so that blocks can be hashed in parallel, a part of a file can
be verified without the rest, and damage can be named and repaired by the block. Every digest is 32
bytes of BLAKE3, written as 64 lowercase hexadecimal digits, and each can be recomputed with
``b3sum`` and ``jq`` (docs/format.md shows how).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from blake3 import blake3

BLOCK_SIZE = 16 * 1024 * 1024
"""Bytes in a block; fixed in format 1."""

FILE_CONTEXT = "ckptstore format 1 file digest"
CONTENT_CONTEXT = "ckptstore format 1 content digest"

Buffer = bytes | bytearray | memoryview


def block_digest(data: Buffer) -> str:
    """Plain BLAKE3 of ``data``: what ``b3sum`` prints for it."""
    return blake3(data).hexdigest()


def block_count(size: int) -> int:
    """How many blocks a file of ``size`` bytes has; 0 for an empty file."""
    return -(-size // BLOCK_SIZE)


def block_range(index: int, size: int) -> tuple[int, int]:
    """Offset and length of block ``index`` in a file of ``size`` bytes."""
    offset = index * BLOCK_SIZE
    return offset, min(BLOCK_SIZE, size - offset)


def file_digest(size: int, blocks: Sequence[str]) -> str:
    """The digest of a file: BLAKE3 in derive-key mode over size, block size and block digests.

    The input is text: the size, the block size and each block's digest, a line each.
    """
    lines = "\n".join((str(size), str(BLOCK_SIZE), *blocks, ""))
    return blake3(lines.encode("ascii"), derive_key_context=FILE_CONTEXT).hexdigest()


def content_digest(
    files: Iterable[tuple[str, int, str, bool]], empty_directories: Iterable[str]
) -> str:
    """The digest of what a checkpoint holds, whatever its name, time or metadata.

    Args:
        files: ``(path, size, file digest, executable)`` in the manifest's order.
        empty_directories: Paths in the manifest's order.
    """
    hasher = blake3(derive_key_context=CONTENT_CONTEXT)
    for path, size, digest, executable in files:
        hasher.update(f"{digest} {size} {'x' if executable else '-'} {path}\n".encode())
    for path in empty_directories:
        hasher.update(f"directory {path}\n".encode())
    return hasher.hexdigest()


@cache
def zero_block_digest() -> str:
    """Digest of a whole block of zeros: a writer may leave a hole instead of writing it."""
    return block_digest(bytes(BLOCK_SIZE))
