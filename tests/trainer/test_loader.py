"""The loader: its orders, and its position through interruptions."""

from __future__ import annotations

import json
import random

import pytest

from ckptstore.errors import UsageError
from trainer.loader import Loader, epoch_order


def test_an_epochs_order_is_a_function_of_seed_and_epoch() -> None:
    orders = {(s, e): epoch_order(50, e, s, shuffle=True) for s in range(3) for e in range(3)}
    random.seed(5)
    before = random.getstate()
    assert all(epoch_order(50, e, s, shuffle=True) == o for (s, e), o in orders.items())
    assert random.getstate() == before
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 9
    assert epoch_order(4, 7, 1, shuffle=False) == [0, 1, 2, 3]


def test_orders_stay_what_they_are() -> None:
    # A resumed run on another Python must not see another order.
    assert epoch_order(8, 0, 0, shuffle=True) == [0, 2, 1, 4, 6, 7, 3, 5]


def test_an_epochs_end_that_fills_no_batch_is_left_out() -> None:
    loader = Loader(10, 4, shuffle=False, seed=0)
    assert loader.steps_per_epoch == 2
    batches = [loader.next_batch() for _ in range(3)]
    assert batches == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (1, [0, 1, 2, 3])]
    assert loader.state_dict()["consumed"] == 12


def test_epoch_ended() -> None:
    loader = Loader(9, 4, shuffle=True, seed=0)
    ended = []
    for _ in range(4):
        loader.next_batch()
        ended.append(loader.epoch_ended)
    assert ended == [False, True, False, True]


def through_json(state: dict[str, int | bool]) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(json.dumps(state))
    return loaded


def test_saved_at_an_epochs_end_goes_on_with_the_next_one() -> None:
    loader = Loader(8, 4, shuffle=True, seed=1)
    loader.next_batch()
    loader.next_batch()
    resumed = Loader(8, 4, shuffle=True, seed=1)
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert resumed.next_batch() == (1, epoch_order(8, 1, 1, shuffle=True)[:4])


@pytest.mark.parametrize(("count", "batch_size"), [(8, 4), (11, 3), (5, 5)])
def test_three_epochs_are_equal_wherever_they_are_interrupted(count: int, batch_size: int) -> None:
    def new() -> Loader:
        return Loader(count, batch_size, shuffle=True, seed=3)

    steps = 3 * new().steps_per_epoch
    straight = new()
    expected = [straight.next_batch() for _ in range(steps)]
    for cut in range(steps + 1):
        first, second = new(), new()
        seen = [first.next_batch() for _ in range(cut)]
        second.load_state_dict(through_json(first.state_dict()))
        seen += [second.next_batch() for _ in range(steps - cut)]
        assert seen == expected
        assert second.state_dict() == straight.state_dict()


def test_another_batch_size_goes_on_after_the_samples_seen() -> None:
    loader = Loader(12, 4, shuffle=True, seed=2)
    _, seen = loader.next_batch()
    resumed = Loader(12, 3, shuffle=True, seed=2)
    resumed.load_state_dict(loader.state_dict())
    rest = [resumed.next_batch() for _ in range(2)]
    assert [epoch for epoch, _ in rest] == [0, 0]
    order = epoch_order(12, 0, 2, shuffle=True)
    assert seen + rest[0][1] + rest[1][1] == order[:10]
    assert resumed.epoch_ended
    assert resumed.state_dict()["consumed"] == 10


def test_another_seed_counts_from_the_next_epoch() -> None:
    loader = Loader(8, 4, shuffle=True, seed=1)
    _, seen = loader.next_batch()
    resumed = Loader(8, 4, shuffle=True, seed=2)
    resumed.load_state_dict(loader.state_dict())
    again = Loader(8, 4, shuffle=True, seed=2)  # interrupted once more, in the same epoch
    again.load_state_dict(resumed.state_dict())
    assert sorted(seen + again.next_batch()[1]) == list(range(8))
    assert again.next_batch() == (1, epoch_order(8, 1, 2, shuffle=True)[:4])


def test_data_of_another_size_ends_the_resume() -> None:
    state = Loader(8, 4, shuffle=True, seed=1).state_dict()
    with pytest.raises(UsageError, match=r"had 8 samples .* and has 9 now"):
        Loader(9, 4, shuffle=True, seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"position": 9}, {"position": -1}, {"epoch": -1}, {"epoch": "x"}, {"seed": None}]
)
def test_a_state_that_is_none(change: dict[str, object]) -> None:
    state = {**Loader(8, 4, shuffle=True, seed=1).state_dict(), **change}
    with pytest.raises(UsageError, match="no state of a data loader"):
        Loader(8, 4, shuffle=True, seed=1).load_state_dict(state)


def test_a_batch_larger_than_the_data() -> None:
    with pytest.raises(UsageError, match=r"batch_size is 9, and the data has 8"):
        Loader(8, 9, shuffle=True, seed=0)
    with pytest.raises(UsageError, match="must be at least 1"):
        Loader(8, 0, shuffle=True, seed=0)
