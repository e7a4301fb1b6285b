"""Saves that went wrong for others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends.base import Writer
from ckptstore.errors import (
    CkptError,
    NoSpaceError,
    NotFoundError,
    SourceChangedError,
    TemporaryError,
    UsageError,
    VoidedError,
)
from ckptstore.maintenance import gc, verify
from ckptstore.resume import plan_resume
from ckptstore.saveoptions import SaveOptions
from ckptstore.scanning import scan
from ckptstore.store import open_store
from tests.field_reports.support import (
    RUN,
    Faulty,
    ckpt,
    contents,
    fill,
    place_of,
    save,
    start,
    steps,
)


def test_a_failed_save_deletes_nothing_that_was_there(tmp_path: Path) -> None:
    """verl 4873: with one checkpoint kept, the old one went before the new one was whole.

    When the disk was full none was left. Here the new one fails alone.
    """

    class Full(Faulty):
        def open_writer(
            self, key: str, *, size: int | None = None, executable: bool = False, **more: bool
        ) -> Writer:
            if "-step-00000002-" in key and "b.bin" in key:
                raise NoSpaceError("no space left: it is full")
            return super().open_writer(key, size=size, executable=executable, **more)

    store = Full(str(tmp_path / "store")).store()
    old = save(store, 1, {"a.bin": b"a" * 1000, "b.bin": b"b" * 1000})
    before = contents(place_of(old))
    source = fill(tmp_path / "in", {"a.bin": b"x" * 1000, "b.bin": b"y" * 1000})
    with pytest.raises(NoSpaceError):
        save(store, 2, {"a.bin": b"x", "b.bin": b"y"})
    with pytest.raises(NoSpaceError):
        store.push(source, RUN, 2)
    assert steps(tmp_path / "store") == [1]
    assert contents(place_of(old)) == before
    assert verify(store.get(RUN, step=1), deep=True).ok
    gc(store, grace=0.0)
    assert plan_resume(store, RUN).require().step == 1


def test_a_save_that_is_not_committed_at_exit_leaves_nothing_to_mistake(tmp_path: Path) -> None:
    """verl 4237: an asynchronous save was never queued, and nobody noticed.

    Without a commit there is no checkpoint, whatever files were written before the exit.
    """
    root = tmp_path / "store"
    script = (
        "import ckptstore\n"
        f"save = ckptstore.open_store({str(root)!r}).save(run='gsm8k', step=7)\n"
        "save.add_bytes('model.bin', b'weights')\n"
        "file = save.open('optimizer.bin')\n"
        "file.write(b'momentum')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert steps(root) == []
    rows = open_store(str(root)).rows(RUN, everything=True)
    assert [row.state for row in rows] == ["unfinished"]
    assert not list(root.rglob("optimizer.bin"))
    source = fill(tmp_path / "in", {"model.bin": b"weights", "optimizer.bin": b"momentum"})
    assert open_store(str(root)).push(source, RUN, 7).created
    assert steps(root) == [7]


def test_a_save_with_a_file_still_open_is_an_error(tmp_path: Path) -> None:
    """verl 4237, the same kind: what is unfinished when the save ends is not left out silently."""
    store = open_store(str(tmp_path / "store"))
    under_way = store.save(RUN, 1)
    file = under_way.open("late.bin")
    file.write(b"half")
    with pytest.raises(UsageError, match="still open"):
        under_way.commit()
    under_way.abort()
    assert steps(tmp_path / "store") == []
    file.give_up()


def test_a_kill_leaves_the_checkpoint_absent_or_whole(tmp_path: Path) -> None:
    """transformers 35782: a job was killed while it saved, and the torn directory was resumed.

    A sample of moments; the push is killed for good and then repeated.
    """
    source = fill(tmp_path / "in", {f"{i:03}.bin": os.urandom(20_000) for i in range(60)})
    for delay in (0.0, 0.02, 0.05, 0.08, 0.12):
        root = tmp_path / f"store-{delay}"
        process = start("push", source, f"{root}/{RUN}@1")
        while process.poll() is None and not (root / RUN).is_dir():
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        if steps(root):
            assert verify(open_store(str(root)).get(RUN, step=1), deep=True).ok
        elif (root / RUN).is_dir():
            plan = plan_resume(open_store(str(root)), RUN)
            assert plan.chosen is None
        code, _, err = ckpt("push", source, f"{root}/{RUN}@1")
        assert (code, err) == (0, "")
        assert steps(root) == [1]
        assert verify(open_store(str(root)).get(RUN, step=1), deep=True).ok


def test_everything_is_on_disk_before_the_record_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusion-pipe 159: after a power cut the newest directories were full of empty files.

    So each file's bytes and each directory's names are synced before the record is created.
    """
    synced: list[str] = []
    at_commit: list[set[str]] = []
    real_sync, real_link = os.fsync, os.link

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real_sync(fd)

    def link(source: str, target: str, **how: Any) -> None:
        if source in synced:
            synced.append(target)
        if "/commits/" in target:
            at_commit.append(set(synced))
        real_link(source, target, **how)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store = open_store(str(tmp_path / "store"))
    directory = place_of(save(store, 1, {"a.bin": b"a", "deep/er/b.bin": b"b"}))
    assert len(at_commit) == 1
    needed = {str(directory / p) for p in contents(directory)}
    needed |= {str(directory), str(directory / "deep"), str(directory / "deep/er")}
    needed |= {str(directory.parent), str(directory.parent.parent)}
    assert needed <= at_commit[0]
    assert str(directory.parent / "commits") in synced


def test_four_processes_that_save_one_step(tmp_path: Path) -> None:
    """transformers 27925, 36094: several processes renamed the same directory over each other."""
    root = tmp_path / "store"
    sources = [fill(tmp_path / f"in{i}", {"a.bin": os.urandom(200_000)}) for i in range(4)]
    for seeded, step in (({}, 1), ({"CKPTSTORE_ID_SEED": "the same for all"}, 2)):
        processes = [start("push", s, f"{root}/{RUN}@{step}", env=seeded) for s in sources]
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert "pushed" in out
    store = open_store(str(root))
    checkpoints = store.list(RUN)
    assert [c.step for c in checkpoints] == [1] * 4 + [2] * 4
    assert len({str(c.name) for c in checkpoints}) == 8
    assert all(verify(c, deep=True).ok for c in checkpoints)
    for step in (1, 2):
        found = {c.read_bytes("a.bin") for c in checkpoints if c.step == step}
        assert found == {(s / "a.bin").read_bytes() for s in sources}


def test_pushing_twice_gives_the_same_keys(tmp_path: Path) -> None:
    """s3fs 852, filesystem_spec 997: a second put went one directory deeper."""
    root = tmp_path / "store"
    source = fill(tmp_path / "in", {"a.bin": b"a", "deep/b.bin": b"b"})
    store = open_store(str(root))
    first = store.push(source, RUN, 1)
    before = sorted(contents(root))
    second = store.push(f"{source}/", RUN, 1)
    assert (first.created, second.created) == (True, False)
    assert first.checkpoint.name == second.checkpoint.name
    assert sorted(contents(root)) == before
    third = store.push(source, RUN, 2)
    assert [set(contents(place_of(c))) for c in (first.checkpoint, third.checkpoint)] == [
        {"a.bin", "deep/b.bin", "MANIFEST.json"}
    ] * 2


@pytest.mark.parametrize("k", [0, 1, 100_000, 16 * 1024 * 1024 + 1])
def test_a_writer_that_fails_at_byte_k_publishes_nothing(tmp_path: Path, k: int) -> None:
    """arrow 40502: an exception inside ``with open(…)`` closed and so published half an object."""
    root = tmp_path / "store"
    store = open_store(str(root))

    def write(under_way: Any) -> None:
        with under_way.open("model.bin") as file:
            file.write(bytes(k))
            raise OSError("the source broke")

    with pytest.raises(OSError, match="the source broke"), store.save(RUN, 1) as under_way:
        write(under_way)
    assert steps(root) == []
    assert not [p for p in root.rglob("*") if p.is_file() and p.name == "model.bin"]
    # Also when somebody swallows the exception: the file is not in the checkpoint half.
    try:
        with store.save(RUN, 2) as under_way:
            under_way.add_bytes("other.bin", b"whole")
            with pytest.raises(OSError, match="the source broke"):
                write(under_way)
    except UsageError:
        assert steps(root) == []
    else:
        assert [e.path for e in store.get(RUN, step=2).files] == ["other.bin"]


def test_a_source_that_shrinks_or_vanishes_while_it_is_pushed(tmp_path: Path) -> None:
    """arrow 40502, ray 5261, the same kind: what was read must be one state of all the files."""
    for change in ("shrink", "vanish", "grow", "rewrite"):
        source = fill(tmp_path / change, {"a.bin": b"a" * 1000, "b.bin": b"b" * 1000})
        store = open_store(str(tmp_path / f"store-{change}"))

        def act(_: int, source: Path = source, change: str = change) -> None:
            target = source / "b.bin"
            if change == "vanish":
                target.unlink(missing_ok=True)
            else:
                size = {"shrink": 10, "grow": 2000, "rewrite": 1000}[change]
                target.write_bytes(b"c" * size)

        with pytest.raises(SourceChangedError, match=r"b\.bin"):
            store.push(scan(source), RUN, 1, SaveOptions(threads=1, progress=act))
        assert steps(tmp_path / f"store-{change}") == []


def test_a_file_that_did_not_arrive_stops_the_commit(tmp_path: Path) -> None:
    """ray 5261: after a sync some files were missing, and nothing had said so.

    The storage swears that it wrote the file, and it is not there.
    """

    class Forgetful(Faulty):
        def open_writer(
            self, key: str, *, size: int | None = None, executable: bool = False, **more: bool
        ) -> Writer:
            writer = super().open_writer(key, size=size, executable=executable, **more)
            if key.endswith("/b.bin"):
                path = self._path(key)
                finish = writer.finish

                def forget(size: int) -> None:
                    finish(size)
                    os.unlink(path)

                writer.finish = forget  # type: ignore[method-assign]
            return writer

    store = Forgetful(str(tmp_path / "store")).store()
    source = fill(tmp_path / "in", {"a.bin": b"a" * 1000, "b.bin": b"b" * 1000})
    with pytest.raises(CkptError, match=r"b\.bin"):
        store.push(source, RUN, 1)
    with pytest.raises(CkptError, match=r"b\.bin"):
        save(store, 2, {"a.bin": b"a", "b.bin": b"b"})
    assert steps(tmp_path / "store") == []


@pytest.mark.parametrize("lost", ["reply", "request"])
@pytest.mark.parametrize("read_back", ["at once", "not found once", "fails once"])
def test_a_conditional_write_whose_reply_was_lost(
    tmp_path: Path, lost: str, read_back: str
) -> None:
    """icechunk's design note 17: the write landed, its reply was lost, the retry met itself.

    With s3-connector-for-pytorch 295 and aws-sdk-pandas 2987 on top: the object that was just
    written is not found at first, or the storage is busy.
    """

    class Flaky(Faulty):
        failed = False
        looked = read_back == "at once"

        def create_exclusive(self, key: str, data: bytes) -> bool:
            if "/commits/" not in key or self.failed:
                return super().create_exclusive(key, data)
            self.failed = True
            if lost == "reply":
                super().create_exclusive(key, data)
            raise TemporaryError("timed out")

        def read(self, key: str, limit: int) -> bytes:
            if "/commits/" in key and self.failed and not self.looked:
                self.looked = True
                if read_back == "fails once":
                    raise TemporaryError("busy")
                raise NotFoundError("not yet")
            return super().read(key, limit)

    root = tmp_path / "store"
    store = Flaky(str(root)).store()
    if lost == "reply":
        checkpoint = save(store, 1, {"a.bin": b"a" * 1000})
        assert verify(checkpoint, deep=True).ok
        assert steps(root) == [1]
        return
    with pytest.raises((TemporaryError, VoidedError)):
        save(store, 1, {"a.bin": b"a" * 1000})
    assert steps(root) == []
    save(store, 2, {"a.bin": b"a" * 1000})
    assert steps(root) == [2]


def test_the_store_is_the_same_after_its_creation_was_answered_late(tmp_path: Path) -> None:
    """icechunk's design note 17 again, for the store's own marker."""

    class Late(Faulty):
        def create_exclusive(self, key: str, data: bytes) -> bool:
            created = super().create_exclusive(key, data)
            if key == "CKPTSTORE.json":
                raise TemporaryError("timed out")
            return created

    store = Late(str(tmp_path / "store")).store()
    assert store.create()
    save(store, 1, {"a.bin": b"a"})
    assert steps(tmp_path / "store") == [1]
