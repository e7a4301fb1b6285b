"""Stores on NFS, tested on a real server by two real clients (``tests/nfs_inside``)."""

from __future__ import annotations

import pytest

from tests.conftest import FULL
from tests.servers.nfs import NFS

SECONDS = 1500 if FULL else 600


@pytest.mark.parametrize("module", ["conformance", "clients"])
@pytest.mark.timeout(SECONDS + 200)  # the first one waits for the kernel, too
def test_inside(nfs: NFS, module: str) -> None:
    outcome = nfs.pytest(f"tests/nfs_inside/test_{module}.py", seconds=SECONDS)
    assert outcome.status == 0, f"inside NFS clients:\n{outcome.output}"
