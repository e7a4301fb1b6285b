"""Ranks that share an engine: each asks it for the prompts of all, and gets its own back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.torch.processes import run_ranks, values
from trainer.rollout.base import Response, Sampling
from trainer.rollout.shared import SharedRollout, consecutive_ranks

SAMPLING = Sampling(max_new_tokens=2, temperature=1.0)


class Echo:
    """Answers a prompt with its length and its key, and keeps what it was asked for.

    Args:
        added: To its tokens: another number makes another engine.
    """

    def __init__(self, added: int = 0) -> None:
        self.version: int | None = None
        self.asked: list[tuple[list[list[int]], list[int]]] = []
        self._added = added

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling
    ) -> list[Response]:
        self.asked.append(([list(p) for p in prompts], list(keys)))
        return [
            Response([len(p), k + self._added], [0.0, 0.0])
            for p, k in zip(prompts, keys, strict=True)
        ]


def four_ranks() -> dict[str, Any]:
    """Two groups of two; the last rank has no prompts, and then no rank of its group has any."""
    rank = dist.get_rank()
    engine = Echo()
    group = consecutive_ranks(2, 60)
    rollout = SharedRollout(engine, group)
    rollout.load_weights([], 7)
    count = 3 - rank
    first = rollout.generate(
        [[rank] * (i + 1) for i in range(count)], [10 * rank + i for i in range(count)], SAMPLING
    )
    second = rollout.generate([[5]] if rank < 2 else [], [rank] if rank < 2 else [], SAMPLING)
    return {
        "version": rollout.version,
        "first": [r.tokens for r in first],
        "second": [r.tokens for r in second],
        "asked": engine.asked,
    }


def test_each_group_generates_for_all_its_ranks_and_each_rank_keeps_its_own() -> None:
    told = values(run_ranks(four_ranks, 4))
    assert [t["version"] for t in told] == [7] * 4
    assert [t["first"] for t in told] == [
        [[1, 0], [2, 1], [3, 2]],
        [[1, 10], [2, 11]],
        [[1, 20]],
        [],
    ]
    assert [t["second"] for t in told] == [[[1, 0]], [[1, 1]], [], []]
    low = ([[0], [0, 0], [0, 0, 0], [1], [1, 1]], [0, 1, 2, 10, 11])
    assert told[0]["asked"] == told[1]["asked"] == [low, ([[5], [5]], [0, 1])]
    assert told[2]["asked"] == told[3]["asked"] == [([[2]], [20])], "nothing to do, nothing asked"


def disagreeing(what: str) -> None:
    """Two ranks that differ."""
    rank = dist.get_rank()
    rollout = SharedRollout(Echo(rank if what == "tokens" else 0), consecutive_ranks(2, 60))
    sampling = Sampling(2, 1.0 + (rank if what == "sampling" else 0))
    rollout.generate([[1]], [rank], sampling)


def test_ranks_that_disagree_are_told_so() -> None:
    for what, words in (
        ("tokens", "the 2 ranks of one engine did not generate the same tokens"),
        ("sampling", "ranks that share an engine sample in different ways"),
    ):
        for ended in run_ranks(disagreeing, 2, what):
            assert ended is not None
            assert ended.error is not None
            assert words in ended.error
