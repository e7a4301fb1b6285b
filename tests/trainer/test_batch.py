"""Who computes which sample, and sequences as tensors."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from ckptstore.errors import UsageError
from trainer.batch import Batch, Split

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [4], [5, 6]]
RESPONSES = [[7, 8], [9, 10, 11], [12]]


def batch() -> Batch:
    return Batch.build(PROMPTS, RESPONSES, 0, CPU)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize(("actor", "critic"), [(6, 6), (12, 6), (24, 12), (12, 24)])
def test_mini_batches_are_the_same_at_any_number_of_ranks(
    ranks: int, actor: int, critic: int
) -> None:
    split = Split(24, actor, critic, ranks)
    split.check()
    owned = [split.of_rank(rank) for rank in range(ranks)]
    assert sorted(chain(*owned)) == list(range(24))
    for size in (actor, critic):
        parts = [sorted(chain(*(own[part] for own in owned))) for part in split.mini_batches(size)]
        assert parts == [list(range(i, i + size)) for i in range(0, 24, size)]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(24, 7, 24, 1), "actor.mini_batch_size=7"),
        (Split(24, 24, 9, 1), "critic.mini_batch_size=9"),
        (Split(24, 8, 8, 3), "cannot be split over 3 ranks"),
        (Split(24, 8, 6, 4), "cannot be split over 4 ranks"),
    ],
)
def test_sizes_that_do_not_fit(split: Split, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        split.check()


def test_sequences_are_padded_on_the_right() -> None:
    made = batch()
    assert made.tokens.tolist() == [[1, 2, 3, 7, 8], [4, 9, 10, 11, 0], [5, 6, 12, 0, 0]]
    assert made.attention.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert made.mask.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert made.positions[0].tolist() == [0, 1, 2, 3, 4]
    assert made.positions[2, :3].tolist() == [0, 1, 2]


def test_values_of_response_tokens_come_from_one_place_before() -> None:
    made = batch()
    places = torch.arange(5).repeat(3, 1)
    found = made.before_response(places)
    assert found[made.mask].tolist() == [2, 3, 0, 1, 2, 1]
    three = made.before_response(torch.stack([places, places * 10], dim=2))
    assert three[made.mask].tolist() == [[v, 10 * v] for v in (2, 3, 0, 1, 2, 1)]
    assert made.response_tokens[made.mask].tolist() == [7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5])
def test_micro_batches_cover_their_part_once(size: int) -> None:
    made = batch()
    for part in (slice(None), slice(1, 3), slice(2, 3)):
        rows = []
        for chosen, micro in made.micro_batches(part, size):
            rows += list(range(3))[chosen]
            assert len(micro) == chosen.stop - chosen.start <= (size or 3)
            assert micro.tokens.shape[1] == micro.attention.sum(1).max()
            assert torch.equal(micro.mask, made.mask[chosen])
            assert micro.response_tokens[micro.mask].tolist() == (
                made.response_tokens[chosen][made.mask[chosen]].tolist()
            )
        assert rows == list(range(3))[part]
