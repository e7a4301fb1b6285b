"""Storage that fails: training goes on, what was saved stays, and the log says what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.support import ckpt
from tests.trainer.support import ENVIRONMENT, ROOT, Lab, Training, rank_variables, until

Make = Callable[..., Training]

FULL_DISK = "no space left"


def mount(point: Path, options: str = "size=16m") -> None:
    """A small file system of its own; skips the test where that is not permitted."""
    point.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "test", str(point)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount is not permitted: {done.stderr.strip()}")


def unmount(point: Path) -> None:
    subprocess.run(["umount", "--lazy", str(point)], check=True, timeout=30)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB: room for six checkpoints."""
    point = tmp_path / "small"
    mount(point)
    yield point
    if os.path.ismount(point):
        unmount(point)


def settings(lab: Lab, store: Path) -> tuple[str, ...]:
    return (
        f"storage.uri={store}",
        f"reward.function={lab.rewards}:gate",
        "trainer.total_steps=9",
        "trainer.save_freq=2",
    )


def stopped_at_step_3(training: Training) -> Callable[[], None]:
    """Wait for the third step, and the second's save; returns what lets it go on."""
    until((training.directory / "reached").exists, "the gate")
    until(lambda: training.steps() == [2], "the save of step 2")
    return (training.directory / "go").touch


def elsewhere(lab: Lab, directory: Path, store: Path, *more: str) -> Training:
    """A training whose store is not in its directory."""
    return Training(lab, directory, [*settings(lab, store), *more], store)


GATE = {"GATE": "25:"}


def fill_up(point: Path) -> Path:
    filler = point / "filler"
    with open(filler, "wb", buffering=0) as f, suppress(OSError):
        while f.write(b"x" * 4096):
            pass
    return filler


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_disk_that_fills_up(lab: Lab, tmp_path: Path, small: Path, background: str) -> None:
    one = elsewhere(lab, tmp_path / "one", small / "store", f"storage.async_save={background}")
    running = one.start(env=GATE)
    go_on = stopped_at_step_3(one)
    filler = fill_up(small)
    go_on()
    running.wait().failed(
        *(8, "step 4 of run was not saved", FULL_DISK, "free some space", "step 9/9"),
        "step 9 of run was not saved",
    )
    assert [line["step"] for line in one.lines()] == list(range(1, 10))
    assert one.steps() == [2]
    ckpt("verify", small / "store", "--deep").ok()
    filler.unlink()
    one.run().ok("resumed from step 2", "ended at step 9 of 9")
    assert one.steps()[-1] == 9


def test_room_in_time_makes_all_well(lab: Lab, tmp_path: Path, small: Path) -> None:
    one = elsewhere(lab, tmp_path / "one", small / "store", "storage.async_save=false")
    running = one.start(env=GATE)
    go_on = stopped_at_step_3(one)
    filler = fill_up(small)
    go_on()
    one.wait_for_step(5, running)
    filler.unlink()
    running.wait().ok("step 4 of run was not saved", FULL_DISK, "ended at step 9 of 9")
    assert one.steps()[0] == 2
    assert one.steps()[-1] == 9


@pytest.mark.parametrize("background", ["true", "false"])
def test_on_save_error_fail_ends_it_at_once(
    lab: Lab, tmp_path: Path, small: Path, background: str
) -> None:
    one = elsewhere(
        *(lab, tmp_path / "one", small / "store", f"storage.async_save={background}"),
        *("storage.on_save_error=fail", "trainer.total_steps=200", "trainer.save_freq=30"),
    )
    one.run("trainer.stop_at_step=28").ok()
    running = one.start(env={"GATE": "1:"})
    until((one.directory / "reached").exists, "the gate")
    fill_up(small)
    (one.directory / "go").touch()
    running.wait().failed(8, FULL_DISK, "free some space")
    assert 30 <= one.lines()[-1]["step"] < 50, "and not at the next save"
    assert one.steps() == [28]


def test_a_store_that_is_away_for_a_while(lab: Lab, tmp_path: Path) -> None:
    one = elsewhere(lab, tmp_path / "one", tmp_path / "store", "storage.async_save=false")
    running = one.start(env=GATE)
    go_on = stopped_at_step_3(one)
    (tmp_path / "store").rename(tmp_path / "away")
    go_on()
    one.wait_for_step(5, running)
    assert not (tmp_path / "store").exists(), "nothing is made where the store was"
    (tmp_path / "away").rename(tmp_path / "store")
    running.wait().ok("step 4 of run was not saved", "ended at step 9 of 9")
    assert one.steps()[0] == 2
    assert one.steps()[-1] == 9


def test_a_disk_that_is_unmounted(lab: Lab, tmp_path: Path, small: Path) -> None:
    one = elsewhere(lab, tmp_path / "one", small / "store")
    running = one.start(env=GATE)
    go_on = stopped_at_step_3(one)
    unmount(small)
    go_on()
    ended = running.wait()
    ended.failed(4, "was not saved", "store", "step 9/9")
    assert not list(small.iterdir()), "nothing is written to the disk below"


def test_a_disk_that_becomes_read_only(lab: Lab, tmp_path: Path, small: Path) -> None:
    one = elsewhere(lab, tmp_path / "one", small / "store")
    running = one.start(env=GATE)
    go_on = stopped_at_step_3(one)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True, timeout=30)
    go_on()
    running.wait().failed(7, "step 4 of run was not saved", "Read-only", "step 9/9")
    assert one.steps() == [2]
    one.run().failed(7, "Read-only")
    assert len(one.lines()) == 9


# At the start


def test_the_wrong_store(lab: Lab, tmp_path: Path, half_done: Training) -> None:
    named = half_done.store.id
    half_done.run("storage.store_id=nobody", "trainer.stop_at_step=7").failed(
        6, f"has the id {named}, and storage.store_id=nobody", "hint:"
    )
    half_done.run(f"storage.store_id={named}", "trainer.stop_at_step=7").ok("resumed from step 6")
    missing = elsewhere(lab, tmp_path / "one", tmp_path / "store", f"storage.store_id={named}")
    missing.run().failed(4, "there is no store at", "is the disk mounted?")
    assert not (tmp_path / "store").exists()


def test_what_is_no_store(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    elsewhere(lab, tmp_path / "one", file).run().failed(6, str(file))


def test_an_unknown_key(half_done: Training) -> None:
    half_done.run("trainer.save_frq=3").failed(2, "trainer.save_frq", "trainer.save_freq")
    half_done.run("trainer.save_freq=often").failed(2, "trainer.save_freq")


# Ranks that do not see the same store


def test_a_rank_in_another_directory(training: Make, tmp_path: Path) -> None:
    one = training("one", "trainer.total_steps=2")
    other = tmp_path / "other"
    other.mkdir()
    first, second = (
        one.start(env=env, directory=directory)
        for env, directory in zip(rank_variables(2), (one.directory, other), strict=True)
    )
    first.wait().failed(4, "rank 1 on", "does not see what rank 0 wrote", "every node")
    assert second.wait().code == 4
    assert not list(other.glob("store*")), "nothing is made there"


def test_a_rank_with_another_disk_in_the_same_place(training: Make, lab: Lab) -> None:
    one = training("one", "trainer.total_steps=2")
    store = one.directory / "store"
    store.mkdir()
    command = [sys.executable, "-m", "trainer", *one.arguments()]
    apart = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs test {store} && exec "$@"', "-"]
    first, second = (
        subprocess.Popen(
            [*prefix, *command],
            cwd=one.directory,
            env={**os.environ, **ENVIRONMENT, **env, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for prefix, env in zip(([], apart), rank_variables(2), strict=True)
    )
    try:
        said = second.communicate(timeout=100)[1]
        if "unshare" in said or "mount:" in said:
            pytest.skip(f"not permitted: {said.strip()}")
        told = first.communicate(timeout=100)[1]
    finally:
        for process in (first, second):
            process.send_signal(signal.SIGKILL)
            process.communicate()
    flat = " ".join(told.split())
    assert first.returncode == second.returncode == 4, told + said
    assert "rank 1 on" in flat
    assert "does not see what rank 0 wrote" in flat
    assert "Traceback" not in told + said
