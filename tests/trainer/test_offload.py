"""An optimizer's state that rests in host memory: there between steps, and the same bits.

Where the device is a CPU, host memory is other memory of the same kind: what can be seen here is
that the state moves, when, and that no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.torch.processes import run_ranks, values
from tests.trainer.test_loop import everything, make_config, make_ppo, numbers
from tests.trainer.test_rollout_hf import PAD
from trainer.batch import Batch
from trainer.comm import Comm, connect, disconnect
from trainer.digest import learner_digest
from trainer.offload import HostState
from trainer.roles import Learner


@pytest.fixture(scope="module")
def comm(one_thread: None) -> Iterator[Comm]:
    """This process alone."""
    yield connect(60)
    disconnect()


def places(optimizer: torch.optim.Optimizer) -> set[int]:
    """The pieces of memory that AdamW's averages lie in."""
    return {
        own[key].to_local().untyped_storage().data_ptr()
        for own in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    }


def optimizer_of(learner: Learner) -> torch.optim.Optimizer:
    return learner._optimizer


def test_training_is_the_same_to_the_last_bit(comm: Comm) -> None:
    config = make_config("actor.mini_batch_size=4")
    found = []
    for offload in (False, True):
        ppo = make_ppo(comm, config, offload=offload)
        found.append([(numbers(ppo.step(i)), everything(ppo)) for i in (1, 2)])
    assert found[0] == found[1]


def test_between_steps_it_is_in_one_piece_of_memory_and_elsewhere_in_them(comm: Comm) -> None:
    ppo = make_ppo(comm, make_config("actor.mini_batch_size=4"), offload=True)
    optimizer = optimizer_of(ppo._roles.actor)
    during: list[set[int]] = []
    step = optimizer.step

    def noted(*args: Any) -> Any:
        done = step(*args)
        during.append(places(optimizer))
        return done

    setattr(optimizer, "step", noted)  # noqa: B010 - mypy takes no assignment
    ppo._roles.actor.optimizer_state()
    resting = places(optimizer)
    assert len(resting) == 1
    for number in (1, 2):
        ppo.step(number)
        assert places(optimizer) == resting, "the same as before"
    assert len(during) == 6
    assert all(len(there) > 1 and not there & resting for there in during)


def update(learner: Learner) -> None:
    """A step of the optimizer, on samples that are the same each time."""
    batch = Batch.build([[5, 6, 7], [8]], [[9, 10], [11]], PAD, torch.device("cpu"))

    def loss_of(micro: Batch, rows: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return learner.model(input_ids=micro.tokens).logits.square().mean(), {}

    learner.update(batch, slice(None), 0, loss_of)


def test_what_is_loaded_while_it_rests_counts_in_the_next_step(comm: Comm) -> None:
    source, target = (
        make_ppo(comm, make_config(), offload=offload)._roles.actor for offload in (False, True)
    )
    update(source)
    for _ in range(2):
        update(target)
    assert learner_digest(source) != learner_digest(target)
    with torch.no_grad():
        for name, tensor in target.model_state().items():
            tensor.copy_(source.model_state()[name])
        for name, own in target.optimizer_state().items():
            for key, value in own.items():
                value.copy_(source.optimizer_state()[name][key])
    target.load_schedule(source.schedule_state())
    assert learner_digest(source) == learner_digest(target)
    update(source)
    update(target)
    assert learner_digest(source) == learner_digest(target)


def both_ways() -> list[Any]:
    """Steps of a model whose rows the ranks cannot share evenly."""
    return [uneven(offload) for offload in (True, False)]


def uneven(offload: bool) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(13, 6), torch.nn.Linear(6, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    host_state = HostState(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(13)).square().sum().backward()
        if offload:
            with host_state.on_device():
                optimizer.step()
        else:
            optimizer.step()
    found = []
    for parameter in model.parameters():
        average = optimizer.state[parameter]["exp_avg"]
        assert isinstance(parameter, DTensor)
        assert isinstance(average, DTensor)
        same = average.placements == parameter.placements
        found.append((parameter.full_tensor().detach(), average.full_tensor().detach(), same))
    return found


def test_shards_rest_and_stay_shards() -> None:
    for with_it, without in values(run_ranks(both_ways, 3)):
        for (weight, average, same), (weight_, average_, _) in zip(with_it, without, strict=True):
            assert same
            assert torch.equal(weight, weight_)
            assert torch.equal(average, average_)
