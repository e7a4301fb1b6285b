"""The suite that every backend must pass.

A backend's author subclasses :class:`BackendConformance` in a pytest module and says how to make a
backend and how to look at the storage *behind its back*, so the suite cannot agree with itself:

    class TestMine(BackendConformance):
        def make(self) -> Backend: ...
        def raw_write(self, key: str, data: bytes) -> None: ...
        def raw_read(self, key: str) -> bytes | None: ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptstore.backends.base import Backend, Entries
from ckptstore.errors import ConflictError, IntegrityError, NotFoundError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import is_temporary
from ckptstore.testing.writing import WritingConformance

RACERS = 16

NAMES = (
    "plain.bin",
    "with space",
    "a[1].pt",
    "[ab]*",
    "q?x",
    "st*",
    "hash#tag",
    "100%",
    "%2F%41",
    "a+b&c=d;e,f",
    "quote'\"`$(x)",
    "back\\slash",
    "trailing.",
    "..double",
    "-dash",
    "~tilde",
    "a:b",
    "ünïcödé-日本語-🙂",
    "e\u0301",  # decomposed: must not be normalised
    "n" * 200,
    ".hidden",
    "sub/dir/file",
)


class BackendConformance(WritingConformance):
    """What the contract in ``ckptstore.backends.base`` promises, as tests."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """The backend under test."""
        backend = self.make()
        yield backend
        backend.close()

    def names(self) -> list[str]:
        """The names that the backend says it can hold."""
        forbidden = set(self.make().capabilities.forbidden)
        return [name for name in NAMES if not forbidden & set(name)]

    # Reading

    def test_what_is_not_there_is_none_empty_or_not_found(self, backend: Backend) -> None:
        """Three ways to say it, none of them an error of another kind."""
        assert backend.stat("no/such") is None
        assert backend.list("no/such") == []
        assert backend.list("no/such", recursive=True) == []
        with pytest.raises(NotFoundError):
            backend.read("no/such", 10)
        with pytest.raises(NotFoundError):
            backend.open_reader("no/such").read_into(0, memoryview(bytearray(1)))

    def test_an_object_written_behind_its_back_is_seen_at_once(self, backend: Backend) -> None:
        """No listing and no absence is remembered."""
        assert backend.stat("d/x") is None
        assert backend.list("d") == []
        self.raw_write("d/x", b"abc")
        entry = backend.stat("d/x")
        assert entry is not None
        assert (entry.key, entry.size, entry.is_directory) == ("d/x", 3, False)
        assert [e.key for e in backend.list("d")] == ["d/x"]
        assert backend.read("d/x", 3) == b"abc"
        self.raw_write("d/y", b"")
        assert sorted(e.key for e in backend.list("d")) == ["d/x", "d/y"]

    def test_a_read_over_its_limit_reads_nothing(self, backend: Backend) -> None:
        """A document that is far too long is not loaded."""
        self.raw_write("d/x", b"abcd")
        with pytest.raises(IntegrityError):
            backend.read("d/x", 3)

    def test_ranges(self, backend: Backend) -> None:
        """From anywhere, to the end and beyond, from several threads."""
        data = bytes(range(256)) * 40
        self.raw_write("d/x", data)
        reader = backend.open_reader("d/x")
        assert reader.size == len(data)

        def check(offset: int) -> None:
            buffer = bytearray(1000)
            count = reader.read_into(offset, memoryview(buffer))
            assert buffer[:count] == data[offset : offset + 1000]
            assert count == max(0, min(1000, len(data) - offset))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(check, [0, 1, 999, 5000, len(data) - 1000, len(data) - 1, len(data)]))
        reader.close()
        reader.close()

    def test_listing_is_of_one_directory_or_of_all_below(self, backend: Backend) -> None:
        """A sibling whose name begins alike is not below."""
        for key in ("a/1", "a/b/2", "a/b/c/3", "ab/4", "a.5"):
            self.raw_write(key, key.encode())
        assert _shown(backend.list("a")) == {("a/1", False), ("a/b", True)}
        assert _shown(backend.list("")) == {("a", True), ("ab", True), ("a.5", False)}
        deep = backend.list("a", recursive=True)
        assert {(e.key, e.size) for e in deep} == {("a/1", 3), ("a/b/2", 5), ("a/b/c/3", 7)}
        assert {e.key for e in backend.list("", recursive=True)} >= {"ab/4", "a.5", "a/1"}

    # Writing

    def test_names_are_exact(self, backend: Backend) -> None:
        """Every name is written, listed, read, copied and deleted as itself, and no other."""
        names = self.names()
        for name in names:
            _write(backend, f"d/{name}", name.encode())
            self.settle(backend, f"d/{name}")
        left = {f"d/{name}" for name in names}
        assert {e.key for e in backend.list("d", recursive=True)} == left
        for index, name in enumerate(names):
            key = f"d/{name}"
            assert self.raw_read(key) == name.encode()
            assert backend.read(key, 1000) == name.encode()
            entry = backend.stat(key)
            assert entry is not None
            assert entry.size == len(name.encode())
            if backend.copy(key, f"copied/{index}/{name}") is not None:
                self.settle(backend, f"copied/{index}/{name}")
                assert self.raw_read(f"copied/{index}/{name}") == name.encode()
            backend.delete([key])
            left.remove(key)
            assert self.raw_read(key) is None
            assert {e.key for e in backend.list("d", recursive=True)} == left

    @pytest.mark.parametrize("name", NAMES)
    def test_a_name_written_by_another_program_is_found(self, backend: Backend, name: str) -> None:
        """Under the same name."""
        if name not in self.names():
            pytest.skip("the backend says that it cannot hold this name")
        self.raw_write(f"d/{name}", b"theirs")
        assert [e.key for e in backend.list("d", recursive=True)] == [f"d/{name}"]
        assert backend.read(f"d/{name}", 10) == b"theirs"

    @pytest.mark.parametrize("size", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 5])
    @pytest.mark.parametrize("known", [True, False])
    def test_a_written_object_appears_whole_when_it_is_finished(
        self, backend: Backend, size: int, known: bool
    ) -> None:
        """Before ``finish`` there is nothing at the key; after it, everything."""
        data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
        writer = backend.open_writer("deep/down/x", size=size if known else None)
        offsets = list(range(0, size, BLOCK_SIZE))
        if known and backend.capabilities.in_parallel(size):
            offsets.reverse()
        for offset in offsets:
            writer.write(offset, memoryview(data)[offset : offset + BLOCK_SIZE])
            assert self.raw_read("deep/down/x") is None
        writer.finish(size)
        writer.abort()
        self.settle(backend, "deep/down/x")
        assert self.raw_read("deep/down/x") == data
        assert [e.key for e in backend.list("deep", recursive=True)] == ["deep/down/x"]

    def test_an_aborted_object_leaves_nothing(self, backend: Backend) -> None:
        """Not even under another name."""
        writer = backend.open_writer("d/x")
        writer.write(0, memoryview(b"half"))
        writer.abort()
        writer.abort()
        assert backend.list("d", recursive=True) == []

    def test_what_is_incomplete_is_known_by_its_name(self, backend: Backend) -> None:
        """If an object in progress shows at all, gc and readers must know it."""
        writer = backend.open_writer("d/x")
        writer.write(0, memoryview(b"half"))
        assert all(is_temporary(e.key) for e in backend.list("d", recursive=True))
        writer.abort()

    def test_a_writer_never_replaces(self, backend: Backend) -> None:
        """What came first stays as it was."""
        writer = backend.open_writer("d/x")
        writer.write(0, memoryview(b"second"))
        self.raw_write("d/x", b"first")
        with pytest.raises(ConflictError):
            writer.finish(6)
        writer.abort()
        assert self.raw_read("d/x") == b"first"
        assert [e.key for e in backend.list("d", recursive=True)] == ["d/x"]

    def test_zeros_may_be_skipped_and_read_as_zeros(self, backend: Backend) -> None:
        """A hole is data like any other."""
        size = 2 * BLOCK_SIZE + 3
        writer = backend.open_writer("d/x")
        writer.write(0, memoryview(b"a" * BLOCK_SIZE))
        if not writer.skip_zeros(BLOCK_SIZE, BLOCK_SIZE):
            writer.write(BLOCK_SIZE, memoryview(bytes(BLOCK_SIZE)))
        writer.write(2 * BLOCK_SIZE, memoryview(b"end"))
        writer.finish(size)
        self.settle(backend, "d/x")
        assert self.raw_read("d/x") == b"a" * BLOCK_SIZE + bytes(BLOCK_SIZE) + b"end"

    def test_put_replaces_whole(self, backend: Backend) -> None:
        """A reader sees the old content or the new, never a mixture or nothing."""
        contents = [bytes([65 + i]) * (1000 + i) for i in range(20)]
        backend.put("d/lease", contents[0])
        done = threading.Event()
        bad: list[bytes] = []

        def read() -> None:
            while not done.is_set():
                data = backend.read("d/lease", 10_000)
                if data not in contents:
                    bad.append(data)

        reader = threading.Thread(target=read)
        reader.start()
        for content in contents:
            backend.put("d/lease", content)
        done.set()
        reader.join()
        assert not bad
        assert self.raw_read("d/lease") == contents[-1]

    # Exclusive creation

    def test_one_of_many_creators_wins(self, backend: Backend) -> None:
        """Sixteen clients create one key at once, many times over."""
        if not backend.is_exclusive():
            pytest.skip("declared: no exclusive creation")
        clients = [self.make() for _ in range(RACERS)]
        for turn in range(10):
            key = f"commits/{turn}.json"
            won = _race(lambda i, key=key: clients[i].create_exclusive(key, b"%d" % i * 50))  # type: ignore[misc]
            assert won.count(True) == 1
            assert self.raw_read(key) == b"%d" % won.index(True) * 50
        assert len(backend.list("commits")) == 10

    def test_creation_does_not_replace_what_another_program_made(self, backend: Backend) -> None:
        """Also when it was made behind the backend's back a moment ago."""
        if not backend.is_exclusive():
            pytest.skip("declared: no exclusive creation")
        assert backend.list("commits") == []
        self.raw_write("commits/x", b"theirs")
        assert backend.create_exclusive("commits/x", b"ours") is False
        assert self.raw_read("commits/x") == b"theirs"

    def test_one_of_many_claims_a_directory(self, backend: Backend) -> None:
        """Where there are no directories names are unique by chance; elsewhere one claims it."""
        clients = [self.make() for _ in range(RACERS)]
        won = _race(lambda i: clients[i].make_directory("run/dir"))
        assert won.count(True) >= 1
        if backend.stat("run/dir") is not None:
            assert won.count(True) == 1
            assert backend.make_directory("run/dir") is False

    # Conditional removal, deletion, copies

    def test_remove_if_removes_only_what_was_meant(self, backend: Backend) -> None:
        """Another content stays, and so does the absence of one."""
        self.raw_write("commits/x", b"commit")
        assert backend.remove_if("commits/x", b"other") is False
        assert self.raw_read("commits/x") == b"commit"
        assert backend.remove_if("commits/x", b"commi") is False
        assert backend.remove_if("commits/x", b"commit+") is False
        assert backend.remove_if("commits/x", b"commit") is True
        assert self.raw_read("commits/x") is None
        assert backend.remove_if("commits/x", b"commit") is False
        assert backend.list("commits") == []

    def test_delete_takes_exact_keys_and_forgives_absence(self, backend: Backend) -> None:
        """No pattern, no prefix."""
        for key in ("d/a", "d/ab", "d/a.b", "d/c/d"):
            self.raw_write(key, b"x")
        backend.delete(["d/a", "d/missing", "no/such"])
        assert {e.key for e in backend.list("d", recursive=True)} == {"d/ab", "d/a.b", "d/c/d"}
        backend.delete([])

    def test_remove_tree_takes_all_below_and_nothing_beside(self, backend: Backend) -> None:
        """And is no error for what is not there."""
        for key in ("d/x/1", "d/x/y/2", "d/xx", "d/x.y/3"):
            self.raw_write(key, b"x")
        backend.remove_tree("d/x")
        backend.remove_tree("d/x")
        assert {e.key for e in backend.list("d", recursive=True)} == {"d/xx", "d/x.y/3"}
        assert backend.stat("d/x") is None

    def test_a_copy_is_whole_and_never_replaces(self, backend: Backend) -> None:
        """And deleting the one leaves the other."""
        self.raw_write("d/x", b"content")
        how = backend.copy("d/x", "e/f/y")
        if how is None:
            assert self.raw_read("e/f/y") is None
            return
        self.settle(backend, "e/f/y")
        assert self.raw_read("e/f/y") == b"content"
        self.raw_write("d/z", b"z")
        with pytest.raises(ConflictError):
            backend.copy("d/z", "e/f/y")
        assert self.raw_read("e/f/y") == b"content"
        backend.delete(["d/x"])
        assert self.raw_read("e/f/y") == b"content"
        with pytest.raises(NotFoundError):
            backend.copy("d/x", "e/f/w")

    def test_taking_moves_an_object_and_never_replaces(self, backend: Backend) -> None:
        """Where it works at all; elsewhere it changes nothing."""
        self.raw_write("d/x", b"content")
        assert backend.take("d/x", "e/f/y") is backend.capabilities.takes
        if not backend.capabilities.takes:
            assert self.raw_read("d/x") == b"content"
            return
        assert self.raw_read("e/f/y") == b"content"
        assert self.raw_read("d/x") is None
        self.raw_write("d/z", b"z")
        with pytest.raises(ConflictError):
            backend.take("d/z", "e/f/y")
        assert self.raw_read("e/f/y") == b"content"
        assert self.raw_read("d/z") == b"z"
        with pytest.raises(NotFoundError):
            backend.take("d/x", "e/f/w")

    # Time, hints, syncing

    def test_the_clock_is_that_of_the_objects(self, backend: Backend) -> None:
        """The time of an object written between two looks at the clock lies between them."""
        before = backend.clock()
        backend.put("d/x", b"x")
        after = backend.clock()
        entry = backend.stat("d/x")
        assert entry is not None
        assert before - 1 <= entry.modified <= after + 1
        assert abs(time.time() - after) < 3600
        assert [e.key for e in backend.list("", recursive=True)] == ["d/x"]

    def test_a_hint_can_be_set_again(self, backend: Backend) -> None:
        """And is no file of the run's as far as listings matter."""
        backend.put("run/x/f", b"x")
        backend.set_hint("run/latest", "x")
        backend.set_hint("run/latest", "y")
        assert {e.key for e in backend.list("run", recursive=True)} <= {"run/x/f", "run/latest"}

    def test_directories_can_be_synced(self, backend: Backend) -> None:
        """Wherever that means something."""
        backend.put("d/e/x", b"x")
        backend.sync(["d/e", "d", ""])

    def test_it_works_after_a_fork(self, backend: Backend) -> None:
        """A data loader forks after the store was used."""
        import os

        backend.put("d/x", b"parent")
        assert backend.read("d/x", 10) == b"parent"
        pid = os.fork()
        if pid == 0:
            ok = False
            try:
                ok = backend.read("d/x", 10) == b"parent"
                backend.put("d/y", b"child")
            finally:
                os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0


def _write(backend: Backend, key: str, data: bytes) -> None:
    writer = backend.open_writer(key)
    writer.write(0, memoryview(data))
    writer.finish(len(data))


def _shown(entries: Entries) -> set[tuple[str, bool]]:
    return {(e.key, e.is_directory) for e in entries}


def _race(call: Callable[[int], bool]) -> list[bool]:
    barrier = threading.Barrier(RACERS)

    def run(index: int) -> bool:
        barrier.wait()
        return call(index)

    with ThreadPoolExecutor(RACERS) as pool:
        return list(pool.map(run, range(RACERS)))
