"""One client of an S3 server: requests with deadlines and retries, errors of ours."""

from __future__ import annotations

import os
import threading
from email.utils import parsedate_to_datetime
from typing import Any

import botocore
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import create_loader

from ckptstore.backends.s3.failures import code_of, no_bucket, translate
from ckptstore.backends.s3.options import S3Options

ATTEMPTS = 4
CONNECTIONS = 32

_lock = threading.Lock()
_loader = create_loader()  # what S3's API looks like: large, and the same for every client


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - a thread of the parent may have held it
    _lock = threading.Lock()


_loader = create_loader()  # what S3's API looks like: large, and the same for every client


os.register_at_fork(after_in_child=_after_fork)


class S3Client:
    """Requests to one bucket. Safe to use from several threads, and after a fork.

    botocore finds credentials as every AWS tool does (environment, profile, instance role) and
    renews them before they expire.

    Args:
        options: Where the bucket is.
    """

    def __init__(self, options: S3Options) -> None:
        self.options = options
        self._clients: dict[int, Any] = {}
        self._bucket_seen = False

    def call(self, operation: str, key: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a request.

        Args:
            operation: botocore's name of it.
            key: The key below the store's prefix, where it is about one.
            parameters: The others.

        Raises:
            NotFoundError: there is no such object, upload or (:class:`PlaceNotFoundError`) bucket.
            ConflictError: a condition does not hold.
            CkptError: it was refused, or failed after every attempt.
        """
        try:
            return self.raw(operation, key, **parameters)
        except (BotoCoreError, ClientError) as error:
            raise self.meaning(error, key) from error

    def raw(self, operation: str, key: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Like :meth:`call`, with botocore's own errors."""
        if key is not None:
            parameters["Key"] = self.options.prefix + key
        client = self._client()
        answer: dict[str, Any] = getattr(client, operation)(
            Bucket=self.options.bucket, **parameters
        )
        return answer

    def meaning(self, error: Exception, key: str | None) -> Exception:
        """What an error of botocore's means."""
        where = f"s3://{self.options.bucket}/{self.options.prefix}{key or ''}"
        return translate(error, where, self.options.bucket)

    def require_bucket(self) -> None:
        """Raise unless the bucket exists: some servers make one when something is put into it."""
        if self._bucket_seen:
            return
        try:
            self.raw("head_bucket")
        except ClientError as error:
            status = code_of(error)[1]
            if status == 404:
                raise no_bucket(self.options.bucket) from error
            if status != 403:  # who may only write may not look: the write itself will tell
                raise self.meaning(error, None) from error
        except BotoCoreError as error:
            raise self.meaning(error, None) from error
        self._bucket_seen = True

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return str(self._client().meta.endpoint_url)

    @property
    def region(self) -> str:
        """The region that requests are signed for."""
        return str(self._client().meta.region_name)

    @property
    def identity(self) -> str:
        """Which credentials are used, for people: where they are from, and how the key ends.

        Raises:
            CkptError: they could not be had.
        """
        if self.options.anon:
            return "no credentials (anon)"
        try:
            session = botocore.session.Session(profile=self.options.profile)
            found = session.get_credentials()
        except BotoCoreError as error:
            raise self.meaning(error, None) from error
        if found is None:
            return "no credentials"
        return f"the key …{found.access_key[-4:]} ({found.method})"

    def _client(self) -> Any:
        client = self._clients.get(os.getpid())
        if client is None:
            with _lock:
                client = self._clients.get(os.getpid())
                if client is None:
                    client = self._make()
                    self._clients = {os.getpid(): client}  # a parent's connections are its own
        return client

    def _make(self) -> Any:
        options = self.options
        session = botocore.session.Session(profile=options.profile)
        session.register_component("data_loader", _loader)
        style = options.addressing_style or ("path" if options.endpoint_url else "auto")
        client = self._create(session, style)
        if style == "auto" and options.addressing_style is None:
            host = client.meta.endpoint_url.split("://")[-1].split("/")[0].split(":")[0]
            if not host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
                # Named by the environment or the profile. Few other servers have a name for each
                # bucket.
                client.close()
                client = self._create(session, "path")
        return client

    def _create(self, session: Any, style: str) -> Any:
        options = self.options
        region = options.region or session.get_config_variable("region")
        config = Config(
            signature_version=botocore.UNSIGNED if options.anon else "s3v4",
            connect_timeout=min(10.0, options.timeout),
            read_timeout=options.timeout,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            max_pool_connections=CONNECTIONS,
            tcp_keepalive=True,
            # Every body has a checksum of its own in a header. Neither a second one over the whole
            # payload, nor a trailer, which some servers store as if it were data.
            s3={"addressing_style": style, "payload_signing_enabled": False},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent_extra="ckptstore",
        )
        client = session.create_client(
            "s3",
            region_name=region or "us-east-1",
            endpoint_url=options.endpoint_url,
            config=config,
        )
        client.meta.events.register("before-call.s3.DeleteObject", _say_it_to_ceph)
        return client

    def close(self) -> None:
        """Close the connections. May be called twice."""
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()


def _say_it_to_ceph(params: dict[str, Any], **_: Any) -> None:
    """A deletion of what was modified at a given time: Ceph has a header of its own for it."""
    moment = params["headers"].get("x-amz-if-match-last-modified-time")
    if moment is not None:
        iso = parsedate_to_datetime(moment).strftime("%Y-%m-%dT%H:%M:%SZ")
        params["headers"]["x-amz-delete-if-unmodified-since"] = iso
