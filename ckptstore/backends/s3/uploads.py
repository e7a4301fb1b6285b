"""Uploads that were begun and are not finished: which there are, and which can be gone on with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ckptstore.backends.base import Unfinished
from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.failures import code_of
from ckptstore.errors import CkptError, TemporaryError


@dataclass(frozen=True)
class Part:
    """A part of an unfinished upload, as the server lists it.

    Attributes:
        etag: Its ETag, which is its MD5 unless a key encrypts it.
        size: Bytes.
    """

    etag: str
    size: int

    def holds(self, data: memoryview) -> bool:
        """Whether the part is these bytes."""
        if self.size != len(data):
            return False
        return self.etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()


def uploads_below(client: S3Client, prefix: str) -> list[Unfinished]:
    """The unfinished uploads whose keys begin so; none where the server knows of none."""
    skip = len(client.options.prefix)
    found: list[Unfinished] = []
    more: dict[str, Any] = {}
    while True:
        try:
            page = client.raw(
                "list_multipart_uploads", Prefix=client.options.prefix + prefix, **more
            )
        except (BotoCoreError, ClientError) as error:
            code, status = code_of(error)
            if status in (405, 501) or code == "NoSuchUpload":  # it knows of none
                return found
            raise client.meaning(error, None) from error
        found += [
            Unfinished(u["Key"][skip:], u["Initiated"].timestamp(), u["UploadId"])
            for u in page.get("Uploads", ())
        ]
        if not page.get("IsTruncated"):
            return found
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def take_up(
    client: S3Client, key: str, *, crc: bool, storage_class: str | None
) -> tuple[str, dict[int, Part]] | None:
    """The newest unfinished upload of a key, and its parts by their numbers.

    Args:
        client: Where.
        key: The key.
        crc: Whether a CRC-64/NVME of the whole will go with the request that joins the parts.
        storage_class: What the object shall have.

    Returns:
        ``None`` when there is none that can be gone on with, or when nobody may look.
    """
    try:
        uploads = [u for u in uploads_below(client, key) if u.key == key]
        if not uploads:
            return None
        newest = max(uploads, key=lambda upload: (upload.started, upload.token)).token
        parts: dict[int, Part] = {}
        for page in _pages(client, key, newest):
            algorithm = page.get("ChecksumAlgorithm", "CRC64NVME")
            if crc and (algorithm, page.get("ChecksumType", "FULL_OBJECT")) != (
                "CRC64NVME",
                "FULL_OBJECT",
            ):
                return None
            if storage_class not in (None, page.get("StorageClass", storage_class)):
                return None
            for part in page.get("Parts", ()):
                parts[part["PartNumber"]] = Part(part["ETag"], part["Size"])
    except TemporaryError:
        raise
    except CkptError:  # finished meanwhile, a right that is missing, a server that cannot list
        return None
    return newest, parts


def _pages(client: S3Client, key: str, upload: str) -> Iterator[dict[str, Any]]:
    more: dict[str, Any] = {}
    while True:
        page = client.call("list_parts", key, UploadId=upload, **more)
        yield page
        after = page.get("NextPartNumberMarker")
        if not page.get("IsTruncated") or after == more.get("PartNumberMarker", 0):
            return
        more["PartNumberMarker"] = after
