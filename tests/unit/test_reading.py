from __future__ import annotations

import io
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.errors import AccessDeniedError, Damage, IntegrityError, NotFoundError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import RunKeys
from ckptstore.reading import Checkpoint, VerifiedFile
from ckptstore.store import Store
from tests.unit.support import (
    ABC,
    RUN,
    content,
    examples,
    file_store,
    flip,
    memory_store,
    save,
    stored_path,
)

BIG = random.Random(11).randbytes((1 << 20) + 7) * 40
"""A little over two blocks, with nothing that repeats at a block's length."""


@pytest.fixture(scope="module")
def big() -> Checkpoint:
    return save(memory_store(), files={"big": BIG})


@pytest.fixture
def small() -> Checkpoint:
    return save(memory_store())


def test_a_file_is_read_back(small: Checkpoint) -> None:
    assert content(small) == ABC
    with small.open("a.txt") as f:
        assert isinstance(f, io.BufferedReader)
        assert f.read(2) == b"al"
        assert f.read() == b"pha"
        assert f.read() == b""


def test_a_file_that_is_not_there_is_not_found(small: Checkpoint) -> None:
    for path in ("none", "sub", "", "../x", "MANIFEST.json"):
        with pytest.raises(NotFoundError):
            small.open(path)


POSITIONS = st.one_of(
    st.integers(0, len(BIG) + 100),
    st.sampled_from([0, BLOCK_SIZE, 2 * BLOCK_SIZE, len(BIG)]).flatmap(
        lambda edge: st.integers(max(0, edge - 3), edge + 3)
    ),
)


@examples(15)
@given(st.data())
def test_random_seeks_and_reads_give_what_the_same_calls_on_the_bytes_give(
    big: Checkpoint, data: st.DataObject
) -> None:
    ours, theirs = big.open("big"), io.BytesIO(BIG)
    with ours:
        for _ in range(data.draw(st.integers(1, 8))):
            whence = data.draw(st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END]))
            target = data.draw(POSITIONS)
            base = {os.SEEK_SET: 0, os.SEEK_CUR: theirs.tell(), os.SEEK_END: len(BIG)}[whence]
            offset = target - base
            assert ours.seek(offset, whence) == theirs.seek(offset, whence)
            assert ours.tell() == theirs.tell()
            length = data.draw(st.sampled_from([0, 1, 100, BLOCK_SIZE, BLOCK_SIZE + 1]))
            assert ours.read(length) == theirs.read(length)


def test_the_whole_of_a_file_of_several_blocks_is_read_back(big: Checkpoint) -> None:
    assert big.read_bytes("big") == BIG


def test_few_blocks_are_kept_in_memory(big: Checkpoint) -> None:
    with VerifiedFile(big, big.entry("big")) as f:
        buffer = bytearray(10)
        for offset in (0, BLOCK_SIZE, 2 * BLOCK_SIZE, 0, len(BIG) - 10):
            f.seek(offset)
            assert f.readinto(buffer) == 10
            assert buffer == BIG[offset : offset + 10]
            assert len(f._cache) <= 2


def test_the_raw_file_reads_and_seeks_only_where_it_can(small: Checkpoint) -> None:
    with VerifiedFile(small, small.entry("a.txt")) as f:
        assert f.readable()
        assert f.seekable()
        assert not f.writable()
        with pytest.raises(ValueError, match="negative"):
            f.seek(-1)
        f.seek(100)
        assert f.readinto(bytearray(5)) == 0
        assert f.seek(-5, os.SEEK_END) == 0
        assert f.readinto(bytearray(0)) == 0


def test_a_damaged_block_is_never_given_out_and_the_checkpoint_is_marked(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    checkpoint = save(store, files={"big": BIG, "other": b"fine"})
    flip(stored_path(checkpoint, "big"), BLOCK_SIZE + 3)
    with checkpoint.open("big") as f:
        assert f.read(BLOCK_SIZE) == BIG[:BLOCK_SIZE]
        with pytest.raises(IntegrityError) as caught:
            f.read(1)
    assert caught.value.damage == (Damage("big", BLOCK_SIZE, BLOCK_SIZE, "content differs"),)
    assert f"{RUN}@1 is damaged: big, bytes 16777216-33554431" in str(caught.value)
    assert caught.value.hint
    assert checkpoint.state == "damaged"
    assert store.get(RUN, step=1).state == "damaged"
    assert checkpoint.read_bytes("other") == b"fine"


@pytest.mark.parametrize(
    ("data", "reason"), [(b"alph", "ends early"), (b"", "ends early"), (b"alphA", "differs")]
)
def test_a_shortened_or_changed_file_is_an_integrity_error(
    small: Checkpoint, data: bytes, reason: str
) -> None:
    small.catalog.backend.put(small.key("a.txt"), data)
    with pytest.raises(IntegrityError, match=reason):
        small.read_bytes("a.txt")
    assert small.state == "damaged"


def test_a_missing_file_is_an_integrity_error_and_not_a_wrong_path(small: Checkpoint) -> None:
    small.catalog.backend.delete([small.key("a.txt")])
    with pytest.raises(IntegrityError, match="missing"):
        small.read_bytes("a.txt")


def test_a_symbolic_link_in_place_of_a_stored_file_is_not_followed(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    checkpoint = save(store)
    (tmp_path / "evil").write_bytes(b"alpha")
    path = stored_path(checkpoint, "a.txt")
    path.unlink()
    path.symlink_to(tmp_path / "evil")
    with pytest.raises(IntegrityError):
        checkpoint.read_bytes("a.txt")
    assert [d.path for d in checkpoint.quick_check()] == ["a.txt"]


class ReadOnly(MemoryBackend):
    """A store that this user may read and not write."""

    def create_exclusive(self, key: str, data: bytes) -> bool:
        raise AccessDeniedError("read-only")

    def put(self, key: str, data: bytes) -> None:
        raise AccessDeniedError("read-only")


def read_only(store: Store) -> Store:
    assert isinstance(store.backend, MemoryBackend)
    return Store(ReadOnly(store.backend.space))


def test_damage_in_a_store_that_cannot_be_written_is_still_reported_as_damage() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.put(checkpoint.key("a.txt"), b"alphA")
    with pytest.raises(IntegrityError, match=r"a\.txt"):
        read_only(store).get(RUN, step=1).read_bytes("a.txt")


def test_a_store_that_cannot_be_written_is_read() -> None:
    store = memory_store()
    save(store)
    assert content(read_only(store).get(RUN, step=1)) == ABC


def test_a_quick_check_finds_missing_files_and_wrong_sizes_and_no_content(
    small: Checkpoint,
) -> None:
    assert small.quick_check() == ()
    backend = small.catalog.backend
    backend.put(small.key("a.txt"), b"alphA")
    assert small.quick_check() == ()
    backend.put(small.key("a.txt"), b"alph")
    backend.delete([small.key("sub/deep/c")])
    assert small.quick_check() == (
        Damage("a.txt", 0, 0, "size is 4, must be 5"),
        Damage("sub/deep/c", 0, 0, "missing"),
    )


def test_a_quick_check_of_a_checkpoint_without_a_good_manifest_names_the_manifest() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.delete([RunKeys(RUN).manifest(checkpoint.name)])
    (damage,) = store.get(RUN, step=1).quick_check()
    assert damage.path == "MANIFEST.json"


def test_a_listing_during_which_a_directory_vanishes_still_shows_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = file_store(tmp_path)
    store.backend.put("d/gone/a", b"")
    store.backend.put("d/kept/b", b"")
    store.backend.put("d/c", b"")
    scandir = os.scandir

    def racing(path: str) -> object:
        if str(path).endswith("/gone"):
            store.backend.remove_tree("d/gone")
        return scandir(path)

    monkeypatch.setattr("ckptstore.backends.local.os.scandir", racing)
    keys = {e.key for e in store.backend.list("d", recursive=True)}
    assert keys == {"d/kept/b", "d/c"}


def test_what_a_checkpoint_says_of_itself(small: Checkpoint) -> None:
    assert (small.run, small.step, small.seq, small.size) == (RUN, 1, 1, 405)
    assert small.ref == f"{RUN}@1"
    assert str(small.name) in repr(small)
    assert small.path is None
    assert [e.path for e in small.files] == sorted(ABC)


class ReadMachine(RuleBasedStateMachine):
    """A verified file against bytes, with a file small enough for many steps."""

    DATA = bytes(range(256)) * 5

    def __init__(self) -> None:
        super().__init__()
        checkpoint = save(Store(MemoryBackend(Space())), files={"f": self.DATA})
        self.ours = checkpoint.open("f")
        self.theirs = io.BytesIO(self.DATA)

    @initialize()
    def begin(self) -> None:
        assert self.ours.tell() == 0

    @rule(n=st.integers(-1, 2000))
    def read(self, n: int) -> None:
        assert self.ours.read(n) == self.theirs.read(n)

    @rule(n=st.integers(0, 600))
    def read_into(self, n: int) -> None:
        a, b = bytearray(n), bytearray(n)
        assert self.ours.readinto(a) == self.theirs.readinto(b)
        assert a == b

    @rule(to=st.integers(0, 2000))
    def seek(self, to: int) -> None:
        assert self.ours.seek(to) == self.theirs.seek(to)

    @rule()
    def readline(self) -> None:
        assert self.ours.readline() == self.theirs.readline()

    @invariant()
    def at_the_same_place(self) -> None:
        assert self.ours.tell() == self.theirs.tell()

    def teardown(self) -> None:
        self.ours.close()


TestReadMachine = ReadMachine.TestCase
TestReadMachine.settings = examples(30)


# Symbolic links in the place of what was stored


def test_a_stored_file_replaced_by_a_symbolic_link_is_marked_damaged(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    path = stored_path(save(store), "a.txt")
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    checkpoint = store.get(RUN, step=1)
    with checkpoint.open("a.txt") as f, pytest.raises(IntegrityError, match=r"a\.txt.*symbolic"):
        f.read()
    assert checkpoint.state == "damaged"
    assert store.get(RUN, step=1).standing.damage[0].path == "a.txt"


@pytest.mark.parametrize("place", ["sub", "sub/deep", ""])
def test_a_directory_of_a_checkpoint_replaced_by_a_symbolic_link_is_damage_and_not_read(
    place: str, tmp_path: Path
) -> None:
    store = file_store(tmp_path / "store")
    checkpoint = save(store, files={"sub/deep/c": b"deep"})
    directory = Path(checkpoint.path or "", place)
    target = tmp_path / "outside"
    directory.rename(target)
    directory.symlink_to(target)
    before = sorted(target.rglob("*"))
    assert checkpoint.quick_check()
    again = store.get(RUN, step=1)
    with pytest.raises(IntegrityError, match="symbolic link"):
        again.read_bytes("sub/deep/c")
    assert store.get(RUN, step=1).quick_check()
    assert sorted(target.rglob("*")) == before


def test_a_run_that_is_a_symbolic_link_is_not_read(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    checkpoint = save(store)
    run = tmp_path / "store" / RUN
    run.rename(tmp_path / "outside")
    run.symlink_to(tmp_path / "outside")
    assert store.runs() == []
    with pytest.raises(IntegrityError, match="symbolic link"):
        checkpoint.read_bytes("a.txt")
    with pytest.raises(IntegrityError, match="symbolic link"):
        store.get(RUN, name=str(checkpoint.name))
