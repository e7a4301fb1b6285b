from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import ckptstore
from ckptstore import open_store
from ckptstore.backends.memory import MemoryBackend
from ckptstore.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from ckptstore.layout import MARKER, Name, RunKeys
from ckptstore.maintenance import gc
from ckptstore.records import BestRule
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.uri import Ref, parse_ref
from tests.unit.support import (
    RUN,
    Clock,
    content,
    examples,
    failed_save,
    file_store,
    memory_store,
    objects,
    save,
    write_tree,
)

# Opening and making


def test_opening_makes_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    assert not store.exists
    assert not (tmp_path / "store").exists()
    with pytest.raises(NotFoundError, match="no store"):
        _ = store.id


def test_a_store_is_opened_by_path_by_uri_and_by_name(tmp_path: Path) -> None:
    save(open_store(str(tmp_path)))
    assert open_store(f"file://{tmp_path}?dedupe=none").get(RUN, step=1).step == 1
    name = f"memory://unit-{tmp_path.name}"
    save(open_store(name))
    assert open_store(name).get(RUN, step=1).step == 1
    with pytest.raises(UsageError):
        open_store("gopher://x")


def test_a_store_keeps_its_identity_and_two_have_different_ones() -> None:
    one, two = memory_store(), memory_store()
    assert one.create()
    assert two.create()
    assert not one.create()
    assert one.id != two.id
    assert Store(one.backend).id == one.id


@pytest.mark.parametrize("name", ["file.txt", "00001", "run"])
def test_a_place_that_holds_other_things_is_no_store_until_it_is_said_so(
    name: str, tmp_path: Path
) -> None:
    write_tree(tmp_path, {f"{name}/x" if name == "run" else name: b"mine"})
    store = file_store(tmp_path)
    with pytest.raises(ConflictError, match=name):
        store.create()
    with pytest.raises(ConflictError):
        save(store)
    assert not (tmp_path / MARKER).exists()
    assert store.create(into_nonempty=True)
    save(store, run="mine")


@pytest.mark.parametrize("name", ["lost+found/x", ".snapshot/x", ".nfs0001"])
def test_what_every_disk_may_hold_does_not_hinder_a_store(name: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {name: b""})
    assert file_store(tmp_path).create()


def test_a_store_that_lost_its_marker_is_not_taken_for_an_empty_one() -> None:
    store = memory_store()
    save(store)
    store.backend.delete([MARKER])
    with pytest.raises(ConflictError):
        Store(store.backend).create()
    with pytest.raises(NotFoundError):
        Store(store.backend).list(RUN)


def test_a_store_that_has_gone_is_an_error_and_not_an_empty_listing(tmp_path: Path) -> None:
    store = file_store(tmp_path / "store")
    save(store)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for call in (
        store.runs,
        lambda: store.list(RUN),
        lambda: store.latest(RUN),
        lambda: store.get(RUN, step=1),
        lambda: store.rows(RUN),
    ):
        with pytest.raises(NotFoundError, match="gone"):
            call()


def test_two_stores_made_at_once_are_one(tmp_path: Path) -> None:
    first, second = file_store(tmp_path), file_store(tmp_path)
    assert first.create()
    second.create()
    assert first.id == second.id


def test_the_public_names_are_there() -> None:
    for name in ckptstore.__all__:
        assert getattr(ckptstore, name) is not None
    assert set(ckptstore.__all__) <= set(dir(ckptstore))
    with pytest.raises(AttributeError):
        _ = ckptstore.nothing


def test_a_store_says_where_it_is(tmp_path: Path) -> None:
    assert str(tmp_path) in repr(file_store(tmp_path))


# Finding


@pytest.fixture
def store() -> Store:
    store = memory_store()
    rule = BestRule("r", "max")
    save(store, 500, {"n": b"1"}, metrics={"r": 0.9}, tags=["good"], best=rule)
    save(store, 1000, {"n": b"2"}, metrics={"r": 0.1})
    save(store, 600, {"n": b"3"}, metrics={"r": 0.9})
    save(store, 500, {"n": b"4"}, metrics={"r": 0.2}, tags=["good"])
    failed_save(store, 600)
    return store


@pytest.mark.parametrize(
    ("selector", "number"),
    [("500", 4), ("1000", 2), ("600", 3), ("latest", 4), ("best", 3), ("good", 4)],
)
def test_a_ref_names_the_newest_that_fits(store: Store, selector: str, number: int) -> None:
    found = store.resolve(parse_ref(f"{RUN}@{selector}"))
    assert content(found) == {"n": b"%d" % number}
    named = store.resolve(parse_ref(f"{RUN}@{found.name}"))
    assert named.name == found.name


@pytest.mark.parametrize("selector", ["7", "tagged", "00009-step-00000009-abcdefgh"])
def test_what_no_checkpoint_fits_is_not_found(store: Store, selector: str) -> None:
    with pytest.raises(NotFoundError):
        store.resolve(parse_ref(f"{RUN}@{selector}"))
    with pytest.raises(NotFoundError):
        store.resolve(parse_ref(f"other@{selector}"))


def test_a_step_that_is_not_there_comes_with_those_near_it(store: Store) -> None:
    with pytest.raises(NotFoundError) as caught:
        store.get(RUN, step=601)
    assert "600" in (caught.value.hint or "")


def test_get_wants_either_a_step_or_a_name_and_both_must_be_possible(store: Store) -> None:
    with pytest.raises(UsageError):
        store.get(RUN)
    with pytest.raises(UsageError):
        store.get(RUN, step=1, name="x")
    with pytest.raises(UsageError):
        store.get("../x", step=1)


def test_a_negative_step_is_a_wrong_call_and_not_one_that_is_missing(store: Store) -> None:
    with pytest.raises(UsageError):
        store.get(RUN, step=-1)


def test_the_latest_of_a_run_without_a_commit_is_none() -> None:
    store = memory_store()
    failed_save(store)
    assert store.latest(RUN) is None
    assert store.latest("other") is None
    with pytest.raises(NotFoundError):
        store.resolve(parse_ref(f"{RUN}@latest"))


def test_the_latest_never_falls_back_over_a_record_that_cannot_be_read(store: Store) -> None:
    latest = store.latest(RUN)
    assert latest is not None
    store.backend.put(RunKeys(RUN).record(latest.name), b"")
    with pytest.raises(IntegrityError) as caught:
        store.latest(RUN)
    assert "resume-info" in (caught.value.hint or "")


def test_best_needs_a_rule_and_a_checkpoint_with_the_metric() -> None:
    store = memory_store()
    save(store, 1, metrics={"r": 1.0})
    with pytest.raises(NotFoundError, match="rule"):
        store.resolve(parse_ref(f"{RUN}@best"))
    save(store, 2, best=BestRule("loss", "min"))
    with pytest.raises(NotFoundError, match="loss"):
        store.resolve(parse_ref(f"{RUN}@best"))
    store.add_metrics(store.get(RUN, step=1), {"loss": 3.0})
    assert store.resolve(parse_ref(f"{RUN}@best")).step == 1


def test_the_best_is_not_a_damaged_one(store: Store) -> None:
    best = store.resolve(parse_ref(f"{RUN}@best"))
    store.backend.put(best.key("n"), b"x")
    with pytest.raises(IntegrityError):
        best.read_bytes("n")
    assert content(store.resolve(parse_ref(f"{RUN}@best"))) == {"n": b"1"}


def test_reading_changes_nothing(store: Store) -> None:
    before = objects(store)
    store.runs()
    store.rows(RUN, everything=True)
    for checkpoint in store.list(RUN):
        content(checkpoint)
    store.latest(RUN)
    assert objects(store) == before


# The whole against a model


TREES = [{"a": b"one"}, {"a": b"two"}, {"a": b"one", "d/b": b"three"}]
STEPS = st.integers(1, 3)
TAGS = st.sampled_from(["x", "y"])
GRACES = st.sampled_from([0.0, 10.0, 100.0])


@dataclass
class Modelled:
    """What a checkpoint is in the model."""

    step: int
    tree: dict[str, bytes]
    tags: set[str] = field(default_factory=set)
    pinned: bool = False
    purge_at: float | None = None
    """When its time in the trash is over; ``None`` while it is committed."""


class StoreMachine(RuleBasedStateMachine):
    """A store in memory against a dictionary of what it must hold."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = memory_store(self.clock)
        self.model: dict[Name, Modelled] = {}
        self.purged: set[Name] = set()
        self.saves = 0
        self.place = tempfile.TemporaryDirectory()
        self.sources = [
            write_tree(Path(self.place.name) / str(i), tree) for i, tree in enumerate(TREES)
        ]

    def teardown(self) -> None:
        self.place.cleanup()

    @initialize()
    def create(self) -> None:
        self.store.create()

    @property
    def live(self) -> list[Name]:
        return sorted(n for n, m in self.model.items() if m.purge_at is None)

    @property
    def trashed(self) -> list[Name]:
        return sorted(n for n, m in self.model.items() if m.purge_at is not None)

    def added(self, name: Name, step: int, tree: dict[str, bytes], tags: set[str]) -> Name:
        self.saves += 1
        assert (name.seq, name.step) == (self.saves, step)
        self.model[name] = Modelled(step, tree, tags)
        return name

    @rule(target=names, step=STEPS, tree=st.sampled_from(TREES), tags=st.sets(TAGS))
    def save(self, step: int, tree: dict[str, bytes], tags: set[str]) -> Name:
        made = save(self.store, step, tree, tags=sorted(tags))
        return self.added(made.name, step, tree, set(tags))

    @rule(target=names, step=STEPS)
    def fail(self, step: int) -> Name:
        name = failed_save(self.store, step)
        self.saves += 1
        self.purged.add(name)
        return name

    @rule(target=names, step=STEPS, number=st.integers(0, 2), tags=st.sets(TAGS))
    def push(self, step: int, number: int, tags: set[str]) -> object:
        options = SaveOptions(tags=sorted(tags), threads=1)
        result = self.store.push(self.sources[number], RUN, step, options)
        same = [n for n in self.live if n.step == step]
        if same and self.model[same[-1]].tree == TREES[number]:
            assert not result.created
            assert result.checkpoint.name == same[-1]
            self.model[same[-1]].tags |= tags
            return multiple()
        assert result.created
        return self.added(result.checkpoint.name, step, TREES[number], set(tags))

    @rule(name=names, grace=GRACES, force=st.booleans())
    def delete(self, name: Name, grace: float, force: bool) -> None:
        if name not in self.live:
            with pytest.raises(NotFoundError):
                self.store.get(RUN, name=str(name))
            return
        checkpoint = self.store.get(RUN, name=str(name))
        modelled = self.model[name]
        if modelled.pinned or (name == self.live[-1] and not force):
            with pytest.raises(ConflictError):
                self.store.delete(checkpoint, grace=grace, force=force)
            return
        self.store.delete(checkpoint, grace=grace, force=force)
        modelled.purge_at = self.clock.now + grace

    @precondition(lambda self: self.saves > 0)
    @rule(name=names)
    def undelete(self, name: Name) -> None:
        ref = Ref(None, RUN, str(name))
        if name in self.trashed:
            assert self.store.undelete(ref).name == name
            self.model[name].purge_at = None
        else:
            with pytest.raises((NotFoundError, ConflictError)):
                self.store.undelete(ref)

    @rule(name=names, wanted=st.booleans())
    def pin(self, name: Name, wanted: bool) -> None:
        if name in self.live:
            checkpoint = self.store.get(RUN, name=str(name))
            changed = self.store.pin(checkpoint) if wanted else self.store.unpin(checkpoint)
            assert changed is (self.model[name].pinned is not wanted)
            self.model[name].pinned = wanted

    @rule(name=names, tag=TAGS, wanted=st.booleans())
    def tag(self, name: Name, tag: str, wanted: bool) -> None:
        if name in self.live:
            checkpoint, tags = self.store.get(RUN, name=str(name)), self.model[name].tags
            change = self.store.tag if wanted else self.store.untag
            assert change(checkpoint, tag) is ((tag in tags) is not wanted)
            tags.add(tag) if wanted else tags.discard(tag)

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(dry_run=st.booleans())
    def gc(self, dry_run: bool) -> None:
        due = [n for n in self.trashed if (self.model[n].purge_at or 0) <= self.clock.now]
        result = gc(self.store, dry_run=dry_run)
        assert {a.key for a in result.removed} == {RunKeys(RUN).directory(n) for n in due}
        if not dry_run:
            for name in due:
                del self.model[name]
                self.purged.add(name)

    @rule(name=consumes(names))
    def open_again(self, name: Name) -> None:
        """Another process looks: nothing may depend on what this one remembers."""
        del name
        self.store = Store(self.store.backend)

    @invariant()
    def lists_what_the_model_holds(self) -> None:
        if not self.saves:
            return
        listed = self.store.list(RUN)
        assert [c.name for c in listed] == self.live
        for checkpoint in listed:
            modelled = self.model[checkpoint.name]
            assert checkpoint.tags == sorted(modelled.tags)
            assert checkpoint.standing.pinned is modelled.pinned
            assert content(checkpoint) == modelled.tree
            assert checkpoint.state == "ok"

    @invariant()
    def finds_the_newest_that_fits(self) -> None:
        if not self.saves:
            return
        latest = self.store.latest(RUN)
        assert (latest.name if latest else None) == (self.live[-1] if self.live else None)
        for selector in ("1", "2", "3", "x", "y"):
            fits = [
                n for n in self.live if selector in self.model[n].tags or selector == str(n.step)
            ]
            ref = Ref(None, RUN, selector)
            if fits:
                assert self.store.resolve(ref).name == fits[-1]
            else:
                with pytest.raises(NotFoundError):
                    self.store.resolve(ref)

    @invariant()
    def shows_the_trash(self) -> None:
        if self.saves:
            rows = self.store.rows(RUN, everything=True)
            assert [r.name for r in rows if r.state == "trashed"] == list(map(str, self.trashed))
            assert len(rows) == len(self.model)

    @invariant()
    def keeps_no_files_of_what_is_gone_and_nothing_half_done(self) -> None:
        assert isinstance(self.store.backend, MemoryBackend)
        keys = list(self.store.backend.space.objects)
        for name in self.purged:
            assert [k for k in keys if str(name) in k] == [RunKeys(RUN).record(name)]
        assert not [k for k in keys if "/leases/" in k or ".ckpt-tmp-" in k]


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(examples(25), stateful_step_count=30)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["fifo", "link", "directory"])
def test_a_marker_that_is_no_file_is_an_error_and_blocks_nothing(what: str, tmp_path: Path) -> None:
    store = file_store(tmp_path)
    save(store)
    marker = tmp_path / MARKER
    marker.rename(tmp_path / "aside")
    if what == "fifo":
        os.mkfifo(marker)
    elif what == "link":
        marker.symlink_to("aside")
    else:
        marker.mkdir()
    with pytest.raises(IntegrityError):
        file_store(tmp_path)
