"""What all tests share."""

from __future__ import annotations

import os

import pytest

from tests.servers.ceph import Ceph
from tests.servers.hadoop import Hadoop
from tests.servers.nfs import NFS
from tests.servers.rclone import Rclone
from tests.servers.seaweed import SeaweedFS
from tests.servers.shared import shared, stop_all

FULL = os.environ.get("CKPTSTORE_TEST_FULL") == "1"
"""Whether long tests run whole (`make test-full`) or as a seeded sample (`make test`)."""

CEPH = os.environ.get("CKPTSTORE_TEST_CEPH") == "1"
"""Whether the tests of S3 run on Ceph too (`make test-ceph`)."""


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> SeaweedFS:
    """The run's SeaweedFS."""
    return shared(SeaweedFS, tmp_path_factory)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Rclone:
    """The run's S3 server without conditional requests."""
    return shared(Rclone, tmp_path_factory)


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Ceph:
    """The run's Ceph (`make test-ceph`)."""
    return shared(Ceph, tmp_path_factory)


@pytest.fixture(scope="session")
def nfs(tmp_path_factory: pytest.TempPathFactory) -> NFS:
    """The run's NFS server and clients."""
    return shared(NFS, tmp_path_factory)


@pytest.fixture(scope="session")
def hadoop(tmp_path_factory: pytest.TempPathFactory) -> Hadoop:
    """The run's Hadoop."""
    return shared(Hadoop, tmp_path_factory)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the servers when pytest ends; its workers end earlier, one by one."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        stop_all(factory.getbasetemp())
