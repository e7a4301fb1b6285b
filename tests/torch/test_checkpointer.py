"""What one process saves: the state as it was, whole and equal."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CkptError, NoSpaceError, SupersededError, TemporaryError, UsageError
from ckptstore.records import BestRule
from ckptstore.store import Store
from ckptstore.testing.hooks import Phase
from ckptstore.torch import Checkpointer
from tests.conftest import FULL
from tests.torch.support import (
    RUN,
    State,
    blank,
    file_store,
    hooked_store,
    make_state,
    same,
    stored,
)
from tests.unit.support import examples, memory_store


class Gate:
    """A hook that holds a save before it reads its tensors, until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, operation: str, key: str, phase: Phase) -> None:
        if operation == "open_writer" and key.endswith(".distcp") and phase == "before":
            self.reached.set()
            assert self.opened.wait(30)


class Fault:
    """A hook that fails an operation on keys with an ending, as long as it is armed."""

    def __init__(self, operation: str, ending: str, error: Exception) -> None:
        self.armed = True
        self._what = (operation, ending, error)

    def __call__(self, operation: str, key: str, phase: Phase) -> None:
        wanted, ending, error = self._what
        if self.armed and operation == wanted and key.endswith(ending) and phase == "before":
            raise error


def save_and_wait(checkpointer: Checkpointer, step: int, state: Any, *, wait: bool) -> None:
    checkpointer.save(step, state, wait=wait)
    checkpointer.wait()


def loaded(store: Store, like: Any, step: int | None = None) -> Any:
    """What a checkpoint holds, in a state of the form of ``like``."""
    found = blank(like)
    with Checkpointer(store, RUN) as checkpointer:
        one = None if step is None else store.get(RUN, step=step)
        assert checkpointer.load(found, one) is not None
    return found


@pytest.mark.parametrize("wait", [True, False])
def test_a_state_comes_back_bit_by_bit(tmp_path: Path, wait: bool) -> None:
    store, state = file_store(tmp_path), make_state(4)
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, state, wait=wait)
    assert same(loaded(store, state), state)


@pytest.mark.parametrize("wait", [True, False])
def test_what_goes_with_a_state(tmp_path: Path, wait: bool) -> None:
    note = tmp_path / "note"
    note.write_text("by path")
    store = file_store(tmp_path / "store")
    rule = BestRule("reward", "max")
    with Checkpointer(store, RUN, best=rule) as checkpointer:
        pending = checkpointer.save(
            5,
            make_state(),
            files={"a/note.txt": note, "b": b"content", "c": str(note)},
            metadata={"seen": [1, 2]},
            metrics={"reward": 0.5},
            tags=["keep"],
            wait=wait,
        )
        commit = pending.result()
        assert pending.done
        assert pending.stall > 0
    checkpoint = store.get(RUN, step=5)
    assert checkpoint.commit == commit
    files = stored(checkpoint)
    assert (files["a/note.txt"], files["b"], files["c"]) == (b"by path", b"content", b"by path")
    assert checkpoint.metadata == {"seen": [1, 2]}
    assert checkpoint.metrics == {"reward": 0.5}
    assert checkpoint.tags == ["keep"]
    assert commit.best == rule


def test_training_may_change_the_state_as_soon_as_the_save_returns(tmp_path: Path) -> None:
    gate, state, was = Gate(), make_state(1), make_state(1)
    store = hooked_store(tmp_path, gate)
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, state, wait=False)
        assert gate.reached.wait(30)
        weight = state["model"]["layer"]["weight"]
        weight.fill_(-1)
        del state["optimizer"]["state"]
        state["optimizer"]["lr"] = 99.0
        state["model"]["count"] += 5
        gate.opened.set()
    assert same(loaded(store, was), was)


def test_reserving_does_not_touch_what_is_being_written(tmp_path: Path) -> None:
    gate, was = Gate(), make_state(1)
    store = hooked_store(tmp_path, gate)
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, make_state(1), wait=False)
        assert gate.reached.wait(30)
        opener = threading.Timer(0.2, gate.opened.set)
        opener.start()
        checkpointer.reserve(make_state(2))
        opener.join()
    assert same(loaded(store, was), was)


def test_reserved_memory_is_what_the_save_uses(tmp_path: Path) -> None:
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer:
        checkpointer.reserve(make_state())
        arena = checkpointer._writer._staging._arena
        assert arena is not None
        checkpointer.save(1, make_state(), wait=False)
        assert checkpointer._writer._staging._arena is arena


def test_one_save_is_in_flight_at_most(tmp_path: Path) -> None:
    gate, state = Gate(), make_state(1)
    store = hooked_store(tmp_path, gate)
    with Checkpointer(store, RUN) as checkpointer:
        first = checkpointer.save(1, state, wait=False)
        assert gate.reached.wait(30)
        opener = threading.Timer(0.3, gate.opened.set)
        opener.start()
        before = first.done
        second = checkpointer.save(2, make_state(2), wait=False)
        assert (before, first.done) == (False, True)
        assert second.stall >= 0.2
    assert same(loaded(store, state, 1), state)
    assert same(loaded(store, state, 2), make_state(2))


@pytest.mark.parametrize("wait", [True, False])
def test_equal_states_are_equal_files_and_changed_ones_are_not(tmp_path: Path, wait: bool) -> None:
    store = file_store(tmp_path)
    with Checkpointer(store, RUN) as checkpointer:
        for step, seed in enumerate([1, 1, 2, 1]):
            checkpointer.save(step, make_state(seed), wait=wait)
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(9, make_state(1), wait=not wait)
    files = [stored(checkpoint) for checkpoint in store.list(RUN)]
    assert files[0] == files[1] == files[3] == files[4]
    assert files[0]["model/__0_0.distcp"] != files[2]["model/__0_0.distcp"]


def change_shape(state: State) -> None:
    state["model"]["layer"]["weight"] = torch.ones(3, 3)


def change_dtype(state: State) -> None:
    state["model"]["layer"]["weight"] = state["model"]["layer"]["weight"].double()


def add_tensor(state: State) -> None:
    state["model"]["more"] = torch.ones(2)


def drop_tensor(state: State) -> None:
    del state["model"]["layer"]["bias"]


def rename_tensor(state: State) -> None:
    state["model"]["layer"]["bios"] = state["model"]["layer"].pop("bias")


def move_to_another_nest(state: State) -> None:
    state["model"]["layer.bias"] = state["model"]["layer"].pop("bias")


def add_part(state: State) -> None:
    state["critic"] = {"w": torch.ones(5)}


def drop_part(state: State) -> None:
    del state["model"]


def swap_parts(state: State) -> None:
    state["model"], state["optimizer"] = state["optimizer"], state["model"]


def reorder_parts(state: State) -> None:
    state["model"] = state.pop("model")


@pytest.mark.parametrize(
    "change",
    [
        change_shape,
        change_dtype,
        add_tensor,
        drop_tensor,
        rename_tensor,
        move_to_another_nest,
        add_part,
        drop_part,
        swap_parts,
        reorder_parts,
    ],
)
def test_a_state_may_change_its_form_between_saves(
    tmp_path: Path, change: Callable[[State], None]
) -> None:
    store = file_store(tmp_path)
    states = [make_state(1), make_state(2), make_state(3), make_state(4)]
    change(states[1])
    change(states[2])
    with Checkpointer(store, RUN) as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(step, state, wait=step % 2 == 0)
    for step, state in enumerate(states):
        assert same(loaded(store, state, step), state)


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.bool])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any memory layout."""
    shape, dtype = draw(SHAPES), draw(DTYPES)
    count = torch.Size(shape).numel()
    seed = draw(st.integers(0, 1000))
    tensor = ((torch.arange(count * 2) + seed) % 7 - 3).to(dtype)
    if draw(st.booleans()):  # every other element of a larger one
        tensor = tensor.view(-1, 2)[:, 0].view(shape)
    else:
        tensor = tensor[:count].view(shape)
    if len(shape) >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    return tensor


@examples(200 if FULL else 25)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["a", "b", "c", "a.b", ""]), tensors(), max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_any_sequence_of_states_comes_back(
    states: list[dict[str, torch.Tensor]], wait: bool
) -> None:
    store = memory_store()
    with Checkpointer(store, RUN) as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(step, {"part": state}, wait=wait)
        checkpointer.wait()
        for step, state in enumerate(states):
            found = {"part": blank(state)}
            checkpointer.load(found, store.get(RUN, step=step))
            assert same(found["part"], state)


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    with torch.inference_mode():
        inference = torch.ones(3) * 2
    return {
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "transposed": base.t(),
        "sliced": base[1::2, ::3],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "computed": torch.ones(2, requires_grad=True) * 3,
        "subclass": torch.ones(2, 2).as_subclass(Tagged),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "inference": inference,
        "flags": torch.tensor([True, False]),
        "wide": torch.tensor([2**63 + 1], dtype=torch.uint64),
    }


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", odd_tensors())
def test_tensors_of_every_kind(tmp_path: Path, name: str, wait: bool) -> None:
    tensor = odd_tensors()[name]
    store = file_store(tmp_path)
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, {"m": {"x": tensor}}, wait=wait)
    found = loaded(store, {"m": {"x": tensor}})["m"]["x"]
    assert (found.dtype, found.shape, found.tolist()) == (
        tensor.dtype,
        tensor.shape,
        tensor.tolist(),
    )


@pytest.mark.parametrize("wait", [True, False])
def test_a_tensor_and_its_conjugate_are_two(tmp_path: Path, wait: bool) -> None:
    """They have the same memory, type, shape and strides."""
    one = torch.tensor([1 + 2j])
    store, state = file_store(tmp_path), {"m": {"a": one, "b": one.conj()}}
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, state, wait=wait)
    found = loaded(store, state)["m"]
    assert (found["a"].tolist(), found["b"].tolist()) == ([1 + 2j], [1 - 2j])


def test_tied_weights_are_copied_once_and_stored_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(1000, 100)
    state = {"m": {"embedding": weight, "head": weight, "view": weight[:10]}}
    store = file_store(tmp_path)
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, state, wait=False)
        assert checkpointer._writer._staging.size < 1.1 * weight.nbytes
    assert same(loaded(store, state), state)


def test_a_save_within_inference_mode_and_one_after_it(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    with Checkpointer(store, RUN) as checkpointer:
        with torch.inference_mode():
            checkpointer.save(1, make_state(1), wait=False)
        checkpointer.save(2, make_state(2), wait=False)
    assert same(loaded(store, make_state()), make_state(2))


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    state, found = make_state(1), blank(make_state(1))
    state["model"]["empty"] = torch.empty(0)
    found["model"]["empty"] = torch.empty(0)
    found["model"]["layer"]["weight"] = torch.zeros(7, 33).t()
    with Checkpointer(file_store(tmp_path), RUN) as checkpointer, torch.device("meta"):
        checkpointer.save(1, state, wait=False)
        checkpointer.load(found)
    assert same(found, state)


REFUSED: dict[str, tuple[Any, str]] = {
    "sparse": ({"m": {"x": torch.eye(2).to_sparse()}}, r"m\['x'\] is nested or sparse"),
    "meta": ({"m": {"x": torch.ones(2, device="meta")}}, r"m\['x'\] is on the meta device"),
    "an object": ({"m": {"x": object()}}, r"m\['x'\] is a object, which is neither"),
    "a list of tensors": ({"m": {"x": [torch.ones(1)]}}, r"m\['x'\]\[0\] is a tensor in a list"),
    "a number as key": ({"m": {0: torch.ones(1)}}, r"m\[0\]: a key of a saved state must be"),
    "no mapping": ({"m": torch.ones(1)}, r"state\['m'\] is a Tensor: a part is a mapping"),
    "a path out": ({"../m": {}}, r"\.\./m"),
    "two ways to a name": (
        {"m": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}},
        r"m: two tensors are called a\.b",
    ),
}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_a_sentence(tmp_path: Path, what: str, wait: bool) -> None:
    state, words = REFUSED[what]
    store = file_store(tmp_path)
    checkpointer = Checkpointer(store, RUN)
    checkpointer.save(1, make_state(1))
    with pytest.raises(UsageError, match=words):
        save_and_wait(checkpointer, 2, state, wait=wait)
    checkpointer.save(3, make_state(3), wait=wait)  # and the next one is as good as ever
    checkpointer.close()
    assert [c.step for c in store.list(RUN)] == [1, 3]
    assert same(loaded(store, make_state()), make_state(3))


def test_a_bad_step_tag_or_file_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    with Checkpointer(store, RUN) as checkpointer:
        calls: list[dict[str, Any]] = [
            {"tags": ["not a tag!"]},
            {"metadata": {"x": object()}},
            {"files": {"../x": b""}},
            {"files": {"x": tmp_path / "missing"}},
            {"files": {"model/.metadata": b""}},
        ]
        for how in calls:
            with pytest.raises(CkptError):
                checkpointer.save(1, make_state(), **how)
        with pytest.raises(UsageError):
            checkpointer.save(-1, make_state())
    assert store.latest(RUN) is None


def test_after_a_failed_background_save_the_next_call_raises_and_the_one_after_saves(
    tmp_path: Path,
) -> None:
    fault = Fault("finish", "model/__0_0.distcp", NoSpaceError("no space left: x"))
    store = hooked_store(tmp_path, fault)
    fault.armed = False
    checkpointer = Checkpointer(store, RUN)
    checkpointer.save(1, make_state(1))
    fault.armed = True
    pending = checkpointer.save(2, make_state(2), wait=False)
    with pytest.raises(NoSpaceError, match="no space left"):
        checkpointer.save(3, make_state(3), wait=False)
    with pytest.raises(NoSpaceError):
        pending.result()
    assert checkpointer.wait() is None
    fault.armed = False
    checkpointer.save(4, make_state(4), wait=False)
    checkpointer.close()
    assert [c.step for c in store.list(RUN)] == [1, 4]
    assert same(loaded(store, make_state(), 1), make_state(1))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("operation", "ending"),
    [
        ("make_directory", ""),
        ("open_writer", ".distcp"),
        ("write", ".distcp"),
        ("write", ".metadata"),
        ("finish", "state.json"),
        ("finish", "note"),
        ("finish", "MANIFEST.json"),
    ],
)
def test_with_warn_training_goes_on_and_older_checkpoints_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, operation: str, ending: str, wait: bool
) -> None:
    fault = Fault(operation, ending, TemporaryError("the storage is away"))
    fault.armed = False
    store = hooked_store(tmp_path, fault)
    with Checkpointer(store, RUN, on_error="warn") as checkpointer:
        for step in range(4):
            fault.armed = step in {1, 2}
            checkpointer.save(step, make_state(step), files={"note": b"x"}, wait=wait)
            checkpointer.wait()
    assert [c.step for c in store.list(RUN)] == [0, 3]
    assert same(loaded(store, make_state()), make_state(3))
    told = [r.getMessage() for r in caplog.records if "was not saved" in r.getMessage()]
    first = "step 1 of run was not saved: the storage is away"
    assert told == [first, "step 2 of run was not saved either"]


def test_a_foreign_exception_of_a_backend_is_deferred_like_any_other(tmp_path: Path) -> None:
    store = hooked_store(tmp_path, Fault("write", ".distcp", ZeroDivisionError("what")))
    checkpointer = Checkpointer(store, RUN)
    checkpointer.save(1, make_state(), wait=False)
    with pytest.raises(ZeroDivisionError):
        checkpointer.close()
    assert store.latest(RUN) is None


def test_a_newer_life_ends_the_older_even_with_warn(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    life = store.begin_life(RUN)
    checkpointer = Checkpointer(store, RUN, life=life, on_error="warn")
    checkpointer.save(1, make_state(1), wait=False)
    checkpointer.wait()
    newer = store.begin_life(RUN)
    checkpointer.save(2, make_state(2), wait=False)
    with pytest.raises(SupersededError, match=f"life {newer} of run 'run' began"):
        checkpointer.save(3, make_state(3), wait=False)
    checkpointer.close()
    assert [c.step for c in store.list(RUN)] == [1]


def test_a_life_that_begins_in_the_middle_of_a_save(tmp_path: Path) -> None:
    gate = Gate()
    store = hooked_store(tmp_path, gate)
    checkpointer = Checkpointer(store, RUN, life=store.begin_life(RUN))
    checkpointer.save(1, make_state(), wait=False)
    assert gate.reached.wait(30)
    file_store(tmp_path).begin_life(RUN)
    gate.opened.set()
    with pytest.raises(SupersededError):
        checkpointer.close()
    assert store.latest(RUN) is None


def test_what_the_block_raised_is_not_hidden_by_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = hooked_store(tmp_path, Fault("write", ".distcp", TemporaryError("away")))
    with pytest.raises(KeyError), Checkpointer(store, RUN) as checkpointer:  # noqa: PT012
        checkpointer.save(1, make_state(), wait=False)
        raise KeyError
    assert "step 1 of run was not saved: away" in caplog.text


def test_a_closed_checkpointer_says_so(tmp_path: Path) -> None:
    checkpointer = Checkpointer(file_store(tmp_path), RUN)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(UsageError, match="the checkpointer of run is closed"):
        checkpointer.save(1, make_state())


def run_python(code: str, *args: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120, check=True
    )


def test_memory_is_flat_and_a_forgotten_save_is_told(tmp_path: Path) -> None:
    """The copy is one state; after the first saves nothing more is asked for."""
    code = """
import logging, sys, resource
import torch
from ckptstore.torch import Checkpointer
logging.basicConfig(format="%(message)s")

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6

state = {"m": {str(i): torch.randn(2_000_000) for i in range(4)}}  # 32 MB
checkpointer = Checkpointer(sys.argv[1], "r")
before = resident()
found = []
for step in range(20):
    state["m"]["0"] += 1
    checkpointer.save(step, state, wait=False)
    checkpointer.wait()
    found.append(resident() - before)
    for old in checkpointer.store.list("r")[:-1]:
        checkpointer.store.delete(old, grace=0, force=True)
print(max(found[:10]), max(found[10:]))
checkpointer.store.backend.open_writer = None  # the next save fails, and nobody waits for it
checkpointer.save(99, state, wait=False)
"""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        done = run_python(code, place)
    early, late = map(float, done.stdout.split())
    assert early < 32 + 90  # the copy, blocks of 16 MiB, and what the allocator keeps of them
    assert late < early + 20
    assert "step 99 of r was not saved: TypeError" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_fails_the_save_and_frees_what_it_took(tmp_path: Path, wait: bool) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(tmp_path)], check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        store = file_store(tmp_path / "store")
        small, large = {"m": {"x": torch.ones(100)}}, {"m": {"x": torch.ones(4_000_000)}}
        checkpointer = Checkpointer(store, RUN)
        checkpointer.save(1, small)
        with pytest.raises(NoSpaceError):
            save_and_wait(checkpointer, 2, large, wait=wait)
        checkpointer.save(3, small, wait=wait)
        checkpointer.close()
        assert [c.step for c in store.list(RUN)] == [1, 3]
        assert same(loaded(store, small), small)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_the_order_of_keys_does_not_matter_to_the_bytes(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    names = ["b", "c", "a", "aa"]
    with Checkpointer(store, RUN) as checkpointer:
        for step, keys in enumerate([names, sorted(names), names[::-1]]):
            state = {"m": {key: torch.full((2,), ord(key[0])) for key in keys}}
            checkpointer.save(step, state)
    assert len({stored(c)["m/__0_0.distcp"] for c in store.list(RUN)}) == 1
