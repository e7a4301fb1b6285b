"""Checkpoints of torch.distributed.checkpoint's own writers are read, and its readers read ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from ckptstore.errors import CkptError, IntegrityError, NotFoundError, UsageError
from ckptstore.reading import Checkpoint
from ckptstore.torch import (
    Checkpointer,
    SafeLoadPlanner,
    SharedSave,
    StoreReader,
    StoreWriter,
    load_part,
    reader,
)
from tests.torch.support import RUN, blank, dcp, file_store, make_state, same, stored

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:torch.distributed is unavailable"
)


def trained(seed: int, steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model with an optimizer that has a state."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def pushed(tmp_path: Path, state: dict[str, Any], **how: Any) -> Checkpoint:
    """A directory that a stock writer wrote, in a store."""
    source = tmp_path / "stock"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(source, **how), no_dist=True)
    return file_store(tmp_path / "store").push(source, RUN, 1).checkpoint


def saved(tmp_path: Path, state: dict[str, Any]) -> Checkpoint:
    store = file_store(tmp_path / "store")
    with Checkpointer(store, RUN) as checkpointer:
        checkpointer.save(1, state)
    return store.get(RUN, step=1)


@pytest.mark.parametrize("files", [True, False], ids=["file per rank", "file per tensor"])
def test_a_stock_checkpoint_is_read_with_its_values(tmp_path: Path, files: bool) -> None:
    model, optimizer = trained(1)
    state = state_of(model, optimizer)
    checkpoint = pushed(tmp_path, state, single_file_per_rank=files)
    other, other_optimizer = trained(2)
    found = state_of(other, other_optimizer)
    dcp.load(
        found,
        storage_reader=StoreReader(checkpoint),
        planner=SafeLoadPlanner(),
        no_dist=True,
    )
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )
    assert same(state_of(other, other_optimizer)["model"], state["model"])
    assert repr(other_optimizer.state_dict()) == repr(optimizer.state_dict())
    assert other_optimizer.param_groups[0]["lr"] == 0.02


def test_many_tensors_of_a_stock_checkpoint_are_read_through_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{i:03}": torch.full((i,), float(i)) for i in range(100)}
    checkpoint = pushed(tmp_path, state)
    opened: list[str] = []
    whole = Checkpoint.open

    def noted(self: Checkpoint, path: str) -> Any:
        opened.append(path)
        return whole(self, path)

    monkeypatch.setattr(Checkpoint, "open", noted)
    found = blank(state)
    load_part_at_root(checkpoint, found)
    assert same(found, state)
    assert opened.count("__0_0.distcp") == 1


def load_part_at_root(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=StoreReader(checkpoint), no_dist=True)


def test_values_that_a_stock_writer_pickled_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    state = {"w": torch.ones(2), "lr": 0.5}
    with SharedSave(store, RUN, 1) as save:
        dcp.save(state, storage_writer=StoreWriter(save, "actor"), no_dist=True)
    checkpoint = store.get(RUN, step=1)
    with pytest.raises(UsageError, match="actor of run@1 has values that a stock writer pickled"):
        load_part(checkpoint, "actor", {"w": torch.zeros(2), "lr": 0.0})
    found = {"w": torch.zeros(2), "lr": 0.0}
    reader = StoreReader(checkpoint, "actor")
    dcp.load(found, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
    assert same(found, state)


def test_a_stock_pickle_with_code_in_it_runs_nothing(tmp_path: Path) -> None:
    import os

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "mark"),)

    checkpoint = pushed(tmp_path, {"w": torch.ones(1), "x": Attack()})
    with pytest.raises(BaseException, match=r"x in __0_0\.distcp cannot be understood"):
        dcp.load(
            {"w": torch.zeros(1), "x": None},
            storage_reader=StoreReader(checkpoint),
            planner=SafeLoadPlanner(),
            no_dist=True,
        )
    assert not (tmp_path / "mark").exists()


def test_stock_tools_read_what_a_checkpointer_saved(tmp_path: Path) -> None:
    state = make_state(3)
    checkpoint = saved(tmp_path, state)
    assert checkpoint.path is not None
    model = state["model"]
    tensors = {"layer": model["layer"], "count": model["count"]}

    found = blank(tensors)
    part = Path(checkpoint.path) / "model"
    dcp.load(found, storage_reader=dcp.FileSystemReader(part), no_dist=True)
    assert same(found, tensors)

    found = blank(tensors)
    dcp.load(found, storage_reader=StoreReader(checkpoint, "model"), no_dist=True)
    assert same(found, tensors)

    dcp_to_torch_save(part, tmp_path / "whole.pt")
    assert same(torch.load(tmp_path / "whole.pt", weights_only=True), tensors)


def test_two_parts_saved_with_dcp_are_one_checkpoint(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    actor, critic = make_state(1)["model"], make_state(2)["model"]
    with SharedSave(store, RUN, 7) as save:
        dcp.save(dict(actor), storage_writer=StoreWriter(save, "actor"), no_dist=True)
        assert store.latest(RUN) is None
        dcp.save(dict(critic), storage_writer=StoreWriter(save, "critic"), no_dist=True)
        save.add_bytes("note.txt", b"two")
    checkpoint = store.get(RUN, step=7)
    assert save.committed == checkpoint.commit
    for part, state in (("actor", actor), ("critic", critic)):
        found = blank(state)
        dcp.load(
            found,
            storage_reader=StoreReader(checkpoint, part),
            planner=SafeLoadPlanner(),
            no_dist=True,
        )
        assert same(found, state)
    assert checkpoint.read_bytes("note.txt") == b"two"


def test_a_save_whose_block_fails_leaves_nothing(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    save = SharedSave(store, RUN, 1)
    with pytest.raises(ZeroDivisionError), save:  # noqa: PT012
        dcp.save({"w": torch.ones(1)}, storage_writer=StoreWriter(save, "a"), no_dist=True)
        raise ZeroDivisionError
    assert store.latest(RUN) is None
    assert save.committed is None


def test_a_checkpoint_id_is_refused(tmp_path: Path) -> None:
    with SharedSave(file_store(tmp_path), RUN, 1) as save:
        with pytest.raises(UsageError, match="a store has no checkpoint_id"):
            dcp.save(
                {"w": torch.ones(1)},
                checkpoint_id="x",
                storage_writer=StoreWriter(save, "a"),
                no_dist=True,
            )
        save.add_bytes("x", b"")


def test_an_index_that_promises_more_than_was_written_is_not_saved(tmp_path: Path) -> None:
    class Forgetful(StoreWriter):
        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            super().finish(metadata, [results[0][1:]])

    save = SharedSave(file_store(tmp_path), RUN, 1)
    state = {"a": torch.ones(2, 2), "b": torch.ones(1)}
    with pytest.raises(BaseException, match=r"no rank wrote a from \(0, 0\) on"), save:
        dcp.save(state, storage_writer=Forgetful(save, "m"), no_dist=True)
    with SharedSave(file_store(tmp_path), RUN, 2) as again:
        with pytest.raises(CkptError, match="0 of 1 ranks have written"):
            StoreWriter(again).finish(Metadata({}), [])
        again.add_bytes("x", b"")


def test_a_part_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, make_state())
    with pytest.raises(NotFoundError, match="run@1 has no part 'critic'") as raised:
        load_part(checkpoint, "critic", {})
    assert raised.value.hint == "it has: model, optimizer"


def test_an_index_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(tmp_path, make_state())
    monkeypatch.setattr(reader, "SIZE_LIMIT", 100)
    with pytest.raises(IntegrityError, match="is too long for an index"):
        load_part(checkpoint, "model", {})


@pytest.mark.parametrize("how", ["file", "offset", "before", "length", "shape"])
def test_a_hostile_index_with_the_right_digest_is_an_integrity_error(
    tmp_path: Path, how: str
) -> None:
    """Whoever can write records can also write an index that points elsewhere."""
    import dataclasses

    from ckptstore.torch.metadata import decode_metadata, encode_metadata

    checkpoint = saved(tmp_path, make_state())
    files = stored(checkpoint)
    index = decode_metadata(files["model/.metadata"], "it")
    for key, info in index.storage_data.items():
        change: dict[str, Any] = {
            "file": {"relative_path": "../../../etc/passwd"},
            "offset": {"offset": info.offset + 64},
            "before": {"offset": max(0, info.offset - 4)},
            "length": {"length": 1 << 40},
            "shape": {"offset": 3, "length": 100},
        }[how]
        index.storage_data[key] = dataclasses.replace(info, **change)
    files["model/.metadata"] = encode_metadata(index)
    store = file_store(tmp_path / "other")
    with store.save(RUN, 1) as save:
        for path, data in files.items():
            save.add_bytes(path, data)
    with pytest.raises(IntegrityError):
        load_part(store.get(RUN, step=1), "model", blank(make_state()["model"]))
