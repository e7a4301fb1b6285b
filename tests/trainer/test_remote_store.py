"""A training whose node is gone goes on from a bucket or from HDFS, bit for bit, on another."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from tests.servers.hadoop import Hadoop
from tests.servers.s3 import Bucket
from tests.servers.seaweed import SeaweedFS
from tests.trainer.support import Training

Make = Callable[..., Training]


@pytest.fixture
def s3(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> str:
    return Bucket.make(seaweed, monkeypatch).uri()


@pytest.fixture
def hdfs(hadoop: Hadoop, monkeypatch: pytest.MonkeyPatch) -> str:
    for key, value in hadoop.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("HADOOP_USER_NAME", "root")
    return f"hdfs://{hadoop.authority}/trainings/{os.getpid()}-{time.monotonic_ns()}"


@pytest.mark.parametrize("storage", ["s3", "hdfs"])
def test_a_training_goes_on_exactly_without_its_local_disk(
    training: Make, whole: Make, request: pytest.FixtureRequest, storage: str
) -> None:
    uri: str = request.getfixturevalue(storage)
    names = ("AWS_", "HADOOP_")
    env = {key: value for key, value in os.environ.items() if key.startswith(names)}
    settings = ("storage.async_save=false",)
    killed = training("killed", f"storage.uri={uri}", *settings)
    killed.place = uri
    running = killed.start(env=env)
    killed.wait_for_step(7, running)
    assert running.kill().code == -signal.SIGKILL
    before = killed.facts()
    shutil.rmtree(killed.directory)
    killed.directory.mkdir()

    killed.run(env=env).ok("resumed from step 5")
    straight = whole(*settings)
    assert before == straight.facts()[: len(before)]
    assert killed.facts() == straight.facts()[5:]
    assert killed.stored() == straight.stored()
    assert killed.steps() == [5, 10, 12]
