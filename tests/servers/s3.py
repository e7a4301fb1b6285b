"""Buckets on the test servers, and a second client (s3fs) to look into them."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from tests.servers.ceph import Ceph
from tests.servers.rclone import Rclone
from tests.servers.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedFS

S3Server = SeaweedFS | Rclone | Ceph

_count = itertools.count()
_made: set[tuple[str, str]] = set()


@dataclass
class Bucket:
    """A place of its own for a test in a bucket that a worker's tests share.

    Attributes:
        server: Where it is.
        name: The bucket's name.
        prefix: What the keys of this test begin with.
    """

    server: S3Server
    name: str
    prefix: str

    @classmethod
    def make(cls, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
        """A new place; the environment holds the credentials from now on."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        name = f"test-{os.getpid()}"
        if (server.endpoint, name) not in _made:
            client(server).call_s3("create_bucket", Bucket=name)
            _made.add((server.endpoint, name))
        return cls(server, name, f"test {next(_count)}/some/prefix")

    def uri(self, **options: str) -> str:
        """The URI of the store there."""
        query = "&".join(
            f"{name}={quote(value, safe='')}"
            for name, value in {"endpoint_url": self.server.endpoint, **options}.items()
        )
        return f"s3://{self.name}/{self.prefix}?{query}"

    def write(self, key: str, data: bytes) -> None:
        """Put an object, behind the back of what is tested."""
        client(self.server).call_s3(
            "put_object", Bucket=self.name, Key=f"{self.prefix}/{key}", Body=data
        )

    def read(self, key: str) -> bytes | None:
        """The bytes of an object; ``None`` when there is none."""
        try:
            data: bytes = client(self.server).cat_file(f"{self.name}/{self.prefix}/{key}")
        except FileNotFoundError:
            return None
        return data


_clients: dict[str, Any] = {}


def client(server: S3Server) -> Any:
    """s3fs for a server."""
    import s3fs

    if server.endpoint not in _clients:
        _clients[server.endpoint] = s3fs.S3FileSystem(
            key=ACCESS_KEY,
            secret=SECRET_KEY,
            endpoint_url=server.endpoint,
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs={
                "s3": {"addressing_style": "path"},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )
    return _clients[server.endpoint]
