"""A training with mirrors: they follow it, and neither slow nor fail it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptstore.maintenance import verify
from ckptstore.maintenance.mirror import mirror
from ckptstore.maintenance.mirror.statusfile import read_states
from ckptstore.mirrors import known_mirrors
from ckptstore.store import Store, open_store
from tests.cli.support import ckpt
from tests.trainer.support import Lab, Training, free_port, until
from tests.trainer.test_storage_trouble import FULL_DISK, GATE, mount, unmount

Make = Callable[..., Training]

SYNC = ("storage.async_save=false",)


def stored_steps(store: Store) -> list[int]:
    return [c.step for c in store.list("run")] if store.exists and store.runs() else []


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_mirror_has_every_checkpoint_at_the_end(training: Make) -> None:
    made = training("mirrored", "storage.mirrors=[one,two]", "trainer.save_freq=3")
    ended = made.run().ok("mirrored to", "the mirrors hold all checkpoints")
    assert made.steps() == [3, 6, 9, 12]
    for name in ("one", "two"):
        there = open_store(str(made.directory / name))
        assert stored_steps(there) == [3, 6, 9, 12]
        assert [c.commit for c in there.list("run")] == [c.commit for c in made.commits()]
        assert all(verify(c, deep=True).ok for c in there.list("run"))
    assert any("mirror/behind" in line for line in made.lines()), ended.text
    assert " waits: " not in ended.text, "that there was no checkpoint yet is no trouble"


def test_a_lost_disk_is_restored_from_the_mirror_and_goes_on_exactly(
    training: Make, whole: Make
) -> None:
    made = training("lost", "storage.mirrors=[mirror]", *SYNC)
    running = made.start()
    made.wait_for_step(7, running)
    assert running.kill().code == -signal.SIGKILL
    there = open_store(str(made.directory / "mirror"))
    until(lambda: stored_steps(there) == [5], "the mirror, whose process outlives the training")
    states = read_states(made.directory / "logs" / "run" / "mirror.json")
    until(lambda: states is None or has_ended(states.pid), "its end")
    shutil.rmtree(made.directory / "store")

    refused = made.run().failed(6, "holds run 'run'", "nothing is started from scratch")
    assert "ckpt mirror" in " ".join(refused.text.split())
    assert not (made.directory / "store").exists()
    made.run("trainer.resume_mode=none").failed(6, "holds run 'run'")

    assert mirror(there, open_store(str(made.directory / "store"))).ok
    made.run().ok("resumed from step 5")
    straight = whole(*SYNC)
    assert made.facts("mirror/") == straight.facts()
    assert made.stored() == straight.stored()
    assert stored_steps(there) == [5, 10, 12]


def test_a_mirror_that_is_down_costs_nothing_but_a_word(training: Make, whole: Make) -> None:
    down = f"s3://bucket/ckpts?endpoint_url=http://127.0.0.1:{free_port()}"
    made = training("down", f'storage.mirrors=["{down}",up]', "trainer.save_freq=2", *SYNC)
    env = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "unlikely-secret"}
    ended = made.run(env=env).ok("no connection to the server", "later: ckpt mirror")
    assert made.steps() == [2, 4, 6, 8, 10, 12]
    assert stored_steps(open_store(str(made.directory / "up"))) == made.steps()
    flat = " ".join(ended.text.split())
    assert flat.count("is behind:") <= 2, "once while it goes on, and at the end"
    assert "checkpoints behind (trainer.alert_mirror_lag is 3)" in flat
    assert "unlikely-secret" not in ended.text + _log(made)
    assert len(_log(made).splitlines()) <= 3, _log(made)
    assert len(known_mirrors(made.store.catalog)) == 2
    assert made.stored() == whole("trainer.save_freq=2", *SYNC).stored()


def _log(made: Training) -> str:
    return (made.directory / "logs" / "run" / "mirror.log").read_text()


@pytest.fixture
def full_and_denied(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file system without room for a checkpoint, and one that cannot be written."""
    places = {tmp_path / "full": "size=1m", tmp_path / "denied": "ro,size=64m"}
    for point, options in places.items():
        mount(point, options)
    yield (tmp_path / "full", tmp_path / "denied")
    for point in places:
        unmount(point)


def test_full_and_denied_mirrors_cost_nothing_but_a_word(
    training: Make, lab: Lab, full_and_denied: tuple[Path, Path]
) -> None:
    places = [str(point / "mirror") for point in full_and_denied]
    made = training(
        *("trouble", f"storage.mirrors=[{','.join(places)}]", "trainer.save_freq=2"),
        *(f"reward.function={lab.rewards}:gate", *SYNC),
    )
    running = made.start(env=GATE)
    until((made.directory / "reached").exists, "the gate")
    until(lambda: all(f"{place} is behind" in _log(made) for place in places), "the trouble")
    (made.directory / "go").touch()
    ended = running.wait().ok(FULL_DISK, "Read-only file system", "ended at step 12 of 12")
    assert made.steps() == [2, 4, 6, 8, 10, 12]
    told = ended.text.partition("waiting for the mirrors")[0]
    for place in places:
        assert told.count(f"the mirror {place} is behind:") == 1, ended.text

    for point, options in zip(full_and_denied, ("size=64m", "rw"), strict=True):
        mount(point, f"remount,{options}")
    for place in places:
        ckpt("mirror", made.directory / "store", place).ok()
        there = open_store(place)
        assert stored_steps(there) == made.steps()
        assert all(verify(c, deep=True).ok for c in there.list("run"))


def test_a_mirror_that_is_down_for_ever_holds_back_a_limited_number(training: Make) -> None:
    down = f"s3://bucket/ckpts?endpoint_url=http://127.0.0.1:{free_port()}"
    made = training(
        *("for-ever", f'storage.mirrors=["{down}"]', "storage.mirror_on_exit=false"),
        *("trainer.save_freq=1", "storage.keep_last=2", "storage.owed_limit=3"),
    )
    env = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    made.run(env=env).ok(
        *("step 7 (", "lacks it: more than 3 checkpoints would be held back for mirrors"),
        "ended at step 12 of 12",
    )
    assert made.steps() == [8, 9, 10, 11, 12]
    assert len(made.store.catalog.directories("run")) == 5


def test_when_nothing_here_is_intact_the_mirror_is_asked(training: Make, whole: Make) -> None:
    made = training("damaged", "storage.mirrors=[mirror]", *SYNC)
    made.run("trainer.stop_at_step=5").ok()
    for path in Path(made.directory / "store" / "run").glob("*-step-*/actor/model/*"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-8])
    ended = made.run().ok("resumed from step 5")
    assert "resuming from the mirror" in " ".join(ended.text.split())
    assert made.stored() == whole(*SYNC).stored()


def test_a_mirror_onto_the_store_itself_is_refused(training: Make) -> None:
    made = training("itself", "storage.mirrors=[store]")
    made.run().failed(2, "storage.mirrors", "cannot mirror itself")
