"""Several ranks: one checkpoint of all, at any world size, or none."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement

from ckptstore.errors import CkptError, IntegrityError, TemporaryError, UsageError
from ckptstore.reading import Checkpoint
from ckptstore.store import Store
from ckptstore.testing.hooks import Phase
from ckptstore.torch import Checkpointer, Ranks, SharedSave, StoreReader, StoreWriter, load_part
from ckptstore.torch.metadata import decode_metadata
from tests.conftest import FULL
from tests.torch.processes import Ended, run_ranks, values
from tests.torch.support import RUN, dcp, file_store, flip, hooked_store, same, stored

HOST = socket.gethostname()


@cache
def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def sharded_model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose rows do not divide evenly, with an optimizer, after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(13, 6), torch.nn.Linear(6, 3), torch.nn.LayerNorm(3)
    )
    for layer in model:
        fully_shard(layer, mesh=mesh_of(dist.get_world_size()))
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(13)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": moments}


def whole(state: Any) -> Any:
    """A state with each DTensor put together."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        return state.full_tensor().clone()
    return state.clone() if isinstance(state, torch.Tensor) else state


# A model of FSDP2 and its optimizer


def save_sharded(root: Path, wait: bool) -> Any:
    model, optimizer = sharded_model(1)
    state = state_of(model, optimizer)
    with Checkpointer(file_store(root), RUN) as checkpointer:
        checkpointer.save(1, state, wait=wait)
        if not wait:
            expected = whole(state)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0)
            checkpointer.wait()
            return expected
    return whole(state)


def load_sharded(root: Path) -> Any:
    model, optimizer = sharded_model(2)
    state = state_of(model, optimizer)
    with Checkpointer(file_store(root), RUN) as checkpointer:
        assert checkpointer.load(state) is not None
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=True),
    )
    return whole(state_of(model, optimizer))


@pytest.mark.parametrize("wait", [True, False])
def test_a_model_and_its_optimizer_move_between_world_sizes(tmp_path: Path, wait: bool) -> None:
    expected = values(run_ranks(save_sharded, 2, tmp_path, wait))
    assert same(expected[0], expected[1])
    checkpoint = file_store(tmp_path).get(RUN, step=1)
    files = {entry.path for entry in checkpoint.files}
    assert {"model/__0_0.distcp", "model/__1_0.distcp"} <= files
    for size in (1, 2, 3, 4) if FULL else (1, 3) if wait else (4,):
        for found in values(run_ranks(load_sharded, size, tmp_path)):
            assert same(found, expected[0])


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    """Of a tensor with 3 rows the fourth rank has none."""
    expected = values(run_ranks(save_sharded, 4, tmp_path, True))
    for found in values(run_ranks(load_sharded, 2, tmp_path)):
        assert same(found, expected[0])


# Tensors of every placement

PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "last": ((4,), (Shard(2),)),
    "everywhere": ((4,), (Replicate(),)),
    "grid": ((2, 2), (Shard(0), Shard(1))),
    "crossed": ((2, 2), (Shard(1), Shard(0))),
    "twice": ((2, 2), (Shard(1), Shard(1))),
    "copies": ((2, 2), (Replicate(), Shard(2))),
}


def full_tensor() -> torch.Tensor:
    return torch.arange(7 * 9 * 5, dtype=torch.float32).reshape(7, 9, 5)


def placed(content: torch.Tensor) -> dict[str, Any]:
    """One tensor a placement, on four ranks."""
    return {
        name: distribute_tensor(content + number, mesh_of(*shape), placements)
        for number, (name, (shape, placements)) in enumerate(PLACEMENTS.items())
    }


def rows(content: torch.Tensor) -> dict[str, Any]:
    """One tensor of which each rank has some rows."""
    return {"rows": distribute_tensor(content, mesh_of(dist.get_world_size()), [Shard(0)])}


def save_placed(root: Path) -> None:
    with Checkpointer(file_store(root), RUN) as checkpointer:
        checkpointer.save(1, {"m": placed(full_tensor()), "copy": {"x": torch.ones(10)}})


def load_placed_as_another(root: Path) -> None:
    """Each stored placement into each other one."""
    checkpoint = file_store(root).get(RUN, step=1)
    empty = torch.zeros(7, 9, 5)
    names = list(PLACEMENTS)
    for turn in range(len(names)):
        state = placed(empty)
        state = {names[i]: state[names[i - turn]] for i in range(len(names))}
        load_part(checkpoint, "m", state)
        for number, name in enumerate(names):
            assert torch.equal(state[name].full_tensor(), full_tensor() + number), (turn, name)


def test_tensors_move_between_placements(tmp_path: Path) -> None:
    values(run_ranks(save_placed, 4, tmp_path))
    checkpoint = file_store(tmp_path).get(RUN, step=1)
    found = {name: torch.zeros(7, 9, 5) for name in PLACEMENTS}
    load_part(checkpoint, "m", found)
    for number, name in enumerate(PLACEMENTS):
        assert torch.equal(found[name], full_tensor() + number)
    values(run_ranks(load_placed_as_another, 4, tmp_path))


def test_what_all_ranks_have_is_written_once(tmp_path: Path) -> None:
    values(run_ranks(save_placed, 4, tmp_path))
    files = stored(file_store(tmp_path).get(RUN, step=1))
    index = decode_metadata(files["m/.metadata"], "it")
    pieces = [key for key in index.storage_data if key.fqn == "everywhere"]
    assert len(pieces) == 1
    assert len([path for path in files if path.startswith("copy/__")]) == 1
    data = sum(len(d) for path, d in files.items() if path.startswith("m/__"))
    assert data < len(PLACEMENTS) * full_tensor().nbytes + 700 * len(index.storage_data)


def save_twice_equal(root: Path) -> None:
    with Checkpointer(file_store(root), RUN) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"m": placed(full_tensor())}, wait=step == 1)
        changed = placed(full_tensor())
        changed["rows"] = placed(full_tensor() + 1)["columns"]
        checkpointer.save(3, {"m": changed}, wait=False)


def test_equal_states_give_equal_files_and_a_new_placement_is_seen(tmp_path: Path) -> None:
    values(run_ranks(save_twice_equal, 4, tmp_path))
    store = file_store(tmp_path)
    one, two, three = (stored(checkpoint) for checkpoint in store.list(RUN))
    assert one == two
    assert one != three
    found = {name: torch.zeros(7, 9, 5) for name in PLACEMENTS}
    load_part(store.get(RUN, step=3), "m", found)
    assert torch.equal(found["rows"], full_tensor() + 2)


def change_on_one_rank(root: Path) -> None:
    """What only rank 1 has changes: rank 0's plan is the same, and the agreement is not."""
    with Checkpointer(file_store(root), RUN) as checkpointer:
        for step, size in enumerate([3, 3, 5, 3]):
            mine = {f"rank{dist.get_rank()}": torch.full((size if dist.get_rank() else 2,), step)}
            checkpointer.save(step, {"m": mine}, wait=step % 2 == 0)


def test_a_state_that_changes_on_one_rank_only(tmp_path: Path) -> None:
    values(run_ranks(change_on_one_rank, 2, tmp_path))
    store = file_store(tmp_path)
    for step, size in enumerate([3, 3, 5, 3]):
        found = {"rank0": torch.zeros(2), "rank1": torch.zeros(size)}
        load_part(store.get(RUN, step=step), "m", found)
        assert found["rank0"].tolist() == [step] * 2
        assert found["rank1"].tolist() == [step] * size


# Stock tools on several ranks


def save_with_dcp(root: Path) -> None:
    group = dist.new_group(backend="gloo")
    store = file_store(root)
    with SharedSave(store, RUN, 1, group) as save:
        for part in ("actor", "critic"):
            state = {"w": placed(full_tensor())["grid"], "lr": 0.5}
            dcp.save(state, storage_writer=StoreWriter(save, part), process_group=group)
    found = {"w": placed(torch.zeros(7, 9, 5))["columns"], "lr": 0.0}
    checkpoint = store.get(RUN, step=1)
    dcp.load(found, storage_reader=StoreReader(checkpoint, "critic"), process_group=group)
    assert torch.equal(found["w"].full_tensor(), full_tensor() + list(PLACEMENTS).index("grid"))
    assert found["lr"] == 0.5
    assert save.committed == checkpoint.commit


def test_two_parts_saved_with_dcp_on_several_ranks(tmp_path: Path) -> None:
    values(run_ranks(save_with_dcp, 4, tmp_path))


# What goes wrong on one rank


def errors(ended: list[Ended | None]) -> list[str]:
    """What each rank raised, within seconds."""
    told = []
    for one in ended:
        assert one is not None
        assert one.error is not None, "a rank did not fail"
        assert one.seconds < 40
        told.append(one.error)
    return told


def save_unsupported_on_one(root: Path, wait: bool) -> None:
    checkpointer = Checkpointer(file_store(root), RUN)
    state: dict[str, Any] = {"m": {"x": torch.ones(2)}, "n": {"y": torch.ones(1)}}
    checkpointer.save(1, state)
    if dist.get_rank() == 1:
        state["n"]["y"] = object()
    checkpointer.save(2, state, wait=wait)
    checkpointer.close()


@pytest.mark.parametrize("wait", [True, False])
def test_a_value_that_one_rank_cannot_save_fails_all(tmp_path: Path, wait: bool) -> None:
    for told in errors(run_ranks(save_unsupported_on_one, 2, tmp_path, wait)):
        assert told.startswith(f"UsageError: rank 1 on {HOST}: n['y'] is a object")
    assert [c.step for c in file_store(tmp_path).list(RUN)] == [1]


def failing_on(rank: int, operation: str, ending: str, root: Path) -> Store:
    """A store of which one rank's operations on some keys fail."""

    def fail(found: str, key: str, phase: Phase) -> None:
        if (found, phase) == (operation, "before") and key.endswith(ending):
            raise TemporaryError("the storage is away")

    return hooked_store(root, fail) if dist.get_rank() == rank else file_store(root)


def save_with_fault(root: Path, rank: int, operation: str, ending: str, wait: bool) -> None:
    with Checkpointer(file_store(root), RUN) as checkpointer:
        state = {"other": {"w": torch.ones(3), "lr": 0.1}, "m": rows(full_tensor())}
        checkpointer.save(1, state)
        checkpointer.store = failing_on(rank, operation, ending, root)
        files: dict[str, bytes | str | os.PathLike[str]] = {f"file{dist.get_rank()}": b"x"}
        checkpointer.save(2, state, files=files, wait=wait)


@pytest.mark.parametrize(
    ("rank", "operation", "ending"),
    [
        (0, "make_directory", ""),
        (1, "open_writer", "m/__1_0.distcp"),
        (1, "write", "m/__1_0.distcp"),
        (0, "finish", "m/__0_0.distcp"),
        (0, "finish", "m/.metadata"),
        (0, "open_writer", "other/state.json"),
        (1, "finish", "file1"),
        (0, "finish", "MANIFEST.json"),
    ],
)
def test_a_storage_that_fails_one_rank_fails_all(
    tmp_path: Path, rank: int, operation: str, ending: str
) -> None:
    wait = rank == 0
    ended = run_ranks(save_with_fault, 2, tmp_path, rank, operation, ending, wait)
    for told in errors(ended):
        assert told == f"TemporaryError: rank {rank} on {HOST}: the storage is away"
    assert [c.step for c in file_store(tmp_path).list(RUN)] == [1]


def save_with_warn(root: Path) -> list[str]:
    with Checkpointer(file_store(root), RUN, on_error="warn") as checkpointer:
        whole_store = checkpointer.store
        for step in range(4):
            fault = step == 1
            checkpointer.store = (
                failing_on(1, "write", "__1_0.distcp", root) if fault else whole_store
            )
            checkpointer.save(step, {"m": rows(full_tensor() + step)}, wait=False)
            checkpointer.wait()
    return [str(c.step) for c in whole_store.list(RUN)]


def test_with_warn_all_ranks_go_on(tmp_path: Path) -> None:
    assert values(run_ranks(save_with_warn, 2, tmp_path)) == [["0", "2", "3"]] * 2


def save_same_path(root: Path) -> None:
    with Checkpointer(file_store(root), RUN) as checkpointer:
        files: dict[str, bytes | str | os.PathLike[str]] = {"same": str(dist.get_rank()).encode()}
        checkpointer.save(1, {"m": {"x": torch.ones(1)}}, files=files)


def save_same_path_directly(root: Path) -> None:
    with SharedSave(file_store(root), RUN, 1, dist.group.WORLD) as save:
        save.add_bytes("same", str(dist.get_rank()).encode())


def test_two_ranks_cannot_give_one_file(tmp_path: Path) -> None:
    for told in errors(run_ranks(save_same_path, 2, tmp_path)):
        assert told == "UsageError: the file 'same' is given by the ranks 0, 1"
    for told in errors(run_ranks(save_same_path_directly, 2, tmp_path)):
        assert "same" in told
        assert "exists already" in told
    assert file_store(tmp_path).latest(RUN) is None


def save_other_parts(root: Path) -> None:
    parts = ("a", "b") if dist.get_rank() == 0 else ("b", "a")
    with Checkpointer(file_store(root), RUN) as checkpointer:
        checkpointer.save(1, {part: {"x": torch.ones(1)} for part in parts})


def test_ranks_with_other_parts_are_told_apart(tmp_path: Path) -> None:
    for told in errors(run_ranks(save_other_parts, 2, tmp_path)):
        assert told == "UsageError: rank 1 saves the parts b, a, rank 0 a, b"


def save_partial(root: Path) -> None:
    mesh = mesh_of(dist.get_world_size())
    summand = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with Checkpointer(file_store(root), RUN) as checkpointer:
        checkpointer.save(1, {"m": {"x": summand}})


def test_a_sum_that_is_not_added_up_is_refused(tmp_path: Path) -> None:
    for told in errors(run_ranks(save_partial, 2, tmp_path)):
        assert "m['x'] is a sum that its ranks have not added up yet" in told


def die_while_saving(root: Path, when: str) -> None:
    def die(operation: str, key: str, phase: Phase) -> None:
        if dist.get_rank() == 1 and operation == when and key.endswith("__1_0.distcp"):
            os.kill(os.getpid(), signal.SIGKILL)

    store = hooked_store(root, die)
    checkpointer = Checkpointer(store, RUN, timeout=20)
    checkpointer.save(1, {"m": rows(full_tensor())}, wait=False)
    checkpointer.close()


@pytest.mark.parametrize("when", ["write", "finish"])
def test_a_rank_that_is_killed_fails_the_others(tmp_path: Path, when: str) -> None:
    ended = run_ranks(die_while_saving, 3, tmp_path, when)
    assert ended[1] is None
    for told in errors([one for rank, one in enumerate(ended) if rank != 1]):
        assert told.startswith("CkptError: the ranks do not reach one another: ")
    assert file_store(tmp_path).latest(RUN) is None


def die_before_the_commit(root: Path) -> None:
    """Rank 0 is killed when all is written: no other rank may believe in the checkpoint."""

    def die(operation: str, key: str, phase: Phase) -> None:
        if dist.get_rank() == 0 and key.endswith("MANIFEST.json") and operation == "finish":
            os.kill(os.getpid(), signal.SIGKILL)

    with Checkpointer(hooked_store(root, die), RUN, timeout=20) as checkpointer:
        checkpointer.save(1, {"m": rows(full_tensor())})


def test_the_coordinator_is_killed_before_the_commit(tmp_path: Path) -> None:
    ended = run_ranks(die_before_the_commit, 2, tmp_path)
    assert ended[0] is None
    for told in errors(ended[1:]):
        assert told.startswith("CkptError: the ranks do not reach one another: ")
    assert file_store(tmp_path).latest(RUN) is None


# Loading


def load_fallback(root: Path, damaged_for: int) -> int:
    """One rank alone finds the newest damaged."""
    store = file_store(root)

    def load(checkpoint: Checkpoint) -> None:
        if dist.get_rank() == damaged_for and checkpoint.step == 2:
            raise IntegrityError("my share is damaged")

    with Checkpointer(store, RUN) as checkpointer:
        found = checkpointer.newest_intact(load)
    assert found is not None
    return found.step


def load_or_fail(root: Path) -> Any:
    state = rows(torch.zeros(7, 9, 5))
    with Checkpointer(file_store(root), RUN) as checkpointer:
        found = checkpointer.load({"m": state})
    return found and (found.step, whole(state)["rows"].tolist())


def test_what_one_rank_finds_damaged_all_pass_over(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    assert values(run_ranks(load_or_fail, 2, tmp_path)) == [None] * 2
    content = {step: full_tensor() * step for step in (1, 2)}
    with Checkpointer(store, RUN) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"m": {"rows": content[step]}})
    assert values(run_ranks(load_fallback, 2, tmp_path, 1)) == [1, 1]
    assert values(run_ranks(load_or_fail, 3, tmp_path)) == [(2, content[2].tolist())] * 3
    flip(store.get(RUN, step=2), "m/__0_0.distcp")
    assert values(run_ranks(load_or_fail, 2, tmp_path)) == [(1, content[1].tolist())] * 2
    flip(store.get(RUN, step=1), "m/__0_0.distcp")
    for told in errors(run_ranks(load_or_fail, 2, tmp_path)):
        assert told.startswith(f"IntegrityError: rank 0 on {HOST}: run 'run' has 2 checkpoint(s)")


# Beside training


def save_beside_collectives(root: Path) -> None:
    """Saves in the background while the main thread reduces, and uses the checkpointer's ranks."""

    def slow(operation: str, key: str, phase: Phase) -> None:
        if operation == "write" and phase == "before":
            time.sleep(0.05)

    with Checkpointer(hooked_store(root, slow), RUN) as checkpointer:
        total = torch.zeros(100)
        for step in range(3):
            pending = checkpointer.save(step, {"m": rows(full_tensor() + step)}, wait=False)
            rounds = 0
            while not checkpointer.ranks.all(pending.done) or rounds < 20:
                ones = torch.ones(100)
                dist.all_reduce(ones)
                total += ones
                assert checkpointer.ranks.everywhere(lambda: rounds) == [rounds] * 2  # noqa: B023
                rounds += 1
        assert bool((total == total[0]).all())


def test_saves_do_not_meet_training(tmp_path: Path) -> None:
    values(run_ranks(save_beside_collectives, 2, tmp_path))
    store = file_store(tmp_path)
    assert [c.step for c in store.list(RUN)] == [0, 1, 2]
    for checkpoint in store.list(RUN):
        found = {"rows": torch.zeros(7, 9, 5)}
        load_part(checkpoint, "m", found)
        assert torch.equal(found["rows"], full_tensor() + checkpoint.step)


def load_beside_a_save(root: Path) -> None:
    with Checkpointer(file_store(root), RUN) as checkpointer:
        for step in range(5):
            checkpointer.save(step, {"m": rows(full_tensor())}, wait=False)
            found = checkpointer.load({"m": rows(full_tensor())})
            assert found is not None
            assert found.step == step


def test_a_load_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    values(run_ranks(load_beside_a_save, 2, tmp_path))


def save_in_some_groups(root: Path) -> None:
    """A group that is not all ranks, and then all ranks, in different numbers of groups."""
    rank = dist.get_rank()
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    with Checkpointer(file_store(root), f"run{pair[0]}", group=groups[rank // 2]) as checkpointer:
        assert checkpointer.ranks.size == 2
        checkpointer.save(1, {"m": {f"rank{rank}": torch.ones(1)}})
        assert checkpointer.ranks.on_coordinator(lambda: rank) == pair[0]
    if rank == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    with Checkpointer(file_store(root), "all", timeout=30) as checkpointer:
        checkpointer.save(1, {"m": {"x": torch.ones(1)}})


def test_other_groups_of_the_same_ranks(tmp_path: Path) -> None:
    values(run_ranks(save_in_some_groups, 4, tmp_path))
    store = file_store(tmp_path)
    assert store.runs() == ["all", "run0", "run2"]
    load_part(store.get("run2", step=1), "m", {"rank2": torch.ones(1), "rank3": torch.ones(1)})


# The ranks themselves


class OddError(Exception):
    """An exception that cannot be sent to another process."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


def agree() -> list[str]:
    ranks = Ranks(dist.group.WORLD)
    mine = ranks.rank

    def raising(on: int, error: Exception) -> Callable[[], int]:
        def call() -> int:
            if mine == on:
                raise error
            return mine

        return call

    told = []
    calls: list[Callable[[], object]] = [
        lambda: ranks.on_coordinator(raising(0, UsageError("wrong", hint="do"))),
        lambda: ranks.everywhere(raising(2, IntegrityError("broken"))),
        lambda: ranks.gathered(raising(1, ZeroDivisionError("what"))),
        lambda: ranks.scattered(raising(0, OddError(1, 2))),  # type: ignore[arg-type]
        lambda: ranks.everywhere(lambda: threading.Lock() if mine == 1 else 1),
        lambda: ranks.on_coordinator(threading.Lock),
        lambda: ranks.scattered(lambda: [1, threading.Lock(), 3]),
    ]
    for call in calls:
        try:
            call()
            told.append("fine")
        except CkptError as error:
            told.append(f"{type(error).__name__}: {error} ({error.hint})")
        assert ranks.everywhere(lambda: mine) == [0, 1, 2]
        gathered = ranks.gathered(lambda: mine * 2)
        assert gathered == ([0, 2, 4] if mine == 0 else None)
        assert ranks.scattered(lambda: [5, 6, 7]) == 5 + mine
        assert ranks.all(True)
        assert not ranks.all(mine != 1)
    return told


def test_errors_are_raised_on_all_ranks_and_the_next_call_is_in_step() -> None:
    told = values(run_ranks(agree, 3))
    expected = [
        f"UsageError: rank 0 on {HOST}: wrong (do)",
        f"IntegrityError: rank 2 on {HOST}: broken (None)",
        f"CkptError: rank 1 on {HOST}: ZeroDivisionError: what (None)",
        f"CkptError: rank 0 on {HOST}: OddError: odd (None)",
        f"CkptError: rank 1 on {HOST}: TypeError: cannot pickle '_thread.lock' object (None)",
        f"CkptError: rank 0 on {HOST}: TypeError: cannot pickle '_thread.lock' object (None)",
    ]
    for rank in range(3):
        assert told[rank][:6] == expected
    assert [one[6].partition(":")[0] for one in told] == ["fine", "CkptError", "fine"]
