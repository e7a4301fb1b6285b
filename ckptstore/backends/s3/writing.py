"""Writing an object: small ones in one request, others in parts that are joined at the end."""

from __future__ import annotations

import hashlib
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ckptstore.backends.base import Writer
from ckptstore.backends.s3.checksums import Checksums, combined, crc_of, decode, encode
from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.failures import code_of
from ckptstore.backends.s3.uploads import Part, take_up
from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    ConflictError,
    NoSpaceError,
    NotFoundError,
    TemporaryError,
    VoidedError,
    printable,
)
from ckptstore.hashing import BLOCK_SIZE

log = logging.getLogger(__name__)

MAX_PARTS = 10_000
SINGLE_REQUEST = 4 * 1024 * 1024
"""Up to this size an object is kept in memory and sent in one request. (A part that is not the last
may not be under 5 MiB.)"""

PARALLEL_LIMIT = MAX_PARTS * BLOCK_SIZE
"""Up to this size (160 GiB) each block is a part of its own, sent as it comes, by any thread."""

_GROWTH = 1000

_PASSING = (TemporaryError, AccessDeniedError, NoSpaceError)
"""Errors that say nothing about the parts."""


@dataclass(frozen=True)
class Mode:
    """How an object is written.

    Attributes:
        replace: It takes the place of what is at the key.
        resume: It takes up the parts of an unfinished upload, and leaves them when it is aborted.
        looks: Look whether the key is free before it is taken: the server would replace.
    """

    replace: bool = False
    resume: bool = False
    looks: bool = False


class S3Writer(Writer):
    """An object under way. It is an uncommitted upload, invisible until it is joined.

    Args:
        client: Where it goes.
        checksums: Which go with it.
        key: Its key.
        size: Bytes, where that is known. Otherwise parts grow: 1,000 of one block, 1,000 of two, …,
            which is 860 GiB at most.
        stored_as: Storage class and encryption.
        mode: How it is written.
    """

    def __init__(
        self,
        client: S3Client,
        checksums: Checksums,
        key: str,
        size: int | None,
        stored_as: dict[str, Any],
        mode: Mode,
    ) -> None:
        self._client = client
        self._checksums = checksums
        self._key = key
        self._stored_as = stored_as
        self._mode = mode
        self._condition = {} if mode.replace else {"IfNoneMatch": "*"}
        self._blocks_per_part = 1
        if size is not None:
            self._blocks_per_part = max(1, -(-size // (MAX_PARTS * BLOCK_SIZE)))
        self._grows = size is None
        self._small = bytearray() if size is None or size <= SINGLE_REQUEST else None
        self._gathered = bytearray()
        self._lock = threading.Lock()
        self._upload: str | None = None
        self._parts: dict[int, tuple[str, int, int]] = {}  # number: ETag, CRC, length
        self._there: dict[int, Part] = {}
        self._keeps = mode.resume
        self._ended = False

    def kept(self, offset: int, data: memoryview) -> bool:
        """See :class:`Writer`. Over 160 GiB a part has several blocks, and they are told at once.

        So there ``write`` finds out, and sends nothing that is kept.
        """
        if not self._mode.resume or self._small is not None:
            return False
        self._begin()
        return self._blocks_per_part == 1 and self._has(offset // BLOCK_SIZE + 1, data)

    def _has(self, number: int, data: memoryview) -> bool:
        """Whether the upload that was taken up holds this part."""
        part = self._there.get(number)
        if part is None or not part.holds(data):
            return False
        crc = crc_of(data)
        with self._lock:
            self._parts[number] = (part.etag, crc, len(data))
        return True

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`Writer`."""
        if offset == 0 and self._small is not None and len(data) <= SINGLE_REQUEST:
            self._small += data
            return
        self._small = None
        self._begin()
        if not self._grows and self._blocks_per_part == 1:
            self._send(offset // BLOCK_SIZE + 1, data)
            return
        self._gathered += data  # front to back, from one thread
        if len(self._gathered) >= self._part_blocks() * BLOCK_SIZE:
            self._send_gathered()

    def _part_blocks(self) -> int:
        """How many blocks the part has that is gathered now."""
        return 1 + len(self._parts) // _GROWTH if self._grows else self._blocks_per_part

    def _send_gathered(self) -> None:
        number = len(self._parts) + 1
        with memoryview(self._gathered) as view:
            if not self._has(number, view):
                self._send(number, view)
        self._gathered.clear()

    def _begin(self) -> None:
        with self._lock:
            if self._upload is None and self._mode.resume:
                self._take_up()
            if self._upload is None:
                checked = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
                answer = self._request(
                    lambda: self._checksums.try_crc(lambda: self._create(**checked), self._create)
                )
                self._upload = answer["UploadId"]

    def _take_up(self) -> None:
        found = take_up(
            self._client,
            self._key,
            crc=self._checksums.crc,
            storage_class=self._stored_as.get("StorageClass"),
        )
        if found is not None:
            self._upload, self._there = found

    def _create(self, **checksum: str) -> dict[str, Any]:
        return self._client.raw("create_multipart_upload", self._key, **self._stored_as, **checksum)

    def _send(self, number: int, data: memoryview) -> None:
        crc = crc_of(data)
        answer = self._request(
            lambda: self._checksums.send(
                "upload_part", self._key, data, crc, UploadId=self._upload, PartNumber=number
            )
        )
        with self._lock:
            self._parts[number] = (answer["ETag"], crc, len(data))

    def _request(self, call: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = call()
        except (BotoCoreError, ClientError) as error:
            if code_of(error)[0] == "NoSuchUpload":
                raise self._gone() from error
            meaning = self._client.meaning(error, self._key)
            self._note_refusal(meaning)
            raise meaning from error
        return answer

    def _note_refusal(self, error: Exception) -> None:
        """What the server will not go on with must not be taken up time and again."""
        self._keeps = self._keeps and isinstance(error, _PASSING)

    def _gone(self) -> CkptError:
        """What it means that the upload is not there any more."""
        self._ended = True
        with suppress(CkptError):
            if self._mode.resume and self._stands():  # by another that took it up, too
                return ConflictError(f"{printable(self._key)} exists already")
        return VoidedError(
            f"{printable(self._key)}: the upload was given up by someone else",
            hint="gc took it for abandoned: save again",
        )

    def skip_zeros(self, offset: int, length: int) -> bool:
        """See :class:`Writer`. An object has no holes."""
        del offset, length
        return False

    def finish(self, size: int) -> None:
        """See :class:`Writer`."""
        # A server without these checksums is older than the condition on joining parts.
        ignored = self._upload is not None and not self._checksums.crc
        looks = (self._mode.looks or ignored) and not self._mode.replace
        try:
            if looks and self._stands():
                raise ConflictError(f"{printable(self._key)} exists already")
            if self._upload is None:
                self._put(bytes(self._small or b""))
            else:
                if self._gathered:
                    self._send_gathered()
                self._join(size)
        except CkptError as error:
            self._note_refusal(error)
            raise
        self._ended = True

    def _stands(self) -> bool:
        try:
            self._client.call("head_object", self._key)
        except NotFoundError:
            return False
        return True

    def _put(self, data: bytes) -> None:
        crc = crc_of(data)
        try:
            self._checksums.send(
                "put_object", self._key, data, crc, **self._condition, **self._stored_as
            )
        except (BotoCoreError, ClientError) as error:
            etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
            self._settle(error, len(data), crc, etag)
        self._note_crc(crc)

    def _join(self, size: int) -> None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        assert sum(length for _, _, length in parts) == size
        crc = combined((crc, length) for _, crc, length in parts)
        checked: dict[str, Any] = {}
        if self._checksums.crc:
            checked = {"ChecksumCRC64NVME": encode(crc), "ChecksumType": "FULL_OBJECT"}
        numbered = [
            {"PartNumber": number, "ETag": part[0]} for number, part in sorted(self._parts.items())
        ]
        try:
            self._client.raw(
                "complete_multipart_upload",
                self._key,
                UploadId=self._upload,
                MultipartUpload={"Parts": numbered},
                **self._condition,
                **checked,
            )
        except (BotoCoreError, ClientError) as error:
            self._settle(error, size, crc, _joined_etag([part[0] for part in parts]))
        self._note_crc(crc)

    def _note_crc(self, crc: int) -> None:
        if self._checksums.crc:
            self.crc64nvme = f"{crc:016x}"

    def _settle(self, error: Exception, size: int, crc: int, etag: str | None) -> None:
        """A request may have been carried out although its answer was an error, or was lost.

        A repeated one then meets its own object, or an upload that is there no more. What stands at
        the key decides.
        """
        code, status = code_of(error)
        if status and status < 500 and status not in (404, 408, 409, 412):
            raise self._client.meaning(error, self._key) from error
        if self._mode.replace:  # what stands there may be what was damaged
            gone = code == "NoSuchUpload"
            raise (self._gone() if gone else self._client.meaning(error, self._key)) from error
        with suppress(CkptError):
            found = self._client.call("head_object", self._key, ChecksumMode="ENABLED")
            stored = decode(found.get("ChecksumCRC64NVME"))
            same = stored == crc if stored is not None else found.get("ETag", "").strip('"') == etag
            if found.get("ContentLength") == size and same:
                return
        if status == 412:
            raise ConflictError(f"{printable(self._key)} exists already") from error
        if code == "NoSuchUpload":
            raise self._gone() from error
        raise self._client.meaning(error, self._key) from error

    def abort(self) -> None:
        """See :class:`Writer`. What cannot be given up now, or is kept, is collected by gc."""
        self._gathered.clear()
        self._small = None
        if self._upload is None or self._ended:
            return
        self._ended = True
        if self._keeps:
            return
        try:
            self._client.call("abort_multipart_upload", self._key, UploadId=self._upload)
        except CkptError as error:
            log.info("the unfinished upload of %s stays for gc: %s", printable(self._key), error)


def _joined_etag(etags: list[str]) -> str | None:
    """The ETag that S3 gives to an object of several parts; ``None`` when it cannot be told."""
    try:
        digests = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags)
    except ValueError:
        return None
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"
