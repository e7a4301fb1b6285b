from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptstore import document
from ckptstore.backends.base import Entries
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.errors import (
    AccessDeniedError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    SupersededError,
    TemporaryError,
    UsageError,
    VoidedError,
)
from ckptstore.layout import MARKER, TEMPORARY_PREFIX, Name, RunKeys, life_number
from ckptstore.leases import STALE_SECONDS
from ckptstore.lives import newest_life
from ckptstore.maintenance import gc
from ckptstore.maintenance.verify import verify_run
from ckptstore.records import Lease, Life, decode_life
from ckptstore.resume import plan_resume
from ckptstore.saveoptions import SaveOptions
from ckptstore.saving import Save
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend, Phase
from ckptstore.uri import parse_ref
from tests.unit.support import (
    ABC,
    RUN,
    Clock,
    again,
    attempt,
    content,
    failed_save,
    file_store,
    memory_store,
    objects,
    save,
    stop,
    write_tree,
)

KEYS = RunKeys(RUN)
DAY = 24 * 3600.0


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return memory_store() if request.param == "memory" else file_store(tmp_path / "store")


def begun(store: Store, step: int = 2, life: int | None = None) -> Save:
    """A save under way, with a file."""
    one = store.save(RUN, step, life=life)
    one.add_bytes("a", b"a")
    return one


def lease_key(one: Save) -> str:
    return KEYS.lease(one.name, one.writer.id)


def rewrite_lease(one: Save, change: Callable[[Lease], Lease]) -> None:
    """Stop a save, and change its lease."""
    stop(one)
    one._forgotten.detach()
    data = one._backend.read(lease_key(one), 2**30)
    lease = document.Decoder[Lease](Lease).decode(data, "lease")
    one._backend.put(lease_key(one), document.encode(change(lease)))


def died(one: Save) -> None:
    """Its process was killed."""
    rewrite_lease(
        one,
        lambda lease: msgspec.structs.replace(
            lease, process=msgspec.structs.replace(lease.process, started=1)
        ),
    )


def void_of(store: Store, name: Name) -> bool:
    found = store.catalog.find(RUN, name)
    return found is not None and found.is_void


# Beginning


def test_lives_are_numbered_in_the_order_of_their_beginning(store: Store) -> None:
    assert [store.begin_life(RUN) for _ in range(3)] == [1, 2, 3]
    assert again(store).begin_life(RUN) == 4
    assert again(store).begin_life("other") == 1


def test_a_life_says_who_began_it(store: Store) -> None:
    store.begin_life(RUN)
    life = decode_life(store.backend.read(KEYS.life(1), 2**20), RUN, 1, "the life")
    here = store.save("other", 1)
    assert (life.run, life.life) == (RUN, 1)
    assert (life.writer.host, life.writer.pid) == (here.writer.host, here.writer.pid)
    assert life.process.pid == life.writer.pid
    here.abort()
    with pytest.raises(IntegrityError, match="another life"):
        decode_life(document.encode(life), RUN, 2, "the life")


def test_beginning_makes_the_store_by_the_rules_of_a_save(tmp_path: Path) -> None:
    new = file_store(tmp_path / "new")
    assert new.begin_life(RUN) == 1
    assert new.exists
    assert plan_resume(new, RUN).chosen is None
    full = file_store(write_tree(tmp_path / "full", {"thesis.tex": b"x"}))
    with pytest.raises(ConflictError):
        full.begin_life(RUN)
    with pytest.raises(UsageError):
        new.begin_life("no/run")


@pytest.mark.parametrize("life", [0, -1, True, "1", 10**9])
def test_what_cannot_be_the_number_of_a_life_is_refused(life: int) -> None:
    store = memory_store()
    with pytest.raises(UsageError):
        store.save(RUN, 1, life=life)
    assert objects(store) == {}


def test_many_that_begin_at_once_get_distinct_numbers(store: Store) -> None:
    store.create()
    numbers: list[int] = []
    barrier = threading.Barrier(8)

    def begin() -> None:
        barrier.wait()
        numbers.append(again(store).begin_life(RUN))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


class Lossy(MemoryBackend):
    """Storage that loses one reply to the creation of a life, carried out or not."""

    def __init__(self, *, carried_out: bool) -> None:
        super().__init__(Space())
        self.carried_out = carried_out
        self.failures = 1

    def create_exclusive(self, key: str, data: bytes) -> bool:
        if "/lives/" in key and self.failures:
            self.failures -= 1
            if self.carried_out:
                super().create_exclusive(key, data)
            raise TemporaryError("timed out")
        return super().create_exclusive(key, data)


def test_a_life_whose_creation_was_carried_out_but_not_confirmed_has_begun() -> None:
    assert Store(Lossy(carried_out=True)).begin_life(RUN) == 1


def test_a_life_that_could_not_be_created_has_not_begun() -> None:
    store = Store(Lossy(carried_out=False))
    with pytest.raises(TemporaryError):
        store.begin_life(RUN)
    assert store.begin_life(RUN) == 1


class LateListing(MemoryBackend):
    """Storage whose listing does not show yet what another has just created."""

    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        found = super().list(prefix, recursive=recursive)
        return [] if prefix == KEYS.lives else found


def test_a_number_that_is_taken_and_not_listed_yet_is_passed_over() -> None:
    store = Store(LateListing(Space()))
    assert [store.begin_life(RUN) for _ in range(3)] == [1, 2, 3]


def test_nothing_is_begun_where_the_store_has_gone(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    store.create()
    (tmp_path / "store").rename(tmp_path / "unmounted")
    (tmp_path / "store").mkdir()
    with pytest.raises(NotFoundError, match="has gone"):
        store.begin_life(RUN)
    assert list((tmp_path / "store").iterdir()) == []


def test_a_store_that_goes_while_the_leases_are_looked_for_is_not_one_without_any() -> None:
    store = memory_store()
    store.begin_life(RUN)
    one = begun(store, life=1)

    def unmount(operation: str, key: str, phase: Phase) -> None:
        if (operation, key, phase) == ("list", KEYS.leases, "before"):
            store.backend.delete([MARKER, lease_key(one)])

    with pytest.raises(NotFoundError, match="has gone"):
        Store(HookedBackend(store.backend, unmount)).begin_life(RUN)
    stop(one)
    one._forgotten.detach()


# What a save does with its life


def test_the_life_stands_in_the_lease_and_in_the_record(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    (held,) = store.catalog.leases(RUN)
    assert held.lease is not None
    assert held.lease.life == 1
    attempt(one)
    assert store.get(RUN, step=2).commit.life == 1
    assert b'"life":1' in objects(store)[KEYS.record(one.name)]


def test_a_save_of_no_life_says_nothing_of_lives(store: Store) -> None:
    one = begun(store)
    assert b"life" not in objects(store)[lease_key(one)]
    attempt(one)
    assert b"life" not in objects(store)[KEYS.record(one.name)]
    assert store.get(RUN, step=2).commit.life is None


def test_a_push_may_belong_to_a_life(tmp_path: Path) -> None:
    store = memory_store()
    tree = write_tree(tmp_path / "tree", ABC)
    store.begin_life(RUN)
    pushed = store.push(tree, RUN, 1, SaveOptions(life=1, keep_partial=True))
    assert pushed.checkpoint.commit.life == 1
    store.begin_life(RUN)
    with pytest.raises(SupersededError):
        store.push(tree, RUN, 2, SaveOptions(life=1, keep_partial=True))
    assert [c.step for c in store.list(RUN)] == [1]


def test_the_save_of_an_older_life_fails_and_names_the_newer(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    assert store.begin_life(RUN) == 2
    began = decode_life(store.backend.read(KEYS.life(2), 2**20), RUN, 2, "the life")
    with pytest.raises(SupersededError) as caught:
        attempt(one)
    message = str(caught.value)
    for word in (f"'{RUN}'", "life 2", began.writer.host, began.created, "life 1"):
        assert word in message
    assert caught.value.hint is not None
    assert "end this process" in caught.value.hint
    assert (caught.value.kind, caught.value.exit_code) == ("superseded", 6)
    assert isinstance(caught.value, VoidedError)
    assert store.list(RUN) == []
    left = {MARKER, KEYS.life(1), KEYS.life(2), KEYS.record(one.name)}
    assert set(objects(store)) == left, "no file of it is left"


def test_an_older_life_cannot_begin_a_save(store: Store) -> None:
    for _ in range(3):
        store.begin_life(RUN)
    before = objects(store)
    for life in (1, 2):
        with pytest.raises(SupersededError):
            store.save(RUN, 1, life=life)
    assert objects(store) == before
    assert store.catalog.directories(RUN) == []
    assert save(store, life=3).commit.life == 3


def test_a_superseded_save_keeps_no_files_for_a_later_one() -> None:
    store = memory_store()
    store.begin_life(RUN)
    one = Save(store.catalog, RUN, 1, SaveOptions(life=1, keep_partial=True))
    one.add_bytes("a", b"a")
    store.begin_life(RUN)
    with pytest.raises(SupersededError):
        attempt(one)
    assert not any(key.startswith(KEYS.directory(one.name)) for key in objects(store))


def test_a_save_that_lost_its_lease_still_sees_the_newer_life(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    store.backend.delete([lease_key(one)])
    store.begin_life(RUN)
    assert store.catalog.find(RUN, one.name) is None, "nothing led the new life to it"
    with pytest.raises(SupersededError):
        attempt(one)
    assert store.list(RUN) == []


def test_a_life_that_begins_right_before_the_record_is_the_reason_given() -> None:
    store = memory_store()
    store.begin_life(RUN)

    def begin(operation: str, key: str, phase: Phase) -> None:
        first = newest_life(store.catalog, RUN) == 1
        if operation == "create_exclusive" and "/commits/" in key and phase == "before" and first:
            store.begin_life(RUN)

    one = begun(Store(HookedBackend(store.backend, begin)), life=1)
    with pytest.raises(SupersededError):
        attempt(one)
    assert store.list(RUN) == []


def test_a_save_whose_life_never_began_here_is_refused(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no life 1"):
        store.save(RUN, 1, life=1)
    store.begin_life(RUN)
    with pytest.raises(NotFoundError, match="no life 2"):
        store.save(RUN, 1, life=2)
    one = begun(store, life=1)
    store.backend.remove_tree(KEYS.lives)
    with pytest.raises(NotFoundError, match="no life 1"):
        attempt(one)
    assert store.list(RUN) == []


# What a life does with the saves of older ones


def test_a_save_that_may_be_running_is_voided_and_keeps_its_files(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    store.begin_life(RUN)
    assert void_of(store, one.name)
    assert objects(store)[KEYS.file(one.name, "a")] == b"a"
    assert lease_key(one) in objects(store)
    gc(store, RUN)
    assert KEYS.file(one.name, "a") not in objects(store)
    one.abort()


def test_a_save_whose_process_is_gone_is_removed(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    died(one)
    store.begin_life(RUN)
    assert void_of(store, one.name)
    assert not any(str(one.name) in key for key in objects(store) if "/commits/" not in key)
    assert store.catalog.directories(RUN) == []


def test_a_save_that_has_not_been_heard_of_for_long_is_removed() -> None:
    clock = Clock()
    store = memory_store(clock)
    store.begin_life(RUN)
    one = begun(store, life=1)
    stop(one)
    one._forgotten.detach()
    clock.advance(STALE_SECONDS)
    store.begin_life(RUN)
    assert void_of(store, one.name)
    assert store.catalog.directories(RUN) == []
    assert store.catalog.leases(RUN) == []


def test_a_save_of_no_life_is_left_alone(store: Store) -> None:
    one, dead = begun(store), begun(store, 3)
    died(dead)
    store.begin_life(RUN)
    store.begin_life(RUN)
    assert store.catalog.find(RUN, dead.name) is None
    assert store.backend.stat(KEYS.file(dead.name, "a")) is not None
    attempt(one)
    assert [c.step for c in store.list(RUN)] == [2]


def test_a_life_leaves_the_saves_of_a_newer_one_alone() -> None:
    """Life 2 is slow: when it comes to look at leases, life 3 is saving."""
    store = memory_store()
    store.begin_life(RUN)
    saves: list[Save] = []

    def overtake(operation: str, key: str, phase: Phase) -> None:
        if (operation, key, phase) == ("create_exclusive", KEYS.life(2), "after"):
            assert store.begin_life(RUN) == 3
            saves.append(begun(store, life=3))

    slow = Store(HookedBackend(store.backend, overtake))
    assert slow.begin_life(RUN) == 2
    attempt(saves[0])
    assert store.get(RUN, step=2).commit.life == 3
    with pytest.raises(SupersededError):
        slow.save(RUN, 3, life=2)


def test_a_commit_that_was_there_first_stands_with_its_lease_and_files(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    lease = objects(store)[lease_key(one)]
    attempt(one)
    store.backend.put(lease_key(one), lease)  # it was killed before it let go of it
    store.begin_life(RUN)
    assert plan_resume(store, RUN).require().step == 2
    assert content(store.get(RUN, step=2)) == {"a": b"a"}


def test_a_checkpoint_that_was_deleted_since_can_still_be_brought_back(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    left = objects(store)[lease_key(one)]
    attempt(one)
    store.backend.put(lease_key(one), left)  # it was killed before it let go of it
    died(one)
    checkpoint = store.get(RUN, step=2)
    store.delete(checkpoint, force=True)
    store.begin_life(RUN)
    gc(store, RUN)
    assert content(store.undelete(parse_ref(f"{RUN}@2"))) == {"a": b"a"}


def test_a_lease_that_cannot_be_read_may_be_an_older_life_s(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    store.backend.put(lease_key(one), b"damaged")
    store.begin_life(RUN)
    assert void_of(store, one.name)
    with pytest.raises(SupersededError):
        attempt(one)


def test_a_lease_that_went_while_it_was_looked_for_is_no_lease() -> None:
    store = memory_store()
    store.begin_life(RUN)
    one = begun(store)

    def end(operation: str, key: str, phase: Phase) -> None:
        if (operation, key, phase) == ("read", lease_key(one), "before"):
            store.backend.delete([key])

    Store(HookedBackend(store.backend, end)).begin_life(RUN)
    attempt(one)
    assert [c.step for c in store.list(RUN)] == [2]


def test_files_that_cannot_be_removed_do_not_keep_a_life_from_beginning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = memory_store()
    store.begin_life(RUN)
    one = begun(store, life=1)
    died(one)

    def refuse(operation: str, key: str, phase: Phase) -> None:
        if operation in ("delete", "remove_tree"):
            raise AccessDeniedError("not yours")

    with caplog.at_level(logging.WARNING):
        assert Store(HookedBackend(store.backend, refuse)).begin_life(RUN) == 2
    assert "not yours" in caplog.text
    assert void_of(store, one.name)


def test_a_save_that_cannot_be_voided_keeps_a_life_from_beginning() -> None:
    store = memory_store()
    store.begin_life(RUN)
    one = begun(store, life=1)

    def refuse(operation: str, key: str, phase: Phase) -> None:
        if operation == "create_exclusive" and "/commits/" in key:
            raise TemporaryError("away")

    with pytest.raises(TemporaryError):
        Store(HookedBackend(store.backend, refuse)).begin_life(RUN)
    assert store.begin_life(RUN) == 3
    assert void_of(store, one.name)
    one.abort()


# gc


def asleep(store: Store, life: int | None, during: Callable[[], object]) -> Save:
    """A save that is asleep between its lease and its directory while something happens."""

    def hook(operation: str, key: str, phase: Phase) -> None:
        if (operation, phase) == ("make_directory", "before"):
            during()

    one = begun(Store(HookedBackend(store.backend, hook)), life=life)
    one._backend = one._catalog.backend = store.backend
    return one


def test_gc_lets_no_lease_of_a_life_go_before_its_save_is_over() -> None:
    clock = Clock()
    store = memory_store(clock)
    store.begin_life(RUN)
    ends: list[list[str]] = []

    def an_hour_passes() -> None:
        clock.advance(3600)
        ends.append([a.key for a in gc(store, RUN).removed])
        (name,) = store.catalog.record_names(RUN)
        assert void_of(store, name)

    one = asleep(store, 1, an_hour_passes)
    assert ends == [[lease_key(one)]]
    with pytest.raises(VoidedError):
        attempt(one)
    assert store.list(RUN) == []


def test_gc_voids_nothing_where_a_save_of_no_life_has_no_directory_yet() -> None:
    clock = Clock()
    store = memory_store(clock)
    save(store, 1)

    def an_hour_passes() -> None:
        clock.advance(3600)
        gc(store, RUN)

    attempt(asleep(store, None, an_hour_passes))
    assert [c.step for c in store.list(RUN)] == [1, 2]


def test_gc_collects_temporaries_among_the_lives_and_nothing_else_there() -> None:
    clock = Clock()
    store = memory_store(clock)
    store.begin_life(RUN)
    store.begin_life(RUN)
    stray = f"{KEYS.lives}/{TEMPORARY_PREFIX}abcdefgh"
    store.backend.put(stray, b"xyz")
    clock.advance(STALE_SECONDS - 1)
    assert gc(store, grace=0).removed == ()
    clock.advance(400 * DAY)
    assert [a.key for a in gc(store, grace=0).removed] == [stray]
    assert newest_life(store.catalog, RUN) == 2


# Strange lives


@pytest.mark.parametrize(
    ("file_name", "number"),
    [
        ("00001.json", 1),
        ("99999.json", 99_999),
        ("100000.json", 100_000),
        ("999999999.json", 999_999_999),
        ("00000.json", 0),
        ("1.json", None),
        ("000001.json", None),
        ("012345.json", None),
        ("1000000000.json", None),
        ("00001", None),
        ("00001.json\n", None),
        ("-0001.json", None),
        ("٠٠٠٠١.json", None),
        (".ckpt-tmp-00001.json", None),
    ],
)
def test_a_file_name_is_a_life_s_in_just_one_way(file_name: str, number: int | None) -> None:
    assert life_number(file_name) == number
    if number is not None:
        assert KEYS.life(number) == f"{KEYS.lives}/{file_name}"


def test_other_things_among_the_lives_disturb_nothing(store: Store) -> None:
    save(store, 1)
    for name in ("notes.txt", "7.json", "00000.json", "x/00009.json", "000008.json"):
        store.backend.put(f"{KEYS.lives}/{name}", b"x")
    assert store.begin_life(RUN) == 1
    assert save(store, 2, life=1).commit.life == 1
    failed_save(store, 3)
    assert [r.step for r in store.rows(RUN, everything=True)] == [1, 2]
    assert all(result.ok for result in verify_run(store, RUN, deep=True))
    assert plan_resume(store, RUN).require().step == 2
    assert gc(store, grace=0).removed == ()
    assert store.runs() == [RUN]


def test_a_life_that_cannot_be_read_is_one(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    store.backend.put(KEYS.life(7), b"damaged")
    with pytest.raises(SupersededError, match="life 7 of run 'run' has begun"):
        attempt(one)
    assert store.begin_life(RUN) == 8


def test_a_directory_or_a_link_with_the_name_of_a_life_takes_its_number(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    store.begin_life(RUN)
    (tmp_path / KEYS.life(3)).mkdir()
    (tmp_path / KEYS.life(5)).symlink_to("00001.json")
    with pytest.raises(SupersededError, match="life 5"):
        store.save(RUN, 1, life=1)
    assert store.begin_life(RUN) == 6
    assert save(store, life=6).commit.life == 6


def test_a_run_that_has_used_up_its_numbers_says_so() -> None:
    store = memory_store()
    store.create()
    store.backend.put(KEYS.life(10**9 - 1), b"x")
    with pytest.raises(ConflictError, match="used up"):
        store.begin_life(RUN)


def test_the_words_of_a_hostile_life_move_no_cursor(store: Store) -> None:
    store.begin_life(RUN)
    one = begun(store, life=1)
    life = decode_life(store.backend.read(KEYS.life(1), 2**20), RUN, 1, "the life")
    writer = msgspec.structs.replace(life.writer, host="\x1b[2J")
    body: Life = msgspec.structs.replace(life, life=2, writer=writer, created="\x1b[31m")
    store.backend.put(KEYS.life(2), document.encode(body))
    with pytest.raises(SupersededError) as caught:
        attempt(one)
    assert "\x1b" not in str(caught.value)
