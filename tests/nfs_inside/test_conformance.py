"""The conformance suite on NFS: one client has the backend, another looks behind its back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar

import pytest

from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.ids import random_letters
from ckptstore.testing.conformance import BackendConformance
from ckptstore.uri import StoreURI
from tests.nfs_inside.support import MOUNTS


class OnNfs(BackendConformance):
    """Client A's backend; client B looks."""

    mounts: ClassVar[Path]

    @pytest.fixture(autouse=True)
    def _root(self) -> None:
        name = random_letters()
        self.root = self.mounts / "a" / name
        self.theirs = self.mounts / "b" / name
        self.root.mkdir()

    def make(self) -> Backend:
        return open_backend(StoreURI.parse(str(self.root)))

    def settle(self, backend: Backend, key: str) -> None:
        backend.sync([key.rpartition("/")[0]])

    def raw_write(self, key: str, data: bytes) -> None:
        path = self.theirs / key
        os.listdir(self.mounts / "b")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        time.sleep(0.02)  # the tick of the server's clock: a change in the same one stays unseen
        while path != self.theirs:
            path = path.parent
            os.utime(path)

    def raw_read(self, key: str) -> bytes | None:
        path = self.mounts / "b"
        for part in f"{self.theirs.name}/{key}".split("/"):
            if part not in os.listdir(path):
                return None
            path /= part
        return path.read_bytes()


class TestVersion3(OnNfs):
    mounts = MOUNTS / "v3"


class TestVersion4(OnNfs):
    mounts = MOUNTS / "v4"
