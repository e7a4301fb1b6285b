"""Checksums that a server compares with what has arrived."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from awscrt.checksums import combine_crc64nvme, crc64nvme
from botocore.exceptions import ClientError

from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.failures import code_of

T = TypeVar("T")

_REFUSALS = ("InvalidArgument", "InvalidRequest", "NotImplemented", "XNotImplemented")
"""What a server says to a checksum of a kind that it does not know, if it says anything."""


class Checksums:
    """Which checksum goes with a body: CRC-64/NVME, or MD5 where the server does not compare that.

    A server that compares it says so in its answer. Others refuse it, or ignore it: they would
    store a body that was damaged on its way. Both kinds compare MD5.

    Args:
        client: The client whose server it is about; ``checksums=`` of its options decides, and
            ``auto`` finds out.
    """

    def __init__(self, client: S3Client) -> None:
        self._client = client
        self._use_crc: bool | None = {"crc64nvme": True, "md5": False}.get(client.options.checksums)

    @property
    def crc(self) -> bool:
        """Whether a CRC-64/NVME goes with each body."""
        return self._use_crc is not False

    def send(
        self, operation: str, key: str, data: memoryview | bytes, crc: int, **parameters: Any
    ) -> dict[str, Any]:
        """A request with a body and its checksum; errors are botocore's.

        The first of all is sent twice to a server that ignores the checksum: let it be one without
        a condition.

        Args:
            operation: ``put_object`` or ``upload_part``.
            key: The key.
            data: The body.
            crc: Its CRC-64/NVME.
            parameters: The others.
        """
        if self._use_crc is False:
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            return self._client.raw(
                operation, key, Body=Body(data), ContentMD5=base64.b64encode(digest).decode(),
                **parameters,
            )  # fmt: skip
        undecided = self._use_crc is None
        answer = self.try_crc(
            lambda: self._client.raw(
                operation, key, Body=Body(data), ChecksumCRC64NVME=encode(crc), **parameters
            ),
            lambda: self.send(operation, key, data, crc, **parameters),
        )
        if undecided and self.crc:
            self._use_crc = "ChecksumCRC64NVME" in answer
            if not self._use_crc:
                return self.send(operation, key, data, crc, **parameters)
        return answer

    def try_crc(self, with_crc: Callable[[], T], without: Callable[[], T]) -> T:
        """A request with a CRC; the first that is refused for it is repeated without, and so on."""
        if self._use_crc is False:
            return without()
        try:
            return with_crc()
        except ClientError as error:
            code, status = code_of(error)
            if self._use_crc is True or (code not in _REFUSALS and status != 501):
                raise
            self._use_crc = False
            return without()


class Body:
    """Bytes in memory as a file that is read without copying them.

    Args:
        data: The bytes. They must stay as they are.
    """

    def __init__(self, data: memoryview | bytes) -> None:
        self._data = memoryview(data)
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int | None = -1) -> memoryview:
        """The next ``size`` bytes, or all that are left."""
        end = len(self._data) if size is None or size < 0 else self._position + size
        part = self._data[self._position : end]
        self._position += len(part)
        return part

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a position: a request that is repeated begins anew."""
        base = (0, self._position, len(self._data))[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position


def crc_of(data: memoryview | bytes) -> int:
    """CRC-64/NVME."""
    found: int = crc64nvme(data)
    return found


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC of a whole from the CRC and the length of each part, in order."""
    whole = 0
    for crc, length in parts:
        whole = combine_crc64nvme(whole, crc, length)
    return whole


def encode(crc: int) -> str:
    """As S3 writes it."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def decode(text: str | None) -> int | None:
    """What S3 wrote; ``None`` when that is no CRC."""
    try:
        data = base64.b64decode(text or "", validate=True)
    except ValueError:
        return None
    return int.from_bytes(data, "big") if len(data) == 8 else None
