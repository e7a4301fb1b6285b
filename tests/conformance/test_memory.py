"""The conformance suite on memory."""

from __future__ import annotations

import pytest

from ckptstore.backends.base import Backend
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.testing.conformance import BackendConformance


class TestMemory(BackendConformance):
    """A dictionary."""

    @pytest.fixture(autouse=True)
    def _space(self) -> None:
        self.space = Space()

    def make(self) -> Backend:
        return MemoryBackend(self.space)

    def raw_write(self, key: str, data: bytes) -> None:
        self.space.objects[key] = (data, 0.0)

    def raw_read(self, key: str) -> bytes | None:
        found = self.space.objects.get(key)
        return None if found is None else found[0]
