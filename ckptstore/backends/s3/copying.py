"""Copies that the server makes: in one request, or in parts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ckptstore.backends.s3.checksums import decode, encode
from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.writing import MAX_PARTS
from ckptstore.errors import CkptError

COPY_PART = 256 * 1024 * 1024
"""Objects over this size are copied in parts, in parallel: one copy could outlast a deadline."""

_THREADS = 8


def copy_object(
    client: S3Client, source: str, target: str, found: dict[str, Any], stored_as: dict[str, Any]
) -> None:
    """Copy an object of the bucket.

    Args:
        client: The bucket.
        source, target: The keys.
        found: What the server said of the source; another version of it is not copied.
        stored_as: Storage class and encryption.

    Raises:
        ConflictError: ``target`` exists, or the source is another one by now.
    """
    if found["ContentLength"] > COPY_PART:
        _Parts(client, source, target, found).copy(stored_as)
        return
    client.call(
        "copy_object",
        target,
        CopySource=_source(client, source),
        CopySourceIfMatch=found["ETag"],
        IfNoneMatch="*",
        **stored_as,
    )


def _source(client: S3Client, key: str) -> dict[str, str]:
    return {"Bucket": client.options.bucket, "Key": client.options.prefix + key}


class _Parts:
    def __init__(self, client: S3Client, source: str, target: str, found: dict[str, Any]) -> None:
        self._client = client
        self._source = _source(client, source)
        self._target = target
        self._found = found
        self._size: int = found["ContentLength"]
        self._length = max(COPY_PART, -(-self._size // MAX_PARTS))

    def copy(self, stored_as: dict[str, Any]) -> None:
        """Copy all parts and join them; what fails leaves nothing."""
        crc = decode(self._found.get("ChecksumCRC64NVME"))
        kind = self._found.get("ChecksumType", "FULL_OBJECT")
        keeps = crc is not None and kind == "FULL_OBJECT"
        begun: dict[str, Any] = {"ChecksumAlgorithm": "CRC64NVME"} if keeps else {}
        ended: dict[str, Any] = {}
        if crc is not None and keeps:
            ended = {"ChecksumCRC64NVME": encode(crc)}
            begun["ChecksumType"] = ended["ChecksumType"] = kind
        answer = self._client.call("create_multipart_upload", self._target, **stored_as, **begun)
        upload = answer["UploadId"]
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                starts = range(0, self._size, self._length)
                parts = list(pool.map(lambda start: self._part(upload, start), starts))
            self._client.call(
                "complete_multipart_upload",
                self._target,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                IfNoneMatch="*",
                **ended,
            )
        except BaseException:
            with suppress(CkptError):  # gc ends what cannot be ended now
                self._client.call("abort_multipart_upload", self._target, UploadId=upload)
            raise

    def _part(self, upload: str, start: int) -> dict[str, Any]:
        last = min(start + self._length, self._size) - 1
        number = start // self._length + 1
        answer = self._client.call(
            "upload_part_copy",
            self._target,
            UploadId=upload,
            PartNumber=number,
            CopySource=self._source,
            CopySourceIfMatch=self._found["ETag"],
            CopySourceRange=f"bytes={start}-{last}",
        )
        return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}
