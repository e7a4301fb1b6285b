"""Loading: what is damaged is passed over, what does not fit is named, and only what is needed is
read."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore.errors import IntegrityError, NotFoundError, TemporaryError, UsageError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import Name
from ckptstore.reading import Checkpoint
from ckptstore.resume import ResumePlan, plan_from, plan_resume
from ckptstore.store import Store
from ckptstore.testing.hooks import Phase
from ckptstore.torch import Checkpointer, load_part, parts_of
from ckptstore.uri import Ref
from tests.torch.support import RUN, blank, file_store, flip, hooked_store, make_state, same


def three(root: Path) -> tuple[Store, list[Checkpoint]]:
    """A run with the steps 1 to 3."""
    store = file_store(root)
    with Checkpointer(store, RUN) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, make_state(step))
    return store, store.list(RUN)


def test_the_newest_is_loaded_in_place(tmp_path: Path) -> None:
    store, _ = three(tmp_path)
    state = blank(make_state())
    weight = state["model"]["layer"]["weight"]
    with Checkpointer(store, RUN) as checkpointer:
        found = checkpointer.load(state)
    assert found is not None
    assert found.step == 3
    assert same(state, make_state(3))
    assert state["model"]["layer"]["weight"] is weight
    assert parts_of(found) == ["model", "optimizer"]


@pytest.mark.parametrize(
    "path",
    ["model/__0_0.distcp", "optimizer/__0_0.distcp", "model/.metadata", "optimizer/state.json"],
)
def test_a_damaged_newest_is_marked_and_passed_over(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, checkpoints = three(tmp_path)
    flip(checkpoints[2], path)
    state = blank(make_state())
    with Checkpointer(store, RUN) as checkpointer:
        found = checkpointer.load(state)
    assert found is not None
    assert found.step == 2
    assert same(state, make_state(2))
    assert [c.state for c in store.list(RUN)] == ["ok", "ok", "damaged"]
    assert "run@3 is passed over: run@3 is damaged: " + path in caplog.text


def test_every_byte_counts(tmp_path: Path) -> None:
    """A flip anywhere in a file with tensors is found, in the pieces between the data as well."""
    store = file_store(tmp_path)
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, {"m": {"a": torch.ones(3), "b": torch.ones(1)}})
        checkpoint = store.get(RUN, step=1)
        size = checkpoint.entry("m/__0_0.distcp").size
        for offset in range(0, size, 97):
            flip(checkpoint, "m/__0_0.distcp", offset)
            with pytest.raises(IntegrityError, match="content differs"):
                checkpointer.load({"m": {"b": torch.ones(1)}}, checkpoint, strict=False)
            flip(checkpoint, "m/__0_0.distcp", offset)
        checkpointer.load({"m": {"b": torch.ones(1)}}, checkpoint, strict=False)


def test_when_nothing_is_intact_a_run_does_not_start_from_scratch(tmp_path: Path) -> None:
    store, checkpoints = three(tmp_path)
    for checkpoint in checkpoints:
        flip(checkpoint, "model/__0_0.distcp")
    with (
        Checkpointer(store, RUN) as checkpointer,
        pytest.raises(IntegrityError, match=r"has 3 checkpoint\(s\) and none is intact"),
    ):
        checkpointer.load(blank(make_state()))


def test_a_truncated_and_a_missing_file_are_passed_over(tmp_path: Path) -> None:
    store, checkpoints = three(tmp_path)
    Path(checkpoints[2].path or "", "model/__0_0.distcp").unlink()
    short = Path(checkpoints[1].path or "", "optimizer/__0_0.distcp")
    short.chmod(0o644)
    short.write_bytes(short.read_bytes()[:-1])
    state = blank(make_state())
    with Checkpointer(store, RUN) as checkpointer:
        found = checkpointer.load(state)
    assert found is not None
    assert found.step == 1
    assert same(state, make_state(1))


def test_nothing_there_is_none_and_leaves_the_state_alone(tmp_path: Path) -> None:
    state = make_state(5)
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer:
        assert checkpointer.load(state) is None
        checkpointer.store.create()
        assert checkpointer.load(state) is None
        with checkpointer.store.save("other", 1) as save:
            save.add_bytes("x", b"")
        assert checkpointer.load(state) is None
    assert same(state, make_state(5))


def test_one_checkpoint_that_is_asked_for_is_not_passed_over(tmp_path: Path) -> None:
    store, checkpoints = three(tmp_path)
    flip(checkpoints[1], "model/__0_0.distcp")
    state = blank(make_state())
    with Checkpointer(store, RUN) as checkpointer:
        with pytest.raises(IntegrityError, match="run@2 is damaged"):
            checkpointer.load(state, checkpoints[1])
        assert checkpointer.load(state, checkpoints[0]) is checkpoints[0]
    assert same(state, make_state(1))


def test_a_storage_that_is_away_is_no_damage(tmp_path: Path) -> None:
    three(tmp_path)

    def away(operation: str, key: str, phase: Phase) -> None:
        if operation == "open_reader" and key.endswith(".distcp"):
            raise TemporaryError("the storage is away")

    store = hooked_store(tmp_path, away)
    with (
        Checkpointer(store, RUN) as checkpointer,
        pytest.raises(TemporaryError, match="the storage is away"),
    ):
        checkpointer.load(blank(make_state()))
    assert [c.state for c in store.list(RUN)] == ["ok", "ok", "ok"]


def test_a_plan_that_chooses_what_was_refused_ends(tmp_path: Path) -> None:
    store, checkpoints = three(tmp_path)
    calls = []

    def plan(refused: Mapping[Name, str]) -> ResumePlan:
        calls.append(dict(refused))
        return ResumePlan(RUN, checkpoints[2], (), 3)

    def load(checkpoint: Checkpoint) -> None:
        raise IntegrityError("not to my liking")

    with (
        Checkpointer(store, RUN) as checkpointer,
        pytest.raises(IntegrityError, match="run@3 is not intact: not to my liking"),
    ):
        checkpointer.newest_intact(load, plan=plan)
    assert len(calls) == 2


def test_what_is_deleted_after_it_was_chosen_is_no_error(tmp_path: Path) -> None:
    store, checkpoints = three(tmp_path)
    first = plan_resume(store, RUN)
    assert first.require().step == 3
    store.delete(checkpoints[2], force=True)
    seen: list[int] = []
    asked: list[list[int]] = []

    def plan(refused: Mapping[Name, str]) -> ResumePlan:
        asked.append([name.step for name in refused])
        return plan_resume(store, RUN, refused=refused) if refused else first

    with Checkpointer(store, RUN) as checkpointer:
        found = checkpointer.newest_intact(lambda c: seen.append(c.step), plan=plan)
    assert found is not None
    assert (found.step, seen, asked) == (2, [2], [[], [3]])


def test_what_is_there_and_cannot_be_found_is_not_passed_over(tmp_path: Path) -> None:
    """A rank may not see yet what another one sees; that is no reason to take an older one."""
    store, _ = three(tmp_path)
    looked: list[str] = []

    class Blind(Store):
        def get(self, *args: Any, **options: Any) -> Checkpoint:
            looked.append(options["name"])
            raise NotFoundError("there is no such checkpoint")

    blind = Blind(store.backend)
    with (
        Checkpointer(store, RUN) as checkpointer,
        pytest.raises(NotFoundError, match="there is no such checkpoint"),
    ):
        checkpointer.newest_intact(lambda c: None, store=blind)
    assert len(looked) == 1


def test_newest_intact_of_another_store_with_a_plan_of_ones_own(tmp_path: Path) -> None:
    store, _ = three(tmp_path / "one")
    seen: list[int] = []
    with Checkpointer(file_store(tmp_path / "two"), "mine") as checkpointer:
        found = checkpointer.newest_intact(
            lambda c: seen.append(c.step),
            store=store,
            run=RUN,
            plan=lambda refused: plan_from(store, Ref(None, RUN, "2")),
        )
    assert found is not None
    assert (found.step, seen) == (2, [2])


def test_a_load_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    opened = threading.Event()

    def hold(operation: str, key: str, phase: Phase) -> None:
        if operation == "write" and key.endswith(".distcp"):
            assert opened.wait(30)

    state = blank(make_state())
    with Checkpointer(hooked_store(tmp_path, hold), RUN) as checkpointer:
        checkpointer.save(1, make_state(1), wait=False)
        threading.Timer(0.2, opened.set).start()
        found = checkpointer.load(state)
    assert found is not None
    assert same(state, make_state(1))


NOT_FITTING: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"a": torch.ones(3), "n": {"b": torch.ones(2)}},
        r"n\.b in m of run@1 has the shape \(2, 1\), not \(2,\)",
    ),
    "missing": (
        {"a": torch.ones(3), "n": {"b": torch.ones(2, 1)}, "c": torch.ones(1)},
        r"m of run@1 has no tensor c$",
    ),
    "many missing": (
        {"a": torch.ones(3), "n": {"b": torch.ones(2, 1)}}
        | {f"x{i}": torch.ones(1) for i in range(5)},
        r"has no tensor x0, x1, x2 and 2 more$",
    ),
    "left over": (
        {"a": torch.ones(3)},
        r"m of run@1 has tensors that have no place here: n\.b$",
    ),
}


@pytest.mark.parametrize("what", NOT_FITTING)
def test_another_model_is_refused_with_the_tensor_named(tmp_path: Path, what: str) -> None:
    state, words = NOT_FITTING[what]
    before = {key: value.clone() for key, value in state.items() if key == "a"}
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer:
        checkpointer.save(1, {"m": {"a": torch.zeros(3), "n": {"b": torch.zeros(2, 1)}}})
        with pytest.raises(UsageError, match=words):
            checkpointer.load({"m": state})
        with pytest.raises(NotFoundError, match="has no part 'k'"):
            checkpointer.load({"k": state})
    assert same({"a": state["a"]}, before)


def test_without_strict_what_both_have_is_loaded(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, {"m": {"a": torch.zeros(3), "b": torch.zeros(2)}})
        state = {"a": torch.ones(3), "c": torch.ones(1)}
        assert load_part(store.get(RUN, step=1), "m", state, strict=False) == ["c"]
        assert same(state, {"a": torch.zeros(3), "c": torch.ones(1)})
        checkpointer.load({"m": state}, strict=False)
        with pytest.raises(UsageError, match="has the shape"):
            checkpointer.load({"m": {"a": torch.ones(2)}}, strict=False)


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_types_are_converted(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensor = torch.arange(-5, 5).to(stored)
    state = {"m": {"x": torch.zeros(10, dtype=wanted)}}
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer:
        checkpointer.save(1, {"m": {"x": tensor}})
        checkpointer.load(state)
    assert same(state["m"], {"x": tensor.to(wanted)})


def test_any_memory_layout_is_filled(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    frame = torch.zeros(8, 12)
    complex_one = torch.zeros(3, dtype=torch.complex64)
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    state = {
        "transposed": torch.zeros(6, 4).t(),
        "sliced": frame[::2, 1::2],
        "parameter": parameter,
        "conjugate": complex_one.conj(),
    }
    filled = dict.fromkeys(["transposed", "sliced", "parameter"], whole)
    numbers = torch.tensor([1 + 1j, 2j, 3])
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer:
        checkpointer.save(1, {"m": filled | {"conjugate": numbers}})
        checkpointer.load({"m": state})
    assert torch.equal(state["transposed"], whole)
    assert torch.equal(frame[::2, 1::2], whole)
    assert frame.count_nonzero() == 23
    assert torch.equal(parameter, whole)
    assert parameter.requires_grad
    assert torch.equal(complex_one, numbers.conj())


def test_tied_weights_are_filled_through_both_names(tmp_path: Path) -> None:
    weight = torch.randn(100, 10)
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer:
        checkpointer.save(1, {"m": {"in": weight, "out": weight}})
        tied = torch.zeros(100, 10)
        checkpointer.load({"m": {"in": tied, "out": tied}})
    assert torch.equal(tied, weight)


def test_rows_on_their_way_are_held_within_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.torch.reader.HELD_BYTES", 1000)
    state = {f"t{i}": torch.randn(30, 7) for i in range(20)}
    found = {key: torch.zeros(7, 30).t() for key in state}
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer:
        checkpointer.save(1, {"m": state})
        checkpointer.load({"m": found})
    assert all(torch.equal(found[key], state[key]) for key in state)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A checkpoint whose tensors lie in several blocks."""
    store = file_store(tmp_path_factory.mktemp("large"))
    with Checkpointer(store, RUN) as checkpointer:
        numbers = torch.arange(5_000_000, dtype=torch.int32)
        state = {"a": numbers, "b": numbers + 1, "c": torch.tensor(7)}
        checkpointer.save(1, {"m": state})
    return store


def test_a_flip_in_a_block_that_is_not_needed_does_not_matter(large: Store) -> None:
    checkpoint = large.get(RUN, step=1)
    path = "m/__0_0.distcp"
    assert checkpoint.entry(path).size > 2 * BLOCK_SIZE
    flip(checkpoint, path, 10)
    try:
        found = {"c": torch.tensor(0)}
        load_part(checkpoint, "m", found, strict=False)
        assert found["c"] == 7
        with pytest.raises(IntegrityError, match=f"{path}, bytes 0-{BLOCK_SIZE - 1}: content"):
            load_part(checkpoint, "m", {"a": torch.zeros(5_000_000)}, strict=False)
    finally:
        flip(checkpoint, path, 10)


def test_tensors_over_several_blocks_come_back(large: Store) -> None:
    numbers = torch.arange(5_000_000, dtype=torch.int32)
    found = {
        "a": torch.zeros(5_000_000, dtype=torch.int32),
        "b": torch.zeros(5_000_000, dtype=torch.int64),
        "c": torch.tensor(0),
    }
    load_part(large.get(RUN, step=1), "m", found, threads=3)
    assert torch.equal(found["a"], numbers)
    assert torch.equal(found["b"], numbers + 1)


def test_a_deleted_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    store, checkpoints = three(tmp_path)
    store.delete(checkpoints[2], grace=0, force=True)
    shutil.rmtree(checkpoints[2].path or "")  # as gc does in time
    with Checkpointer(store, RUN) as checkpointer:
        with pytest.raises(NotFoundError, match="run@3 was deleted meanwhile"):
            checkpointer.load(blank(make_state()), checkpoints[2])
        found = checkpointer.load(blank(make_state()))
    assert found is not None
    assert found.step == 2


def test_values_replace_what_was_there_and_no_more(tmp_path: Path) -> None:
    saved = {"t": torch.ones(1), "lr": 0.5, "n": {"t": torch.ones(1), "k": (1, 2)}}
    state = {"t": torch.zeros(1), "lr": 1.0, "n": {"t": torch.zeros(1), "other": 3}}
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer:
        checkpointer.save(1, {"m": saved})
        checkpointer.load({"m": state})
    assert same(
        state,
        {"t": torch.ones(1), "lr": 0.5, "n": {"t": torch.ones(1), "k": (1, 2), "other": 3}},
    )


@pytest.fixture(autouse=True)
def _levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
