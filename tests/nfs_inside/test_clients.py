"""Two clients of one server use one store."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ckptstore
from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.backends.local import LocalBackend
from ckptstore.backends.nfs import NfsBackend, NfsReader
from ckptstore.errors import NoSpaceError, SupersededError, TemporaryError
from ckptstore.ids import random_letters
from ckptstore.maintenance import gc, verify
from ckptstore.saveoptions import SaveOptions
from ckptstore.testing.kills import Countdown, run_in_child
from ckptstore.uri import StoreURI
from tests.conftest import FULL
from tests.crash.helpers import check_clean, check_pull, check_store, collect, make_tree
from tests.nfs_inside.support import MOUNTS

RUN = "r"
ONE = SaveOptions(threads=1, keep_partial=True)


class Clients:
    """One directory of the server, as its two clients see it."""

    def __init__(self, version: str) -> None:
        name = random_letters()
        self.version = version
        self.a = MOUNTS / version / "a" / name
        self.b = MOUNTS / version / "b" / name


@pytest.fixture(params=["v3", "v4"])
def clients(request: pytest.FixtureRequest) -> Clients:
    return Clients(request.param)


def backend(path: Path) -> Backend:
    return open_backend(StoreURI.parse(str(path)))


def test_the_mounts_are_known_as_nfs(clients: Clients, tmp_path: Path) -> None:
    assert type(backend(clients.a / "not/made/yet")) is NfsBackend
    assert type(backend(tmp_path)) is LocalBackend


def test_a_push_on_one_client_shows_at_once_to_a_process_that_lists_on_the_other(
    clients: Clients, tmp_path: Path
) -> None:
    """Also when it comes within the same tick of the server's clock as what was listed before."""
    theirs, ours = ckptstore.open_store(str(clients.a)), ckptstore.open_store(str(clients.b))
    assert not ours.exists
    tree = make_tree(tmp_path / "t", 1, {"w.bin": 1000, "sub/x": 10})
    pushed = []
    for step in range(1, 31 if FULL else 6):
        (tree / "w.bin").write_bytes(os.urandom(1000))
        pushed.append(theirs.push(tree, RUN, step, ONE).checkpoint.name)
        assert [c.name for c in ours.list(RUN)] == pushed
        latest = ours.latest(RUN)
        assert latest is not None
        assert latest.name == pushed[-1]
        assert latest.read_bytes("w.bin") == (tree / "w.bin").read_bytes()
        assert not verify(latest, deep=True).damage
    theirs.delete(theirs.get(RUN, step=1))
    assert ours.list(RUN)[0].step == 2


def test_the_command_on_one_client_and_a_pull_onto_nfs_on_the_other(
    clients: Clients, tmp_path: Path
) -> None:
    ours = ckptstore.open_store(str(clients.b / "store"))
    assert not ours.exists
    tree = make_tree(tmp_path / "tree", 2)
    (tree / ".nfs0000000000a1b2c300000001").write_bytes(b"removed while it was open")
    ckpt = str(Path(sys.executable).parent / "ckpt")
    command = [ckpt, "push", str(tree), f"{clients.a}/store/{RUN}@7", "--quiet"]
    subprocess.run(command, check=True)
    assert [row.ref for row in ours.rows()] == [f"{RUN}@7"]
    (tree / ".nfs0000000000a1b2c300000001").unlink()
    check_pull(ours, RUN, 7, tree, clients.b / "pulled")
    # And from NFS into the store, what the other client has just changed there.
    source = make_tree(clients.a / "out", 3)
    pushed = ours.push(clients.b / "out", RUN, 8, ONE)
    (source / "cfg.json").write_bytes(b"[]")
    assert ours.push(clients.b / "out", RUN, 8, ONE).created
    assert ours.get(RUN, step=8).read_bytes("cfg.json") == b"[]"
    assert pushed.created


def test_one_of_sixteen_creators_on_two_clients_wins(clients: Clients) -> None:
    racers = [backend(root) for root in (clients.a, clients.b)] * 8
    racers[0].put("commits/first", b"")
    barrier = threading.Barrier(16)

    def create(index: int, key: str) -> bool:
        assert racers[index].stat(key) is None  # remembered from now on
        barrier.wait()
        return racers[index].create_exclusive(key, b"%d" % index)

    with ThreadPoolExecutor(16) as pool:
        for turn in range(30 if FULL else 4):
            key = f"commits/{turn}"
            won = list(pool.map(create, range(16), [key] * 16))
            assert won.count(True) == 1, turn
            winner = b"%d" % won.index(True)
            assert racers[0].read(key, 10) == winner == racers[1].read(key, 10)


@pytest.mark.timeout(900)
def test_a_save_killed_on_one_client_is_absent_or_whole_on_the_other(
    clients: Clients, tmp_path: Path
) -> None:
    tree = make_tree(tmp_path / "tree", 1)
    ours = ckptstore.open_store(str(clients.b))
    rng = random.Random(5)
    points = range(0, 80, 4) if FULL else sorted(rng.sample(range(60), 2))
    for step, point in enumerate(points, 1):
        (tree / "cfg.json").write_bytes(b"%d" % step)

        def save(step: int = step, point: int = point) -> None:
            Countdown(point).install()
            ckptstore.open_store(str(clients.a)).push(tree, RUN, step, ONE)

        killed = os.WIFSIGNALED(run_in_child(save))
        refs = check_store(clients.b)
        assert killed or f"{RUN}@{step}" in refs
        result = ours.push(tree, RUN, step, ONE)
        assert result.created is (f"{RUN}@{step}" not in refs)
        check_pull(ours, RUN, step, tree, tmp_path / "pulled")
    collect(clients.b)
    check_clean(clients.b)
    assert len(check_store(clients.a)) == len(points)


def test_a_reader_goes_on_when_its_file_is_replaced_on_the_other_client(clients: Clients) -> None:
    """As `ckpt repair` or a restore from a backup does; the server forgets the old file sometime.

    (A server of version 4 keeps what is open, one of version 3 for some seconds at most: a plain
    read then meets a stale file handle.)
    """
    clients.a.mkdir()
    size = 40 * 1024 * 1024  # more than is read ahead
    data = random.Random(3).randbytes(1024 * 1024) * (size // 1024**2)
    (clients.a / "x").write_bytes(data)
    os.listdir(clients.b)
    reader = backend(clients.b).open_reader("x")
    buffer = bytearray(1000)
    (clients.a / "new").write_bytes(data)
    (clients.a / "new").rename(clients.a / "x")
    offset = size - 1000
    with ThreadPoolExecutor(4) as pool:
        assert (
            list(
                pool.map(
                    lambda i: reader.read_into(offset - i, memoryview(bytearray(1000))), range(8)
                )
            )
            == [1000] * 8
        )
    assert reader.read_into(offset, memoryview(buffer)) == 1000
    assert buffer == data[-1000:]
    reader.close()
    assert isinstance(reader, NfsReader)


def test_a_document_replaced_all_the_time_is_read_whole_on_the_other_client(
    clients: Clients,
) -> None:
    writer, reader = backend(clients.a), backend(clients.b)
    contents = [bytes([65 + i]) * (1000 + 10 * i) for i in range(20)]
    writer.put("leases/x", contents[0])
    ended = threading.Event()

    def write() -> None:
        for content in contents:
            writer.put("leases/x", content)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not ended.is_set():
        assert reader.read("leases/x", 10_000) in contents
        assert len(reader.list("leases")) >= 1
        found = reader.stat("leases/x")
        assert found is not None
    thread.join()
    found = reader.stat("leases/x")
    assert found is not None
    assert found.size == len(contents[-1])


def test_every_change_shows_at_once_however_quickly_they_follow(clients: Clients) -> None:
    """Without a touch the second change in a tick of the server's clock stays unseen."""
    theirs, ours = backend(clients.a), backend(clients.b)
    theirs.put("d/first", b"")

    def seen() -> set[str]:
        return {e.key for e in ours.list("", recursive=True)}

    there = {"d/first"}
    assert seen() == there
    for turn in range(40 if FULL else 10):
        theirs.create_exclusive(f"d/created-{turn}", b"x")
        there.add(f"d/created-{turn}")
        assert seen() == there
        theirs.put(f"d/put-{turn}", b"x")
        there.add(f"d/put-{turn}")
        assert seen() == there
        writer = theirs.open_writer(f"d/new-{turn}/written")
        writer.finish(0)
        theirs.sync([f"d/new-{turn}", "d"])
        there.add(f"d/new-{turn}/written")
        assert seen() == there
        theirs.delete([f"d/put-{turn}"])
        there.remove(f"d/put-{turn}")
        assert seen() == there
        assert theirs.remove_if(f"d/created-{turn}", b"x")
        there.remove(f"d/created-{turn}")
        assert seen() == there


def test_a_size_that_a_client_remembers_is_not_believed(clients: Clients) -> None:
    theirs, ours = ckptstore.open_store(str(clients.a)), ckptstore.open_store(str(clients.b))
    with theirs.save(RUN, 1) as save:
        save.add_bytes("x", b"x" * 1000)
    checkpoint = ours.get(RUN, step=1)
    key = checkpoint.key("x")
    with open(clients.a / key, "r+b") as f:
        for _ in range(3):  # someone damages the file, and mends it
            f.truncate(999)
            os.fsync(f.fileno())
            assert ours.catalog.size_now(key, None) == 999
            assert [d.reason for d in checkpoint.quick_check()] == ["size is 999, must be 1000"]
            f.truncate(1000)
            os.fsync(f.fileno())
            assert checkpoint.quick_check() == ()


def test_a_new_life_on_one_client_shuts_out_a_save_on_the_other(clients: Clients) -> None:
    theirs, ours = ckptstore.open_store(str(clients.a)), ckptstore.open_store(str(clients.b))
    for turn in range(1, 16 if FULL else 4):
        life = theirs.begin_life(RUN)
        save = theirs.save(RUN, turn, life=life)
        save.add_bytes("x", b"x")
        newer = ours.begin_life(RUN)
        assert newer == life + 1
        if turn % 2:  # a save of the newer life sees its own
            with ours.save(RUN, turn, life=newer) as fresh:
                fresh.add_bytes("y", b"y")
        with pytest.raises(SupersededError), save:
            pass
        assert [c.files[0].path for c in ours.list(RUN)] == ["y"] * ((turn + 1) // 2)


def test_gc_on_one_client_spares_a_save_that_began_a_moment_ago_on_the_other(
    clients: Clients,
) -> None:
    theirs, ours = ckptstore.open_store(str(clients.a)), ckptstore.open_store(str(clients.b))
    with theirs.save(RUN, 0) as first:
        first.add_bytes("x", b"x")
    for turn in range(1, 12 if FULL else 4):
        gc(ours, grace=0)  # lists all there is
        with theirs.save(RUN, turn) as save:
            gc(ours, grace=0)
            save.add_bytes("x", b"%d" % turn)
            gc(ours, grace=0)
        assert ours.get(RUN, step=turn).read_bytes("x") == b"%d" % turn


@pytest.fixture
def open_file(clients: Clients) -> tuple[str, int]:
    """A store whose first checkpoint has a file that a process of the same host has open."""
    store = ckptstore.open_store(str(clients.a))
    for step in (1, 2):
        with store.save(RUN, step) as save:
            save.add_bytes("d/x", b"%d" % step * 5000)
            save.add_bytes("y", b"y")
    held = store.get(RUN, step=1)
    fd = os.open(f"{held.path}/d/x", os.O_RDONLY)
    return str(held.name), fd


def test_what_a_process_has_open_is_left_for_the_next_gc(
    clients: Clients, open_file: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    name, fd = open_file
    store = ckptstore.open_store(str(clients.a))
    store.delete(store.get(RUN, step=1), grace=0)
    with caplog.at_level(logging.WARNING):
        gc(store, grace=0)
    assert "still open" in caplog.text
    left = [p for p in (clients.a / RUN / name).rglob("*") if p.is_file()]
    assert [p.name[:4] for p in left] == [".nfs"]
    assert store.catalog.backend.list(f"{RUN}/{name}", recursive=True) == []
    assert [row.ref for row in store.rows()] == [f"{RUN}@2"]
    assert os.pread(fd, 5000, 0) == b"1" * 5000
    os.close(fd)
    gc(store, grace=0)
    assert not (clients.a / RUN / name).exists()
    check_clean(clients.a)


def test_a_full_disk_leaves_nothing_visible(tmp_path: Path) -> None:
    root = MOUNTS / "small" / "a" / random_letters()
    store = ckptstore.open_store(str(root))
    store.push(make_tree(tmp_path / "t", 1), RUN, 1, ONE)
    big = make_tree(tmp_path / "big", 2, {"w.bin": 25_000_000})
    with pytest.raises(NoSpaceError):
        store.push(big, RUN, 2, ONE)
    assert check_store(root) == [f"{RUN}@1"]
    collect(root)
    check_clean(root)
    store.push(make_tree(tmp_path / "t2", 3), RUN, 2, ONE)


def test_copies_are_reflinks_where_the_server_has_them_and_links_elsewhere(
    tmp_path: Path,
) -> None:
    for mount, how in (("v3", "link"), ("v4", "link"), ("xfs", "reflink")):
        if not (MOUNTS / mount).exists():
            continue
        client = backend(MOUNTS / mount / "a" / random_letters())
        client.put("d/x", b"content" * 1000)
        assert client.copy("d/x", "e/x") == how
        assert client.read("e/x", 10_000) == b"content" * 1000


def test_without_links_a_creation_is_still_exclusive(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(524, "Unknown error 524")

    monkeypatch.setattr(os, "link", no_link)
    assert backend(clients.a).create_exclusive("commits/x", b"one") is True
    assert backend(clients.b).create_exclusive("commits/x", b"two") is False
    assert backend(clients.b).read("commits/x", 10) == b"one"


def serve(threads: int) -> None:
    """The server, with so many threads; it is away with none."""
    subprocess.run(["rpc.nfsd", "-G", "10", "-L", "10", str(threads)], check=True)


@pytest.fixture
def server_again() -> Iterator[threading.Timer]:
    """To be started when something waits for the server; it is there again in any case."""
    timer = threading.Timer(3, serve, [4])
    yield timer
    timer.cancel()
    serve(4)


@pytest.mark.skipif(not FULL, reason="the other tests wait meanwhile (CKPTSTORE_TEST_FULL=1)")
def test_while_the_server_is_away_a_hard_mount_waits_and_a_soft_one_says_try_again(
    clients: Clients, tmp_path: Path, server_again: threading.Timer
) -> None:
    root = clients.a / "store"
    clients.a.mkdir()
    tree = make_tree(tmp_path / "tree", 1)
    ckptstore.open_store(str(root)).push(tree, RUN, 1, ONE)
    soft = tmp_path / "soft"
    soft.mkdir()
    source, version = ("/mnt/export", "3") if clients.version == "v3" else ("/", "4.2")
    options = f"vers={version},soft,timeo=5,retrans=1,nosharecache,proto=tcp"
    mount = ["mount", "-t", "nfs", "-o", options, f"127.0.0.3:{source}", str(soft)]
    subprocess.run(mount, check=True)
    onlooker = ckptstore.open_store(str(soft / clients.a.name / "store"))
    assert [row.ref for row in onlooker.rows()] == [f"{RUN}@1"]
    checkpoint = onlooker.get(RUN, step=1)
    serve(0)
    with pytest.raises(TemporaryError):
        onlooker.list(RUN)
    with pytest.raises(TemporaryError):
        verify(checkpoint, deep=True)
    server_again.start()
    ckptstore.open_store(str(root)).push(tree, RUN, 2, ONE)  # waits
    assert check_store(clients.b / "store") == [f"{RUN}@1", f"{RUN}@2"]
    assert not verify(checkpoint, deep=True).damage
    subprocess.run(["umount", "-f", "-l", str(soft)], check=True)
