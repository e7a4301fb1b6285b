"""What a damaged document was, where that can be proved, and putting it back.

A document carries the digest of its own body. So of all the texts that differ from a damaged
document in one byte, the one whose digest fits is what it was: no other copy needs to be asked,
and it does not matter whether the others are newer or older.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from blake3 import blake3

from ckptstore import document
from ckptstore.backends.base import Backend
from ckptstore.errors import CkptError, IntegrityError, NotFoundError
from ckptstore.store import Store

_PREFIX = b'{"digest":"'
_MIDDLE = b'","body":'
_SUFFIX = b"}\n"
_START = len(_PREFIX) + 64 + len(_MIDDLE)

_WORK = 400 * 1024**2
"""Bytes that are hashed at most in search of one changed byte: well under a second."""

_ALIKE = 0.9
"""A document is taken for a damaged copy of another when so much of it is the same. (A commit and a
void at one key have about a tenth in common, and no two commits ever stand at one.)"""


def mended(data: bytes) -> bytes | None:
    """The document that ``data`` was, when not more than one byte of it has changed."""
    if len(data) < _START + len(_SUFFIX):
        return None
    body = data[_START : -len(_SUFFIX)]
    digest = data[len(_PREFIX) : len(_PREFIX) + 64]
    frame = data[: len(_PREFIX)], data[_START - len(_MIDDLE) : _START], data[-len(_SUFFIX) :]
    changed = sum(map(_differing, frame, (_PREFIX, _MIDDLE, _SUFFIX)))
    actual = blake3(body).hexdigest().encode()
    in_digest = _differing(actual, digest)
    if changed + in_digest <= 1:
        return _framed(actual, body)
    if changed:
        return None
    for candidate in _one_byte_changed(body):
        if blake3(candidate).hexdigest().encode() == digest:
            return _framed(digest, bytes(candidate))
    return None


def _framed(digest: bytes, body: bytes) -> bytes:
    return b"".join((_PREFIX, digest, _MIDDLE, body, _SUFFIX))


def _differing(one: bytes, other: bytes) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _one_byte_changed(body: bytes) -> Iterator[bytearray]:
    """Every text that differs in one bit, then in one byte; always the same buffer."""
    changed = bytearray(body)
    bits = [1 << bit for bit in range(8)]
    others = [mask for mask in range(1, 256) if mask not in bits]
    for masks in (bits, others):
        if len(masks) * len(body) ** 2 > _WORK:
            return
        for position, byte in enumerate(body):
            for mask in masks:
                changed[position] = byte ^ mask
                yield changed
            changed[position] = byte


def alike(damaged: bytes, good: bytes) -> bool:
    """Whether ``damaged`` is so much like ``good`` that it was a copy of it."""
    same = sum(a == b for a, b in zip(damaged, good, strict=False))
    return same >= _ALIKE * max(len(damaged), len(good))


def from_sources(
    sources: Sequence[Store], key: str, accept: Callable[[bytes], bool]
) -> Iterator[tuple[bytes, Store]]:
    """The documents at ``key`` in the sources that are acceptable, each with its source."""
    for source in sources:
        try:
            data = source.backend.read(key, document.SIZE_LIMIT)
        except CkptError:  # not there, damaged there too, or not to be reached
            continue
        if accept(data):
            yield data, source


def is_document(data: bytes) -> bool:
    """Whether the frame and the digest are right."""
    try:
        document.body_of(data, "")
    except IntegrityError:
        return False
    return True


def replace_damaged(backend: Backend, key: str, damaged: bytes, good: bytes) -> bool:
    """Put ``good`` in the place of a document that cannot be read, atomically.

    Nothing but another repair ever changes what cannot be read: creation is exclusive, and a
    document is removed only by its exact, readable bytes. So what is still the same damaged object
    at a last look can be replaced; and a process that is killed leaves the one or the other.

    Args:
        backend: The store's.
        key: Where.
        damaged: What was found there; empty when not even its bytes could be read.
        good: What belongs there.

    Returns:
        Whether ``good`` stands there now; ``False`` when something else has come.
    """
    now = read_or_none(backend, key)
    if now == good:
        return True
    if (now or b"") != damaged or (now is not None and is_document(now)):
        return False
    backend.put(key, good)
    backend.sync([key.rpartition("/")[0]])
    return True


def read_or_none(backend: Backend, key: str) -> bytes | None:
    """The bytes at ``key``; ``None`` when there are none, or they cannot be read."""
    try:
        return backend.read(key, document.SIZE_LIMIT)
    except (NotFoundError, IntegrityError):
        return None
