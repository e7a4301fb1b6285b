"""A full disk: exit 8, nothing committed, nothing lost, and room makes it work again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.support import ckpt, ckpt_process, contents, directory_of, fill, overwrite

MIB = 1024 * 1024


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "ckpt-test", str(point)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount is not permitted: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", "--lazy", str(point)], check=True, timeout=30)


def _fill_up(small: Path, leave: int = 0) -> Path:
    """A file that takes all the room there is, but ``leave`` bytes."""
    filler = small / "filler"
    with open(filler, "wb", buffering=0) as f, suppress(OSError):
        while f.write(b"x" * 4096):
            pass
    if leave:
        os.truncate(filler, filler.stat().st_size - leave)
    return filler


def test_a_push_onto_a_full_disk(place: Path, small: Path) -> None:
    store = small / "store"
    first = fill(place / "first", {"a.bin": os.urandom(3 * MIB)})
    ckpt("push", first, f"{store}/gsm8k@1").ok()
    before = contents(directory_of(store))
    second = fill(place / "second", {f"{i}.bin": os.urandom(MIB) for i in range(7)})

    ran = ckpt_process("push", second, f"{store}/gsm8k@2").failed(8, "no space left", "hint:")
    assert ran.out == ""
    assert [r["step"] for r in ckpt("list", store, "--json").ok().json] == [1]
    assert contents(directory_of(store, index=0)) == before
    ckpt("verify", store, "--deep").ok()
    free = os.statvfs(small)
    assert free.f_bavail * free.f_bsize > 4 * MIB, "what was half there still fills the disk"

    (second / "6.bin").unlink()
    for i in range(2, 6):
        (second / f"{i}.bin").unlink()
    ckpt("push", second, f"{store}/gsm8k@2").ok()
    ckpt("verify", store, "--deep").ok()


def test_room_made_by_delete_and_gc_is_enough(place: Path, small: Path) -> None:
    store = small / "store"
    for step in (1, 2):
        source = fill(place / f"in{step}", {"a.bin": os.urandom(3 * MIB)})
        ckpt("push", source, f"{store}/gsm8k@{step}").ok()
    third = fill(place / "in3", {"a.bin": os.urandom(3 * MIB)})
    ckpt("push", third, f"{store}/gsm8k@3").failed(8, "no space left")
    ckpt("delete", f"{store}/gsm8k@1", "--grace", "0").ok()
    ckpt("gc", store).ok()
    ckpt("push", third, f"{store}/gsm8k@3").ok()
    assert [r["step"] for r in ckpt("list", store, "--json").json] == [2, 3]
    ckpt("verify", store, "--deep").ok()


@pytest.mark.parametrize("leave", [0, 4096, 8192, 16384, 24576, 40960, 65536])
def test_wherever_the_disk_fills_up_a_push_is_whole_or_absent(
    place: Path, small: Path, leave: int
) -> None:
    store = small / "store"
    ckpt("push", fill(place / "first", {"a.bin": b"a" * 9000}), f"{store}/gsm8k@1").ok()
    filler = _fill_up(small, leave)
    second = fill(place / "second", {"a.bin": b"a" * 9000, "b.bin": b"b" * 9000, "c/d": b"d"})
    ran = ckpt("push", second, f"{store}/gsm8k@2")
    steps = [r["step"] for r in ckpt("list", store, "--json").ok().json]
    if ran.code == 0:
        assert steps == [1, 2]
    else:
        ran.failed(8, "no space left")
        assert steps == [1]
    filler.unlink()
    ckpt("push", second, f"{store}/gsm8k@2").ok()
    ckpt("verify", store, "--deep").ok()


def test_reading_on_a_full_disk(place: Path, small: Path) -> None:
    store = small / "store"
    source = fill(place / "first", {"a.bin": b"a" * 9000})
    ckpt("push", source, f"{store}/gsm8k@1").ok()
    ckpt("push", source, f"{store}/gsm8k@2").ok()
    filler = _fill_up(small)
    ckpt("list", store).ok()
    ckpt("list", store, "--all").ok()
    ckpt("show", f"{store}/gsm8k@1").ok()
    ckpt("pull", f"{store}/gsm8k@1", place / "restored").ok()
    assert contents(place / "restored") == contents(source)
    ckpt("verify", store).ok()
    ckpt("verify", store, "--deep").ok()
    assert "takes gsm8k@2" in ckpt("resume-info", f"{store}/gsm8k@latest").ok().out
    overwrite(directory_of(store) / "a.bin", b"")
    ckpt("verify", store).failed(5, "a.bin: size is 0, must be 9000")
    ckpt("pull", f"{store}/gsm8k@2", place / "again").failed(5, "is damaged")
    assert "takes gsm8k@1" in ckpt("resume-info", f"{store}/gsm8k@latest").ok().out
    filler.unlink()


def test_a_pull_onto_a_full_disk(place: Path, small: Path) -> None:
    source = fill(place / "in", {f"{i}.bin": os.urandom(3 * MIB) for i in range(4)})
    ckpt("push", source, f"{place}/store/gsm8k@1").ok()
    dest = small / "restored"
    ckpt("pull", f"{place}/store/gsm8k@1", dest).failed(8, "no space left")
    assert [p for p in contents(dest) if not p.startswith(".ckpt-pull-")] == []
    ckpt("verify", f"{place}/store", "--deep").ok()
    subprocess.run(["mount", "-o", "remount,size=32m", str(small)], check=True, timeout=30)
    ckpt("pull", f"{place}/store/gsm8k@1", dest).ok()
    assert contents(dest) == contents(source)


def _free(small: Path) -> int:
    found = os.statvfs(small)
    return found.f_bavail * found.f_frsize


def test_what_retention_left_in_the_trash_makes_room_for_a_push(place: Path, small: Path) -> None:
    store = small / "store"
    for step in (1, 2, 3):
        source = fill(place / f"in{step}", {"a.bin": os.urandom(2 * MIB)})
        ckpt("push", source, f"{store}/gsm8k@{step}").ok()
    ckpt("prune", store, "gsm8k", "--keep-last", "1", "--grace", "1d").ok()
    assert _free(small) < 3 * MIB, "the grace period keeps the files"
    fourth = fill(place / "in4", {"a.bin": os.urandom(3 * MIB)})
    ckpt("push", fourth, f"{store}/gsm8k@4").ok()
    assert [r["step"] for r in ckpt("list", store, "--json").json] == [3, 4]
    ckpt("undelete", f"{store}/gsm8k@1").failed(4)
    ckpt("undelete", f"{store}/gsm8k@2").ok()
    ckpt("verify", store, "--deep").ok()


def test_a_push_that_cannot_fit_writes_nothing(place: Path, small: Path) -> None:
    store = small / "store"
    ckpt("push", fill(place / "first", {"a.bin": b"a" * 9000}), f"{store}/gsm8k@1").ok()
    before = contents(store)
    large = fill(place / "large", {"a.bin": os.urandom(9 * MIB)})
    ckpt("push", large, f"{store}/gsm8k@2").failed(8, "no space left", "are to be stored", "prune")
    after = contents(store)
    assert {k for k in after if k.endswith("/a.bin")} == {k for k in before if k.endswith("/a.bin")}
    assert sum(map(len, after.values())) - sum(map(len, before.values())) < 10_000
