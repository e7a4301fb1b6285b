"""Resumes, retention and restores that went wrong for others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptstore.errors import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    TemporaryError,
)
from ckptstore.leases import STALE_SECONDS
from ckptstore.maintenance import gc, verify
from ckptstore.pulling import pull
from ckptstore.records import BestRule
from ckptstore.resume import plan_resume
from ckptstore.store import open_store
from ckptstore.uri import parse_ref
from tests.field_reports.support import (
    RUN,
    Faulty,
    ckpt,
    contents,
    fill,
    place_of,
    record_path,
    save,
    start,
    steps,
    stored,
)

FILES = {"model.bin": b"weights" * 1000, "optimizer.bin": b"momentum" * 1000}


@pytest.mark.parametrize("hint", ["missing", "old", "broken", "a directory"])
def test_resume_takes_the_newest_commit_whatever_the_tracker_says(
    tmp_path: Path, hint: str
) -> None:
    """verl 7952: the tracker file was never written, so the run started over and overwrote."""
    root = tmp_path / "store"
    store = open_store(str(root))
    first = save(store, 1, FILES)
    save(store, 2, FILES)
    latest = root / RUN / "latest"
    latest.unlink()
    if hint == "old":
        latest.symlink_to(str(first.name))
    elif hint == "broken":
        latest.write_bytes(b"\xff nonsense")
    elif hint == "a directory":
        latest.mkdir()
    assert plan_resume(open_store(str(root)), RUN).require().step == 2
    save(open_store(str(root)), 3, FILES)
    assert plan_resume(open_store(str(root)), RUN).require().step == 3
    assert steps(root) == [1, 2, 3]


@pytest.mark.parametrize("damage", ["records", "manifests", "files", "directories"])
def test_commits_of_which_none_is_usable_are_not_a_fresh_start(tmp_path: Path, damage: str) -> None:
    """verl 7952, the other half: there is something, so step 0 is the wrong answer."""
    root = tmp_path / "store"
    store = open_store(str(root))
    for step in (1, 2):
        checkpoint = save(store, step, FILES)
        if damage == "records":
            stored(record_path(root, checkpoint.name), b"")
        elif damage == "manifests":
            stored(place_of(checkpoint) / "MANIFEST.json", b"{}")
        elif damage == "files":
            stored(place_of(checkpoint) / "model.bin", b"")
        else:
            shutil.rmtree(place_of(checkpoint))
    plan = plan_resume(open_store(str(root)), RUN)
    assert (plan.chosen, plan.commits) == (None, 2)
    with pytest.raises(IntegrityError, match="none is intact"):
        plan.require()
    code, _, err = ckpt("resume-info", f"{root}/{RUN}@latest")
    assert (code, "none is intact" in err) == (5, True)


def test_the_best_is_remembered_over_a_restart(tmp_path: Path) -> None:
    """OpenRLHF 1333: the best metric was forgotten, and a worse evaluation deleted the best."""
    root = str(tmp_path / "store")
    rule = BestRule(metric="reward", mode="max")
    with open_store(root).save(RUN, 1, metrics={"reward": 0.9}, best=rule) as under_way:
        under_way.add_bytes("model.bin", b"the best")
    for step in (2, 3):  # a restarted trainer, which was not told the rule again
        with open_store(root).save(RUN, step, metrics={"reward": 0.1}) as under_way:
            under_way.add_bytes("model.bin", b"worse")
    store = open_store(root)
    best = store.resolve(parse_ref(f"{RUN}@best"))
    assert (best.step, best.metrics) == (1, {"reward": 0.9})
    with pytest.raises(ConflictError, match="best"):
        store.delete(best)
    store.delete(store.get(RUN, step=2), grace=0.0)
    gc(store, grace=0.0)
    assert open_store(root).resolve(parse_ref(f"{RUN}@best")).read_bytes("model.bin") == b"the best"


def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    """OpenRLHF 1333, the same kind: one diverged evaluation must not become the best."""
    store = open_store(str(tmp_path / "store"))
    rule = BestRule(metric="loss", mode="min")
    for step, loss in ((1, 0.5), (2, float("nan")), (3, float("-inf")), (4, 0.7)):
        with store.save(RUN, step, metrics={"loss": loss}, best=rule) as under_way:
            under_way.add_bytes("model.bin", str(step).encode())
    assert store.resolve(parse_ref(f"{RUN}@best")).step == 1


def test_deleting_in_a_run_touches_no_other_run(tmp_path: Path) -> None:
    """Lightning 21813: keeping the last few deleted the file of the run it had resumed from."""
    root = tmp_path / "store"
    store = open_store(str(root))
    source = fill(tmp_path / "in", FILES)
    store.push(source, "first", 1)
    store.push(source, "second", 1)  # resumed from first, the same step and content
    store.push(source, "second", 2)
    before = contents(root / "first")
    store.delete(store.get("second", step=1), grace=0.0)
    store.delete(store.get("second", step=2), grace=0.0, force=True)
    gc(store, "second", grace=0.0)
    gc(store, grace=0.0)
    assert contents(root / "first") == before
    assert verify(store.get("first", step=1), deep=True).ok
    assert steps(root, "second") == []


def test_a_step_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """torchtitan 1311: asked for a missing step, it trained from random weights."""
    root = tmp_path / "store"
    store = open_store(str(root))
    save(store, 100, FILES)
    with pytest.raises(NotFoundError, match="no step 101"):
        store.get(RUN, step=101)
    with pytest.raises(NotFoundError):
        store.resolve(parse_ref(f"{RUN}@nosuchtag"))
    with pytest.raises(NotFoundError):
        plan_resume(store, "gsm8")
    for command in (["show"], ["resume-info"], ["pull"], ["verify"]):
        more = [str(tmp_path / "restored")] if command == ["pull"] else []
        code, out, err = ckpt(*command, f"{root}/{RUN}@101", *more)
        assert (code, out) == (4, "")
        assert "no step 101" in err


def test_a_shard_that_is_eight_bytes_short(tmp_path: Path) -> None:
    """Lightning 688: a truncated file, and "unexpected EOF" at load."""
    root = tmp_path / "store"
    store = open_store(str(root))
    save(store, 1, FILES)
    newest = save(store, 2, FILES)
    stored(place_of(newest) / "optimizer.bin", FILES["optimizer.bin"][:-8])
    for deep in (False, True):
        result = verify(store.get(RUN, step=2), deep=deep)
        (damage,) = result.damage
        assert damage.path == "optimizer.bin"
        whole = damage.length == 0
        assert whole or damage.offset <= 7992 < damage.offset + damage.length
        assert "7992" in damage.reason or not whole
    with pytest.raises(IntegrityError, match=r"optimizer\.bin"):
        store.get(RUN, step=2).read_bytes("optimizer.bin")
    with pytest.raises(IntegrityError, match=r"optimizer\.bin"):
        pull(store.get(RUN, step=2), tmp_path / "restored")
    assert contents(tmp_path / "restored") == {}
    plan = plan_resume(open_store(str(root)), RUN)
    assert plan.require().step == 1
    assert "optimizer.bin" in plan.passed_over[0].reason


def test_directories_without_a_record_are_never_counted_or_resumed(tmp_path: Path) -> None:
    """torchtitan 315, 4197: directories without metadata counted as checkpoints that are kept."""
    root = tmp_path / "store"
    store = open_store(str(root))
    done = save(store, 1, FILES)
    under_way = store.save(RUN, 2)
    under_way.add_bytes("model.bin", FILES["model.bin"])
    torn = root / RUN / "00009-step-00000009-abcdefgh"
    shutil.copytree(place_of(done), torn)  # even with a manifest
    assert steps(root) == [1]
    assert [c.step for c in store.list(RUN)] == [1]
    assert [row.state for row in store.rows(RUN, everything=True)] == [
        "ok",
        "unfinished",
        "unfinished",
    ]
    assert plan_resume(store, RUN).require().step == 1
    latest = store.latest(RUN)
    assert latest is not None
    assert latest.step == 1
    with pytest.raises(ConflictError, match="newest"):
        store.delete(done)
    result = gc(store, grace=0.0)
    assert [a.key for a in result.removed] == [f"{RUN}/{torn.name}"]
    under_way.add_bytes("optimizer.bin", FILES["optimizer.bin"])  # a living save is never collected
    under_way.commit()
    assert steps(root) == [1, 2]
    assert verify(store.get(RUN, step=2), deep=True).ok


@pytest.mark.parametrize("emptied", ["a shard", "all files", "and the manifest", "and the record"])
def test_files_emptied_after_the_fact(tmp_path: Path, emptied: str) -> None:
    """metaseq 53, diffusion-pipe 159: shards of 0 bytes, with good names."""
    root = tmp_path / "store"
    store = open_store(str(root))
    save(store, 1, FILES)
    newest = save(store, 2, FILES)
    directory = place_of(newest)
    names = ["model.bin"] if emptied == "a shard" else list(FILES)
    if emptied in ("and the manifest", "and the record"):
        names.append("MANIFEST.json")
    for name in names:
        stored(directory / name, b"")
    if emptied == "and the record":
        stored(record_path(root, newest.name), b"")
    fresh = open_store(str(root))
    plan = plan_resume(fresh, RUN)
    assert plan.require().step == 1
    assert [p.name for p in plan.passed_over] == [newest.name]
    code, _, err = ckpt("verify", root)
    assert code == 5
    assert "is damaged" in err
    assert [row.state for row in open_store(str(root)).rows(RUN)] == ["ok", "damaged"]
    with pytest.raises(IntegrityError):
        open_store(str(root)).get(RUN, step=2).read_bytes("model.bin")


AWKWARD = (
    "a[1].pt",
    "a1.pt",
    "q?x",
    "qax",
    "st*",
    "star",
    "{a,b}",
    "[!a]",
    "~",
    "$HOME",
    "%41",
    "-rf",
)


def test_names_that_look_like_patterns(tmp_path: Path) -> None:
    """filesystem_spec 838 and its kin: such names were taken as patterns, and a sibling deleted."""
    files = {name: name.encode() for name in AWKWARD} | {"d[0]/w*.bin": b"1", "d0/ww.bin": b"2"}
    source = fill(tmp_path / "in[0]*", files)
    root = tmp_path / "sto[r]e*"
    fill(tmp_path, {"store/innocent": b"1", "stor/innocent": b"2"})
    store = open_store(str(root))
    store.push(source, RUN, 1)
    second = store.push(source, RUN, 2).checkpoint
    assert verify(second, deep=True).ok
    pull(second, tmp_path / "ba[c]k")
    assert contents(tmp_path / "ba[c]k") == files
    assert second.read_bytes("a[1].pt") == b"a[1].pt"
    assert ckpt("diff", f"{root}/{RUN}@2", source)[0] == 0
    store.delete(store.get(RUN, step=1), grace=0.0)
    gc(store, grace=0.0)
    assert verify(second, deep=True).ok
    assert contents(source) == files
    assert (tmp_path / "store" / "innocent").exists()
    assert (tmp_path / "stor" / "innocent").exists()


@pytest.mark.parametrize("name", ["a[1].pt", "q?x", "st*", "[!a]"])
def test_a_name_that_looks_like_a_pattern_can_be_asked_for(tmp_path: Path, name: str) -> None:
    """filesystem_spec 838, the same kind: the exact name of a file must find that file."""
    source = fill(tmp_path / "in", {n: n.encode() for n in AWKWARD})
    checkpoint = open_store(str(tmp_path / "store")).push(source, RUN, 1).checkpoint
    pull(checkpoint, tmp_path / "with", include=[name])
    assert (tmp_path / "with" / name).read_bytes() == name.encode()
    pull(checkpoint, tmp_path / "without", exclude=[name])
    assert not (tmp_path / "without" / name).exists()


def test_a_pull_that_is_killed_leaves_nothing_under_final_names(tmp_path: Path) -> None:
    """s3fs get: an interrupted download left a truncated file under its final name."""
    source = fill(tmp_path / "in", {f"{i:03}.bin": os.urandom(100_000) for i in range(300)})
    root = tmp_path / "store"
    open_store(str(root)).push(source, RUN, 1)
    for attempt, enough in enumerate((1, 40, 200)):
        dest = tmp_path / f"restored-{attempt}"
        process = start("pull", f"{root}/{RUN}@1", dest)
        while process.poll() is None and len(list(dest.glob(".ckpt-pull-*/files/*"))) < enough:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        for path, data in contents(dest).items():
            if not path.startswith(".ckpt-pull-"):
                assert data == (source / path).read_bytes()
        assert ckpt("pull", f"{root}/{RUN}@1", dest)[0] == 0
        assert contents(dest) == contents(source)
        assert not list(dest.glob(".ckpt-*"))


def test_what_a_dead_process_left_stops_nothing(tmp_path: Path) -> None:
    """restic 1450 and its kin: a stale lock stopped every later job for weeks.

    A lease is no lock: all goes on beside it, and it ends by itself.
    """
    root = tmp_path / "store"
    store = open_store(str(root))
    save(store, 1, FILES)
    script = (
        "import os, ckptstore\n"
        f"save = ckptstore.open_store({str(root)!r}).save(run='gsm8k', step=2)\n"
        "save.add_bytes('model.bin', b'half')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    leases = list((root / RUN / "leases").iterdir())
    assert len(leases) == 1
    source = fill(tmp_path / "in", FILES)
    assert store.push(source, RUN, 3).created
    store.delete(store.get(RUN, step=1), grace=0.0)
    pull(store.get(RUN, step=3), tmp_path / "restored")
    assert not [a for a in gc(store).removed if "step-00000002" in a.key]  # within its grace
    long_ago = time.time() - STALE_SECONDS - 1
    os.utime(leases[0], (long_ago, long_ago))
    gc(store, grace=0.0)
    assert list((root / RUN / "leases").iterdir()) == []
    assert not list((root / RUN).glob("*-step-00000002-*"))
    assert steps(root) == [3]


def test_a_lease_of_another_host_ends_by_itself(tmp_path: Path) -> None:
    """restic 1450, the same kind: nobody can ask whether a process of another host still lives."""
    root = tmp_path / "store"
    store = open_store(str(root))
    under_way = store.save(RUN, 1)  # it lives, but it looks asleep: no heartbeat for half an hour
    under_way.add_bytes("model.bin", FILES["model.bin"])
    lease = next((root / RUN / "leases").iterdir())
    assert gc(store, grace=0.0, force=True).removed == ()
    long_ago = time.time() - STALE_SECONDS - 1
    os.utime(lease, (long_ago, long_ago))
    gc(store, grace=0.0, force=True)
    with pytest.raises(ConflictError):  # the sleeper wakes: it can never commit what has gone
        under_way.commit()
    assert steps(root) == []


def test_a_path_that_does_not_exist_is_exit_4(tmp_path: Path) -> None:
    """rclone 431: exit 0 for a path that does not exist."""
    root = tmp_path / "store"
    save(open_store(str(root)), 1, FILES)
    nope = tmp_path / "nope"
    for command in (
        ["list", nope],
        ["list", root, "nope"],
        ["verify", nope],
        ["verify", f"{root}/{RUN}@2"],
        ["show", f"{nope}/{RUN}@1"],
        ["pull", f"{nope}/{RUN}@1", tmp_path / "restored"],
        ["push", nope, f"{root}/{RUN}@2"],
        ["diff", f"{root}/{RUN}@1", nope],
        ["delete", f"{root}/{RUN}@2"],
        ["gc", nope],
        ["gc", root, "nope"],
        ["resume-info", f"{root}/nope@latest"],
    ):
        code, out, err = ckpt(*command)
        assert (code, out) == (4, ""), (command, out, err)
        assert err.startswith("error: ")
    assert not nope.exists()


def test_storage_that_cannot_be_reached_is_never_an_empty_store(tmp_path: Path) -> None:
    """verl 289, arrow 3123: a connection that failed was read as "does not exist"."""
    root = tmp_path / "store"
    save(open_store(str(root)), 1, FILES)

    class Away(Faulty):
        away = False

        def read(self, key: str, limit: int) -> bytes:
            if self.away:
                raise TemporaryError("the host does not answer")
            return super().read(key, limit)

    backend = Away(str(root))
    store = backend.store()
    backend.away = True
    for ask in (
        lambda: store.latest(RUN),
        lambda: store.get(RUN, step=1),
        lambda: store.list(RUN),
        lambda: plan_resume(store, RUN),
        backend.store,
        lambda: gc(store, grace=0.0),
    ):
        with pytest.raises(TemporaryError):
            ask()
    assert steps(root) == [1]


def test_a_disk_that_was_unmounted_is_not_an_empty_store(tmp_path: Path) -> None:
    """verl 289, the same kind: an empty mount point looks like a store without any run."""
    root = tmp_path / "store"
    store = open_store(str(root))
    save(store, 1, FILES)
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    for ask in (
        lambda: store.latest(RUN),
        lambda: store.list(RUN),
        store.runs,
        lambda: plan_resume(store, RUN),
    ):
        with pytest.raises(NotFoundError, match="has gone"):
            ask()


def test_a_store_that_is_open_for_long_sees_what_others_do(tmp_path: Path) -> None:
    """s3fs 851, 879: a stale listing hid another client's new key."""
    root = tmp_path / "store"
    here = open_store(str(root))
    save(here, 1, FILES)
    assert [row.step for row in here.rows()] == [1]
    source = fill(tmp_path / "in", FILES)
    assert ckpt("push", source, f"{root}/{RUN}@2")[0] == 0
    assert [row.step for row in here.rows()] == [1, 2]
    assert ckpt("delete", f"{root}/{RUN}@1", "--grace", "0")[0] == 0
    assert [row.step for row in here.rows()] == [2]
    assert ckpt("pin", f"{root}/{RUN}@2")[0] == 0
    with pytest.raises(ConflictError, match="pinned"):
        here.delete(here.get(RUN, step=2), force=True)
