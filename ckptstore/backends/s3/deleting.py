"""Deleting: many keys a request, or one under a condition."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.failures import code_of
from ckptstore.errors import NotFoundError, PlaceNotFoundError

_BATCH = 1000
_THREADS = 8


def delete_if(client: S3Client, key: str, **condition: Any) -> bool:
    """Delete an object under a condition; returns whether that held."""
    try:
        client.raw("delete_object", key, **condition)
    except (BotoCoreError, ClientError) as error:
        if code_of(error)[1] in (404, 412):
            return False
        raise client.meaning(error, key) from error
    return True


def delete_keys(client: S3Client, keys: Sequence[str]) -> None:
    """Delete objects; those that do not exist are no error."""
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        if len(batch) == 1:
            _delete_one(client, batch[0])
        else:
            _delete_batch(client, batch)


def _delete_batch(client: S3Client, keys: Sequence[str]) -> None:
    prefix = client.options.prefix
    named = [{"Key": prefix + key} for key in keys]
    try:
        answer = client.raw("delete_objects", Delete={"Objects": named, "Quiet": True})
    except ClientError as error:
        if code_of(error)[1] not in (400, 405, 501):
            raise client.meaning(error, None) from error
        # Some servers refuse it, or the checksum that it must have.
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda key: _delete_one(client, key), keys))
        return
    except BotoCoreError as error:
        raise client.meaning(error, None) from error
    for failed in answer.get("Errors", ()):
        if failed.get("Code") not in ("NoSuchKey", "NotFound"):
            # Told by itself, with its own code; what failed for a moment goes away now.
            _delete_one(client, failed["Key"][len(prefix) :])


def _delete_one(client: S3Client, key: str) -> None:
    try:
        client.call("delete_object", key)
    except NotFoundError as error:
        if isinstance(error, PlaceNotFoundError):
            raise
