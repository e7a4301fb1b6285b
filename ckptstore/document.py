"""The small JSON documents of a store, each with its own digest.

Marker, records, marks, trash records and leases are files of one line:

    {"digest":"<64 hex digits>","body":{…}}

The digest is BLAKE3 of the body's bytes as they stand in the file, and the framing is compared byte
for byte, so a flipped bit anywhere is found and nobody has to agree on a canonical JSON.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from ckptstore.errors import IntegrityError
from ckptstore.hashing import block_digest

SIZE_LIMIT = 16 * 1024 * 1024
"""No small document is longer; a longer file is not read at all. (A lease's journal, with 512
bytes for each of 30,000 files, is the longest.)"""

_PREFIX = b'{"digest":"'
_MIDDLE = b'","body":'
_SUFFIX = b"}\n"
_BODY = len(_PREFIX) + 64 + len(_MIDDLE)

T = TypeVar("T")


def encode(body: msgspec.Struct) -> bytes:
    """The document that holds ``body``."""
    data = msgspec.json.encode(body)
    return b"".join((_PREFIX, block_digest(data).encode("ascii"), _MIDDLE, data, _SUFFIX))


def body_of(data: bytes, what: str) -> bytes:
    """The body's bytes, after checking framing and digest.

    Raises:
        IntegrityError: ``data`` is not a document, is cut short, or a bit of it has changed.
    """
    framed = (
        data.startswith(_PREFIX)
        and data[_BODY - len(_MIDDLE) : _BODY] == _MIDDLE
        and data.endswith(_SUFFIX)
    )
    if not framed:
        reason = "is empty" if not data else "is cut short or is not a ckptstore document"
        raise IntegrityError(f"{what} {reason}")
    body = data[_BODY : -len(_SUFFIX)]
    if data[len(_PREFIX) : len(_PREFIX) + 64] != block_digest(body).encode("ascii"):
        raise IntegrityError(f"{what} is damaged: its digest does not match its content")
    return body


class Decoder(Generic[T]):
    """Decodes documents whose body is a ``T``: a struct, or a tagged union of structs."""

    def __init__(self, body_type: type[T] | Any) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(body_type)

    def decode(self, data: bytes, what: str) -> T:
        """The checked body.

        Raises:
            IntegrityError: see :func:`body_of`; also when the body lacks a field or has one of
                another type.
        """
        body = body_of(data, what)
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise IntegrityError(f"{what} cannot be understood: {error}") from error
