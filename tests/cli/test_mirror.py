"""``ckpt mirror``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptstore import open_store
from ckptstore.layout import is_temporary
from ckptstore.mirrors import expect_mirror
from tests.cli.support import (
    Ran,
    ckpt,
    ckpt_process,
    contents,
    directory_of,
    fill,
    flip,
    names_of,
    start,
)

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for what another process does to the disk."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def same(store: Path, mirror: Path, run: str = "gsm8k") -> bool:
    return names_of(store, run) == names_of(mirror, run) != []


@pytest.fixture
def dst(place: Path) -> Path:
    return place / "mirror"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> Ran:
    out, err = process.communicate(timeout=30)
    assert "Traceback" not in err, err
    return Ran(process.returncode, out, err)


# Copying


def test_a_mirror_gets_what_it_lacks_and_then_nothing(store: Path, dst: Path) -> None:
    ran = ckpt("mirror", store, dst).ok()
    assert ran.out.startswith(f"{dst}: copied 2 checkpoints, sent ")
    for index in (0, 1):
        assert contents(directory_of(store, index=index)) == contents(
            directory_of(dst, index=index)
        )
    again = ckpt("mirror", store, dst).ok()
    assert again.out.startswith(f"{dst}: copied 0 checkpoints, sent 0 bytes in ")
    assert ckpt("mirror", store, dst, "--quiet").ok().out == ""
    ckpt("verify", dst, "--deep").ok()


def test_one_of_several_fails(store: Path, dst: Path, place: Path) -> None:
    (place / "file").write_text("")
    ran = ckpt("mirror", store, dst, place / "file/in").failed(3, f"{place}/file/in")
    assert f"{dst}: copied 2" in ran.out
    assert same(store, dst)


def test_when_all_fail_it_is_with_the_code_of_the_error(store: Path, place: Path) -> None:
    (place / "file").write_text("")
    one = ckpt("mirror", store, place / "file/in")
    assert one.code not in (0, 3)
    ckpt("mirror", store, place / "file/in", place / "file/at").failed(one.code)


def test_a_missing_or_empty_source_is_said_once(place: Path, dst: Path) -> None:
    state = place / "state.json"
    missing = ckpt("mirror", place / "nope", dst, place / "other", "--status", state)
    missing.failed(4, f"error: there is no store at {place}/nope")
    assert missing.err.count("error:") == 1
    assert str(dst) not in missing.err
    assert not json.loads(state.read_bytes())["mirrors"][str(dst)]["ok"]
    ckpt("init", place / "empty").ok()
    ckpt("mirror", place / "empty", dst).failed(4, "holds no checkpoint", "hint: is it the right")
    assert not dst.exists()


def test_a_store_is_no_mirror_of_itself(store: Path, place: Path) -> None:
    ckpt("mirror", store, store).failed(2, "onto itself")
    ckpt("mirror", store, store / "inside").failed(2, "one in the other")
    (place / "link").symlink_to(store)
    ckpt("mirror", store, place / "link").failed(2)
    shutil.copytree(store, place / "copy", symlinks=True)
    ckpt("mirror", store, place / "copy").failed(2, "plain copy")
    ckpt("mirror", store, place / "a", place / "a").failed(2, "twice")
    ckpt("mirror", store, place / "a", "--follow", "--json").failed(2, "no --json")


def test_only_some_runs(store: Path, source: Path, dst: Path) -> None:
    ckpt("push", source, f"{store}/other@1").ok()
    ckpt("mirror", store, dst, "--run", "oth*").ok()
    assert names_of(dst) == []
    assert same(store, dst, "other")
    ckpt("mirror", store, dst, "--run", "nothing").failed(4, "of these runs")


def test_the_order(store: Path, dst: Path, place: Path) -> None:
    names = names_of(store)
    oldest = ckpt("mirror", store, dst, "--json").ok().json[0]["copied"]
    newest = ckpt("mirror", store, place / "b", "--json", "--newest-first").ok().json[0]["copied"]
    assert oldest == [f"gsm8k@{n}" for n in names]
    assert newest == oldest[::-1]


def test_a_dry_run_does_nothing(store: Path, dst: Path) -> None:
    before = contents(store)
    assert "would copy 2 checkpoints" in ckpt("mirror", store, dst, "--dry-run").ok().out
    assert not dst.exists()
    assert contents(store) == before


def test_the_document(store: Path, dst: Path, place: Path) -> None:
    (place / "file").write_text("")
    ran = ckpt("mirror", store, dst, place / "file/in", "--json").failed(3)
    good, bad = ran.json
    assert good["mirror"] == str(dst)
    assert good["ok"]
    assert good["behind"] == {"checkpoints": 0, "bytes": 0, "seconds": 0.0}
    assert good["sent_bytes"] > 0
    assert (bad["ok"], bad["behind"], bad["copied"]) == (False, None, [])
    assert bad["error"]


def test_deleting_is_asked_for_and_limited(store: Path, source: Path, dst: Path) -> None:
    ckpt("mirror", store, dst).ok()
    ckpt("delete", f"{store}/gsm8k@400", "--force").ok()
    ckpt("mirror", store, dst).ok()
    assert len(names_of(dst)) == 2
    ckpt("mirror", store, dst, "--delete", "--max-delete", "0").failed(3, "more than 0")
    assert len(names_of(dst)) == 2
    assert "would delete 1" in ckpt("mirror", store, dst, "--delete", "--dry-run").ok().out
    assert "deleted 1" in ckpt("mirror", store, dst, "--delete").ok().out
    assert names_of(dst) == names_of(store)


def test_status(store: Path, dst: Path, place: Path) -> None:
    ckpt("mirror", store, dst, "--status", place / "state.json").ok()
    state = json.loads((place / "state.json").read_bytes())
    assert state["source"] == str(store)
    assert state["mirrors"][str(dst)]["ok"]


# What is wrong


def test_what_is_damaged_is_skipped_with_the_command_that_repairs_it(
    store: Path, dst: Path
) -> None:
    flip(directory_of(store) / "model.bin", 9)
    ran = ckpt("mirror", store, dst).failed(3, "is damaged: model.bin", "it was not copied")
    assert f"hint: ckpt repair gsm8k@{names_of(store)[1]} --store {store} --from STORE" in ran.err
    assert names_of(dst) == names_of(store)[:1]


def test_the_hint_names_a_mirror_that_may_have_it(store: Path, dst: Path, place: Path) -> None:
    other = place / "the other"
    ckpt("mirror", store, other).ok()
    expect_mirror(open_store(str(store)).catalog, str(dst))
    flip(directory_of(store) / "model.bin", 9)
    ckpt("mirror", store, dst).failed(3, f"--from '{other}'")


def test_damage_in_the_mirror_is_repaired_from_the_source(store: Path, dst: Path) -> None:
    ckpt("mirror", store, dst).ok()
    flip(directory_of(dst) / "model.bin", 9)
    ckpt("verify", dst, "--deep").failed(5)
    err = ckpt("mirror", store, dst).failed(3, f"is damaged in {dst}").err
    hint = next(x for x in err.splitlines() if x.startswith("hint: ckpt repair"))
    ckpt(*hint.split()[2:]).ok()
    ckpt("mirror", store, dst).ok()


def test_a_mirror_that_is_not_mounted(store: Path, dst: Path, place: Path) -> None:
    ckpt("mirror", store, dst).ok()
    dst.rename(place / "away")
    dst.mkdir()
    ckpt("mirror", store, dst).failed(4, "is no store any more", "is it mounted?", "--forget")
    assert list(dst.iterdir()) == []


def test_a_mirror_is_forgotten(store: Path, dst: Path, place: Path) -> None:
    ckpt("mirror", store, dst).ok()
    ckpt("mirror", store, place / "unknown", "--forget").failed(4, "is no mirror", str(dst))
    before = contents(dst)
    assert "nothing was deleted" in ckpt("mirror", store, dst, "--forget").ok().out
    assert contents(dst) == before
    ckpt("mirror", store, dst, "--forget").failed(4, "known: none")


def test_no_secret_is_shown(store: Path) -> None:
    env = {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_MAX_ATTEMPTS": "1",
    }
    target = "s3://bucket/ckpts?endpoint_url=http://127.0.0.1:9"
    ran = ckpt_process("mirror", store, target, env=env)
    assert ran.code not in (0, 3)
    assert "Traceback" not in ran.err
    assert SECRET not in ran.out + ran.err
    assert all(SECRET.encode() not in data for data in contents(store).values())


# As a process


def test_a_limit(store: Path, place: Path, dst: Path) -> None:
    ckpt("push", fill(place / "big", {"w": os.urandom(10_000_000)}), f"{store}/big@1").ok()
    begun = time.monotonic()
    ckpt("mirror", store, dst, "--run", "big", "--limit", "5MB").ok()
    assert time.monotonic() - begun > 1.0


def test_ending_a_limited_copy_finishes_the_file(
    place: Path, dst: Path, started: list[subprocess.Popen[str]]
) -> None:
    big = {f"w{i}": os.urandom(6_000_000) for i in range(3)}
    store = place / "large"
    ckpt("push", fill(place / "big", big), f"{store}/big@1").ok()
    process = start("mirror", store, dst, "--limit", "4MB", "--threads", "1")
    started.append(process)
    until(lambda: any(is_temporary(p.name) for p in (dst / "big").glob("0*-step-*/.*")))
    process.send_signal(signal.SIGTERM)
    ran = ended(process)
    assert ran.code == 143
    assert "ending after the current file" in ran.err
    assert names_of(dst, "big") == []
    there = [p.name for p in (dst / "big").glob("0*-step-*/w*")]
    assert 1 <= len(there) < 3
    rest = ckpt("mirror", store, dst, "--json").ok().json[0]["sent_bytes"]
    assert rest == 6_000_000 * (3 - len(there))


def follow(store: Path, dst: Path, *options: str) -> subprocess.Popen[str]:
    return start("mirror", store, dst, "--follow", "--interval", "0.3s", *options)


def test_following(
    store: Path, source: Path, dst: Path, place: Path, started: list[subprocess.Popen[str]]
) -> None:
    status = place / "state.json"
    process = follow(store, dst, "--status", str(status))
    started.append(process)

    def passed() -> bool:
        """Whether the pass that ended last was without a problem."""
        return bool(json.loads(status.read_bytes())["mirrors"][str(dst)]["ok"])

    until(lambda: same(store, dst))
    ckpt("push", source, f"{store}/gsm8k@600").ok()
    until(lambda: len(names_of(dst)) == 3)
    for root in (store, dst):
        status.unlink()
        until(status.exists)  # a pass has ended: the stores are at rest
        root.rename(place / "away")
        until(lambda: not passed())
        assert process.poll() is None
        assert not root.exists()
        (place / "away").rename(root)
        step = 700 if root == store else 800
        ckpt("push", source, f"{store}/gsm8k@{step}").ok()
        until(lambda: same(store, dst))
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0


def test_a_second_signal_ends_it_at_once(
    place: Path, dst: Path, started: list[subprocess.Popen[str]]
) -> None:
    files = {"w": os.urandom(40_000_000)}
    store = place / "large"
    ckpt("push", fill(place / "big", files), f"{store}/big@1").ok()
    process = follow(store, dst, "--limit", "1MB", "--threads", "1")
    started.append(process)
    until(lambda: any(p.is_dir() for p in (dst / "big").glob("0*-step-*")))
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "ending after the current file" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    ended(process)
    assert time.monotonic() - begun < 10
    assert names_of(dst, "big") == []
