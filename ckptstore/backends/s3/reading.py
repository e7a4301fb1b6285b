"""Reading ranges of an object."""

from __future__ import annotations

from http.client import HTTPException
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from ckptstore.backends.base import Reader
from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.failures import code_of
from ckptstore.errors import IntegrityError, TemporaryError, printable

_CHUNK = 1024 * 1024
_INTERRUPTIONS = 5

BROKEN = (BotoCoreError, HTTPError, HTTPException, OSError)
"""What a connection that breaks in the middle of a body can raise."""


class S3Reader(Reader):
    """An object, as it was when it was opened: another one at its key is not mixed in."""

    def __init__(self, client: S3Client, key: str, size: int, etag: str) -> None:
        self._client = client
        self._key = key
        self._etag = etag
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Reader`. An answer that breaks off goes on where it ended."""
        wanted = max(0, min(len(buffer), self.size - offset))
        done = interruptions = 0
        while done < wanted:
            body = self._request(offset + done, wanted - done)
            try:
                got = fill(body, buffer[done:wanted])
            except BROKEN as error:
                got, problem = 0, error
            else:
                problem = None
            done += got
            if done < wanted:
                interruptions += 1
                if interruptions > _INTERRUPTIONS:
                    raise TemporaryError(
                        f"{printable(self._key)}: the server's answers break off"
                    ) from problem
        return done

    def _request(self, first: int, length: int) -> Any:
        try:
            answer = self._client.raw(
                "get_object",
                self._key,
                Range=f"bytes={first}-{first + length - 1}",
                IfMatch=self._etag,
            )
        except (BotoCoreError, ClientError) as error:
            if code_of(error)[1] == 412:
                raise IntegrityError(
                    f"{printable(self._key)} was replaced while it was read"
                ) from error
            raise self._client.meaning(error, self._key) from error
        given = answer.get("ContentRange", f"bytes {first}-")
        if not given.startswith(f"bytes {first}-"):
            answer["Body"].close()
            raise IntegrityError(
                f"{printable(self._key)}: the server gives bytes that were not asked for"
            )
        return answer["Body"]

    def close(self) -> None:
        """See :class:`Reader`."""


def fill(body: Any, buffer: memoryview) -> int:
    """Read a body to its end, or to the buffer's; returns the count of bytes.

    Raises:
        One of ``BROKEN``: nothing of this body counts then.
    """
    done = 0
    try:
        while done < len(buffer):
            count = body.readinto(buffer[done : done + _CHUNK])
            if not count:
                break
            done += count
        else:
            body.read()  # nothing is left; that it ends gives the connection back
    finally:
        body.close()
    return done
