"""A fixture that is each server in turn."""

from __future__ import annotations

import pytest

from tests.remote.places import Place
from tests.servers.s3 import Bucket
from tests.servers.seaweed import SeaweedFS


@pytest.fixture(params=["s3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Places on a server."""
    seaweed: SeaweedFS = request.getfixturevalue("seaweed")
    return Place("s3", lambda number: Bucket.make(seaweed, monkeypatch).uri())
