"""One engine for several ranks, each of which holds a shard of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from ckptstore.errors import CkptError, UsageError
from ckptstore.torch import Ranks
from trainer.rollout.base import Response, Rollout, Sampling


class SharedRollout:
    """An engine that the ranks of a group run together (tensor parallelism).

    Each rank generates for the prompts of all of them, in the order of the ranks, and keeps the
    responses to its own. All methods are collectives of the group.

    Args:
        engine: This rank's part; the same calls on every rank of the group give the same tokens.
        ranks: The group.
    """

    def __init__(self, engine: Rollout, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks

    @property
    def version(self) -> int | None:
        """See :class:`Rollout`."""
        return self._engine.version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`Rollout`: every rank is given whole weights, and keeps its shard."""
        self._engine.load_weights(weights, version)

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling
    ) -> list[Response]:
        """See :class:`Rollout`; a rank may have no prompts.

        Raises:
            UsageError: the ranks want different sampling.
            CkptError: the ranks did not generate the same tokens.
        """
        own = [list(prompt) for prompt in prompts], list(keys), sampling
        asked = self._ranks.everywhere(lambda: own)
        every = [prompt for theirs, _, _ in asked for prompt in theirs]
        every_key = [key for _, theirs, _ in asked for key in theirs]
        if any(theirs != sampling for _, _, theirs in asked):
            raise UsageError(
                "ranks that share an engine sample in different ways",
                hint="give every rank the same configuration",
            )
        if not every:
            return []
        responses: list[Response] = []

        def generate() -> bytes:
            responses.extend(self._engine.generate(every, every_key, sampling))
            return blake3(str([r.tokens for r in responses]).encode()).digest()

        if len(set(self._ranks.everywhere(generate))) > 1:
            raise CkptError(
                f"the {self._ranks.size} ranks of one engine did not generate the same tokens",
                hint="rollout.tensor_parallel_size=1 gives each rank an engine of its own",
            )
        start = sum(len(theirs) for theirs, _, _ in asked[: self._ranks.rank])
        return responses[start : start + len(prompts)]


def consecutive_ranks(size: int, timeout: float) -> Ranks:
    """This rank's group of ``size`` consecutive ranks. A collective of all ranks.

    Args:
        size: Ranks of a group; it divides their number.
        timeout: Seconds after which a rank that does not answer is an error.
    """
    limit = timedelta(seconds=timeout)
    group, _ = dist.new_subgroups(size, timeout=limit, backend="gloo")  # type: ignore[no-untyped-call]
    return Ranks(group)
