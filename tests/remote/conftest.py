"""Fixtures that are each server in turn."""

from __future__ import annotations

import pytest

from tests.conftest import CEPH
from tests.remote.places import Place
from tests.servers.s3 import Bucket, S3Server

S3_SERVERS = ["seaweed", "ceph"] if CEPH else ["seaweed"]


@pytest.fixture(params=S3_SERVERS)
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """A server of buckets."""
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def place(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Places on a server."""
    return Place("s3", lambda number: Bucket.make(s3_server, monkeypatch).uri())
