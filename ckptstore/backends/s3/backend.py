"""The backend for buckets.

There are no directories: a key is there or not. Writes are whole or absent by nature, and records
are created with ``If-None-Match: *``. Nothing is remembered of any listing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ckptstore.backends.base import (
    Backend,
    Capabilities,
    CopyKind,
    Entries,
    Entry,
    Reader,
    Unfinished,
    Writer,
)
from ckptstore.backends.findings import Finding
from ckptstore.backends.s3 import examining
from ckptstore.backends.s3.checksums import Checksums, crc_of, decode
from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.copying import copy_object
from ckptstore.backends.s3.deleting import delete_if, delete_keys
from ckptstore.backends.s3.failures import code_of
from ckptstore.backends.s3.options import S3Options
from ckptstore.backends.s3.reading import BROKEN, S3Reader, fill
from ckptstore.backends.s3.uploads import uploads_below
from ckptstore.backends.s3.writing import PARALLEL_LIMIT, Mode, S3Writer
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    PlaceNotFoundError,
    TemporaryError,
    printable,
)
from ckptstore.ids import random_letters
from ckptstore.layout import TEMPORARY_PREFIX
from ckptstore.uri import StoreURI

_CONFLICT_ATTEMPTS = 5
_THREADS = 8


class S3Backend(Backend):
    """A bucket, or what has a prefix in it.

    Args:
        options: Where, and how.
        uri: How people name it.
    """

    def __init__(self, options: S3Options, uri: str) -> None:
        self.uri = uri
        self.capabilities = Capabilities(
            parallel_limit=PARALLEL_LIMIT,
            parallel_reads=16,
            threads=_THREADS,
            keeps_checksums=True,
            resumes=True,
        )
        self.client = S3Client(options)
        self._checksums = Checksums(self.client)
        self._exclusive: bool | None = None
        self._etags_compared: bool | None = None
        self._stored_as = {
            name: value
            for name, value in (
                ("StorageClass", options.storage_class),
                ("ServerSideEncryption", options.sse),
                ("SSEKMSKeyId", options.sse_kms_key_id),
            )
            if value is not None
        }

    @classmethod
    def from_uri(cls, uri: StoreURI) -> S3Backend:
        """The backend that an ``s3`` URI names.

        Raises:
            UsageError: an option is unknown or cannot be.
        """
        return cls(S3Options.from_uri(uri), str(uri))

    # Looking

    def stat(self, key: str) -> Entry | None:
        """See :class:`Backend`."""
        found = self._head(key) if key else None
        if found is not None:
            return Entry(key, found["ContentLength"], _seconds(found["LastModified"]))
        page = self._page(f"{key}/" if key else "", MaxKeys=1)
        if page.get("Contents"):
            return Entry(key, 0, 0.0, is_directory=True)
        return None

    def _head(self, key: str) -> dict[str, Any] | None:
        try:
            return self.client.call("head_object", key, ChecksumMode="ENABLED")
        except NotFoundError:
            return None

    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        """See :class:`Backend`."""
        return [
            entry
            for page in self._pages(f"{prefix}/" if prefix else "", recursive=recursive)
            for entry in self._entries(page)
        ]

    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[dict[str, Any]]:
        more = {} if recursive else {"Delimiter": "/"}
        while True:
            page = self._page(prefix, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == more.get("ContinuationToken"):
                raise CkptError(f"{self.uri}: the server's listing does not go on")
            more["ContinuationToken"] = token

    def _page(self, prefix: str, **parameters: Any) -> dict[str, Any]:
        return self.client.call(
            "list_objects_v2", Prefix=self.client.options.prefix + prefix, **parameters
        )

    def _entries(self, page: dict[str, Any]) -> Iterator[Entry]:
        prefix = self.client.options.prefix
        skip = len(prefix)
        for found in page.get("Contents", ()):
            key: str = found["Key"][skip:]
            if not found["Key"].startswith(prefix):
                raise CkptError(f"{self.uri}: the server lists what it was not asked for")
            if key and not key.endswith("/"):  # other programs' marks of empty directories
                yield Entry(key, found["Size"], _seconds(found["LastModified"]))
        for found in page.get("CommonPrefixes", ()):
            yield Entry(found["Prefix"][skip:].rstrip("/"), 0, 0.0, is_directory=True)

    # Reading

    def read(self, key: str, limit: int) -> bytes:
        """See :class:`Backend`."""
        return self._get(key, limit)[0]

    def _get(self, key: str, limit: int) -> tuple[bytes, dict[str, Any]]:
        """The bytes of a small object, and what else was answered."""
        problem: Exception | None = None
        for _ in range(3):  # an answer that breaks off is asked for again
            answer = self.client.call("get_object", key)
            size: int = answer["ContentLength"]
            if size > limit:
                answer["Body"].close()
                raise IntegrityError(f"{printable(key)} is {size} bytes long, over {limit}")
            data = bytearray(size)
            try:
                if fill(answer["Body"], memoryview(data)) == size:
                    return bytes(data), answer
            except BROKEN as error:
                problem = error
        raise TemporaryError(f"{printable(key)}: the server's answers break off") from problem

    def open_reader(self, key: str) -> Reader:
        """See :class:`Backend`."""
        found = self.client.call("head_object", key)
        return S3Reader(self.client, key, found["ContentLength"], found["ETag"])

    def checksum(self, key: str) -> str | None:
        """See :class:`Backend`."""
        found = self._head(key)
        if found is None:
            raise NotFoundError(f"{self.uri}: there is no object {printable(key)}")
        return _crc(found)

    # Writing

    def open_writer(
        self,
        key: str,
        *,
        size: int | None = None,
        executable: bool = False,
        replace: bool = False,
        resume: bool = False,
    ) -> Writer:
        """See :class:`Backend`. What fits one request, or has a KMS key, is not resumed."""
        del executable  # the manifest knows
        self.client.require_bucket()
        mode = Mode(replace=replace, resume=resume, looks=not self.is_exclusive())
        return S3Writer(self.client, self._checksums, key, size, self._stored_as, mode)

    def put(self, key: str, data: bytes) -> None:
        """See :class:`Backend`."""
        self.client.require_bucket()
        self._put(key, data)

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        try:
            self._checksums.send(
                "put_object", key, data, crc_of(data), **condition, **self._stored_as
            )
        except (BotoCoreError, ClientError) as error:
            raise self.client.meaning(error, key) from error

    def create_exclusive(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`."""
        self.is_exclusive()  # which also finds out which checksum it may be
        for attempt in range(_CONFLICT_ATTEMPTS):
            try:
                self._put(key, data, IfNoneMatch="*")
            except ConflictError:
                return False
            except TemporaryError as error:
                # Somebody else's request for the key was under way, and may still fail.
                busy = code_of(error.__cause__)[0] == "ConditionalRequestConflict"  # type: ignore[arg-type]
                if not busy or attempt == _CONFLICT_ATTEMPTS - 1:
                    raise
            else:
                return True
        raise AssertionError

    def is_exclusive(self) -> bool:
        """See :class:`Backend`. Some servers ignore the condition: tried once, on an own key."""
        if self._exclusive is None:
            key = TEMPORARY_PREFIX + random_letters()
            self.client.require_bucket()
            self._put(key, b"")
            try:
                self._put(key, b"", IfNoneMatch="*")
                self._exclusive = False
            except ConflictError:
                self._exclusive = True
            finally:
                self.delete([key])
        return self._exclusive

    def make_directory(self, key: str) -> bool:
        """See :class:`Backend`. There are none: a name is free where nothing is below it."""
        return not self._page(f"{key}/", MaxKeys=1).get("Contents")

    def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
        """See :class:`Backend`. The server copies, over 256 MiB in parts and in parallel."""
        del executable
        found = self.client.call("head_object", source, ChecksumMode="ENABLED")
        # A server without these checksums is older than the condition on copies.
        looks = not (self.is_exclusive() and self._checksums.crc)
        if looks and self._head(target) is not None:
            raise ConflictError(f"{printable(target)} exists already")
        copy_object(self.client, source, target, found, self._stored_as)
        self._check_copy(target, found["ContentLength"], _crc(found))
        return "server"

    def _check_copy(self, target: str, size: int, crc: str | None) -> None:
        """Compare size and stored checksum of a copy with its source's."""
        found = self._head(target)
        if found is None:
            raise NotFoundError(f"{printable(target)} was deleted as soon as it was copied")
        there = _crc(found)
        if found["ContentLength"] != size or (None not in (crc, there) and crc != there):
            self.delete([target])
            raise IntegrityError(f"the server's copy {printable(target)} differs from its source")

    # Removing

    def remove_if(self, key: str, data: bytes) -> bool:
        """See :class:`Backend`. Deletes only the version that was looked at.

        A server that knows no condition on the ETag is asked to compare the time of that version:
        another one that was written in the same second is taken for it. One that knows neither
        condition deletes whatever is there a moment after the look.
        """
        try:
            there, found = self._get(key, max(len(data), 1))
        except (NotFoundError, IntegrityError) as error:
            if isinstance(error, PlaceNotFoundError):
                raise
            return False
        if there != data:
            return False
        condition = {"IfMatch": found["ETag"]}
        if not self._compares_etags():
            condition = {"IfMatchLastModifiedTime": found["LastModified"]}
        try:
            return delete_if(self.client, key, **condition)
        except CkptError as error:
            if not _unknown_condition(error.__cause__):
                raise
        self.delete([key])
        return True

    def _compares_etags(self) -> bool:
        """Whether a deletion with an ETag spares other versions: tried once, on an own key."""
        if self._etags_compared is None:
            key = TEMPORARY_PREFIX + random_letters()
            self._put(key, b"")
            try:
                self._etags_compared = not delete_if(self.client, key, IfMatch=f'"{"0" * 32}"')
            except CkptError as error:
                if not _unknown_condition(error.__cause__):
                    raise
                self._etags_compared = False
            finally:
                self.delete([key])
        return self._etags_compared

    def delete(self, keys: Iterable[str]) -> None:
        """See :class:`Backend`. A thousand keys a request."""
        delete_keys(self.client, list(keys))

    def remove_tree(self, prefix: str) -> None:
        """See :class:`Backend`. Unfinished uploads below it end too."""
        self.discard_unfinished(self.unfinished(prefix))
        directories = {prefix}
        for page in self._pages(f"{prefix}/", recursive=True):
            keys = [entry.key for entry in self._entries(page)]
            self.delete(keys)
            for key in keys:
                while (key := key.rpartition("/")[0]) not in directories:
                    directories.add(key)
        shown = self._page(prefix, Delimiter="/").get("CommonPrefixes", ())
        if any(found["Prefix"] == f"{self.client.options.prefix}{prefix}/" for found in shown):
            # Some servers list directories that are empty, and some programs leave marks of them.
            deepest_first = sorted(directories, key=lambda key: (-key.count("/"), key))
            with suppress(CkptError):  # what is left is only a name
                self.delete(f"{key}/" for key in deepest_first)

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """See :class:`Backend`."""
        return uploads_below(self.client, f"{prefix}/" if prefix else "")

    def discard_unfinished(self, uploads: Iterable[Unfinished]) -> None:
        """See :class:`Backend`."""
        for upload in uploads:
            try:
                self.client.call("abort_multipart_upload", upload.key, UploadId=upload.token)
            except NotFoundError:
                continue

    # Time and names

    def sync(self, directories: Iterable[str]) -> None:
        """See :class:`Backend`. What was answered is durable."""

    def set_hint(self, key: str, target: str) -> None:
        """See :class:`Backend`."""
        self.put(key, target.encode() + b"\n")

    def clock(self) -> float:
        """See :class:`Backend`."""
        key = TEMPORARY_PREFIX + random_letters()
        self.put(key, b"")
        try:
            return _seconds(self.client.call("head_object", key)["LastModified"])
        finally:
            self.delete([key])

    def describe(self) -> Iterable[Finding]:
        """See :class:`Backend`."""
        return examining.describe(self.client)

    def examine(self, scratch: str) -> Iterable[Finding]:
        """See :class:`Backend`."""
        return examining.examine(self, scratch)

    def close(self) -> None:
        """See :class:`Backend`."""
        self.client.close()


def _seconds(moment: datetime) -> float:
    return moment.timestamp()


def _unknown_condition(error: BaseException | None) -> bool:
    """Whether a server refused a deletion because it does not know the condition."""
    if not isinstance(error, ClientError):
        return False
    code, status = code_of(error)
    return status == 501 or code in ("InvalidArgument", "InvalidRequest", "NotImplemented")


def _crc(found: dict[str, Any]) -> str | None:
    """The stored CRC-64/NVME of the whole object, as in a manifest."""
    crc = decode(found.get("ChecksumCRC64NVME"))
    whole = found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    return f"{crc:016x}" if crc is not None and whole else None
