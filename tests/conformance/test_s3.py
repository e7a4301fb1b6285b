"""The conformance suite on S3 servers, looked at with another client than the one under test."""

from __future__ import annotations

import pytest

from ckptstore.backends.base import Backend
from ckptstore.backends.s3 import S3Backend
from ckptstore.errors import CkptError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.testing.conformance import BackendConformance
from ckptstore.uri import StoreURI
from tests.conftest import CEPH
from tests.servers.ceph import Ceph
from tests.servers.rclone import Rclone
from tests.servers.s3 import Bucket
from tests.servers.seaweed import SeaweedFS


class _S3Conformance(BackendConformance):
    bucket: Bucket

    def make(self) -> Backend:
        return S3Backend.from_uri(StoreURI.parse(self.bucket.uri()))

    def raw_write(self, key: str, data: bytes) -> None:
        self.bucket.write(key, data)

    def raw_read(self, key: str) -> bytes | None:
        return self.bucket.read(key)


class TestSeaweedFS(_S3Conformance):
    """SeaweedFS."""

    def names(self) -> list[str]:
        # It takes a backslash for a slash. A save notices and fails (tests/s3).
        return [name for name in super().names() if "\\" not in name]

    @pytest.fixture(autouse=True)
    def _bucket(self, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bucket = Bucket.make(seaweed, monkeypatch)


class TestRclone(_S3Conformance):
    """rclone, which ignores ``If-None-Match``."""

    def test_it_is_found_out_that_creation_is_not_exclusive(self, backend: Backend) -> None:
        assert backend.is_exclusive() is False
        assert backend.list("", recursive=True) == []

    def test_what_lies_in_the_wrong_place_is_not_kept(self, backend: Backend) -> None:
        """It cannot replace a part: what was begun with another content is given up."""
        size = 2 * BLOCK_SIZE
        writer = backend.open_writer("d/x", size=size, resume=True)
        writer.write(0, memoryview(b"a" * BLOCK_SIZE))
        writer.abort()
        data = b"b" * size
        for last in (False, True):
            writer = backend.open_writer("d/x", size=size, resume=True)
            assert not writer.kept(0, memoryview(data)[:BLOCK_SIZE])
            if not last:
                with pytest.raises(CkptError, match="cannot be replaced"):
                    writer.write(0, memoryview(data)[:BLOCK_SIZE])
            else:
                for offset in (0, BLOCK_SIZE):
                    writer.write(offset, memoryview(data)[offset : offset + BLOCK_SIZE])
                writer.finish(size)
            writer.abort()
        assert self.raw_read("d/x") == data
        assert not list(backend.unfinished(""))

    def test_put_replaces_whole(self, backend: Backend) -> None:
        """Only when nobody reads meanwhile: it writes over the file that it serves.

        (A document that is read half has the wrong digest, and counts as one that is damaged.)
        """
        for content in [bytes([65 + i]) * (1000 + i) for i in range(20)]:
            backend.put("d/lease", content)
            assert backend.read("d/lease", 10_000) == content

    @pytest.fixture(autouse=True)
    def _bucket(self, rclone: Rclone, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bucket = Bucket.make(rclone, monkeypatch)


if CEPH:

    class TestCeph(_S3Conformance):
        """Ceph's RADOS Gateway, which ignores many conditions and new checksums."""

        @pytest.fixture(autouse=True)
        def _bucket(self, ceph: Ceph, monkeypatch: pytest.MonkeyPatch) -> None:
            self.bucket = Bucket.make(ceph, monkeypatch)
