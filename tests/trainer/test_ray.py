"""Trainings on Ray actors: the same bits, and what becomes of kills, signals and errors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import FULL
from tests.trainer.support import ENVIRONMENT, ROOT, Lab, Running, Training, needs, until

pytestmark = [needs("ray"), pytest.mark.timeout(600)]

CLUSTER = """
import sys, ray
context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""

REWARD = '''
import os
import signal
import time
from pathlib import Path

calls = 0


def ordered(prompt, response, answer):
    """At the call that a file names for this rank: hold still there, or fail."""
    global calls
    calls += 1
    order = Path("order-" + os.environ["RANK"])
    if order.exists() and order.read_text() == f"hold {calls}":
        Path("held.tmp").write_text(str(os.getpid()))
        Path("held.tmp").rename("held")
        while order.exists():
            time.sleep(0.01)
    if order.exists() and order.read_text() == f"fail {calls}":
        raise ValueError("no reward for this")
    return float(len(response))
'''


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with four CPUs; it ends with this process."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert re.fullmatch(r"[0-9.]+:\d+", address), address
    yield address
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.fixture
def make(lab: Lab, tmp_path: Path, cluster: str) -> Training:
    """A training by two actors, whose reward does what files in its directory say."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    return Training(
        lab,
        tmp_path / "ray",
        [
            "runtime=ray",
            f"ray.address={cluster}",
            "ray.workers=2",
            f"reward.function={reward}:ordered",
            "trainer.total_steps=6",
            "trainer.save_freq=3",
        ],
    )


def order(training: Training, rank: int, text: str) -> Path:
    """Say what a rank is to do at one of its calls of the reward."""
    file = training.directory / f"order-{rank}"
    file.write_text(text)
    return file


def held(training: Training, running: Running) -> int:
    """Wait until a rank holds still, and take its process id."""
    file = training.directory / "held"
    until(lambda: file.exists() or running.poll() is not None, "a rank that holds still")
    assert file.exists(), running.text
    pid = int(file.read_text())
    file.unlink()
    return pid


def test_kills_and_signals_change_no_bit_and_it_is_that_of_torchrun(make: Training) -> None:
    whole = Training(make.lab, make.directory.with_name("whole"), [*make.settings, "runtime=local"])
    for ended in whole.run_ranks(2):
        ended.ok()

    hold = order(make, 1, "hold 19")  # 6 samples a step: in step 4
    running = make.start()
    pid = held(make, running)
    until(lambda: make.steps() == [3], "the save of step 3")
    os.kill(pid, signal.SIGKILL)
    ended = running.wait()
    hold.unlink()
    ended.failed(8, "step 3/6", f"(process {pid}) is gone: it was killed", "goes on from")
    assert re.search(r"rank 1 on \S+ \(process", ended.text)

    hold = order(make, 1, "hold 7")  # in the second step since: step 5
    running = make.start()
    held(make, running)
    running.send(signal.SIGTERM)
    running.says("SIGTERM came: the workers have been told")
    hold.unlink()
    running.wait().ok("resumed from step 3", "ended at step 4 of 6")
    assert make.steps() == [3, 4]

    make.run().ok("resumed from step 4", "step 6/6", "ended at step 6 of 6")
    make.same_as(whole, 6)


@pytest.mark.skipif(not FULL, reason="minutes")
@pytest.mark.parametrize("shards", [1, 2])
def test_with_vllm_it_is_that_of_torchrun_too(make: Training, shards: int) -> None:
    pytest.importorskip("vllm")
    make.settings += ["rollout.engine=vllm", f"rollout.tensor_parallel_size={shards}"]
    whole = Training(make.lab, make.directory.with_name("whole"), [*make.settings, "runtime=local"])
    for ended in whole.run_ranks(2):
        ended.ok()
    make.run("trainer.stop_at_step=3").ok("ended at step 3 of 6")
    make.run().ok("resumed from step 3", "ended at step 6 of 6")
    make.same_as(whole, 6)


def test_an_error_on_a_rank_is_told_with_its_rank_and_its_exit_code(make: Training) -> None:
    order(make, 1, "fail 3")
    ended = make.run().failed(2, "the reward function failed for sample", "no reward for this")
    assert re.search(r"rank 1 on \S+: the reward function failed", ended.text)


def test_what_the_cluster_cannot_do_is_told(make: Training, cluster: str) -> None:
    make.run("ray.workers=5", "ray.gpus_per_worker=2", "ray.init_timeout=1").failed(
        8,
        "no room for 5 workers with 1 CPUs and 2 GPUs each",
        "it has 4 CPUs and 0 GPUs on 1 nodes",
        "hint: ask for less (ray.workers,",
    )
    make.run("ray.cpus_per_worker=0").failed(2, "are both 0")
    make.run("ray.address=127.0.0.1:1").failed(8, "no Ray cluster answers at 127.0.0.1:1", "hint:")
    make.run("ray.init.speed=2").failed(2, "Ray refuses its options", "speed")
    assert not (make.directory / "store").exists(), "it began nothing"
