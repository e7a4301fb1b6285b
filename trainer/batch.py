"""A batch: who computes which sample, and sequences as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ckptstore.errors import UsageError


@dataclass(frozen=True)
class Split:
    """Which samples of a step each rank has, so that mini-batches are the same at any world size.

    Samples are dealt out in groups, of which every mini-batch is a whole number: each rank takes
    its share of each group.

    Attributes:
        samples: Samples a step, over all ranks.
        actor, critic: Samples a mini-batch, over all ranks.
        ranks: How many ranks there are.
    """

    samples: int
    actor: int
    critic: int
    ranks: int

    def check(self) -> None:
        """Refuse sizes that do not fit.

        Raises:
            UsageError: they do not divide one another.
        """
        for name, size in (("actor", self.actor), ("critic", self.critic)):
            if self.samples % size:
                raise UsageError(
                    f"{self.samples} samples a step (data.batch_size x rollout.n) cannot be split "
                    f"into mini-batches of {name}.mini_batch_size={size}"
                )
        if self.group % self.ranks:
            raise UsageError(
                f"mini-batches of {self.actor} (actor) and {self.critic} (critic) samples cannot "
                f"be split over {self.ranks} ranks",
                hint="make the mini-batch sizes multiples of the number of ranks",
            )

    @property
    def group(self) -> int:
        """Samples that are dealt out together."""
        return gcd(self.actor, self.critic)

    def of_rank(self, rank: int) -> list[int]:
        """The samples of a rank, in its order."""
        share = self.group // self.ranks
        return [
            group + rank * share + i
            for group in range(0, self.samples, self.group)
            for i in range(share)
        ]

    def mini_batches(self, size: int) -> Iterator[slice]:
        """The mini-batches of ``size`` samples, as slices of a rank's samples."""
        share = size // self.ranks
        for start in range(0, self.samples // self.ranks, share):
            yield slice(start, start + share)


@dataclass
class Batch:
    """Prompts with their responses, padded on the right to one length.

    Attributes:
        tokens: [B, T], prompt then response.
        attention: [B, T], 1 where there is a token.
        prompt_lengths, response_lengths: [B].
        mask: [B, R], 1 where there is a response token; all values of response tokens are [B, R].
    """

    tokens: Tensor
    attention: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    mask: Tensor

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        pad: int,
        device: torch.device,
    ) -> Batch:
        """Put sequences together."""
        rows = [list(p) + list(r) for p, r in zip(prompts, responses, strict=True)]
        longest = max(map(len, rows))
        tokens = [row + [pad] * (longest - len(row)) for row in rows]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        response_lengths = torch.tensor([len(r) for r in responses], device=device)
        span = torch.arange(longest, device=device)
        response_span = torch.arange(max(1, *map(len, responses)), device=device)
        return cls(
            tokens=torch.tensor(tokens, device=device),
            attention=(span[None, :] < lengths[:, None]).long(),
            prompt_lengths=torch.tensor([len(p) for p in prompts], device=device),
            response_lengths=response_lengths,
            mask=response_span[None, :] < response_lengths[:, None],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def micro_batches(self, part: slice, size: int) -> Iterator[tuple[slice, Batch]]:
        """The rows of ``part``, at most ``size`` at once (0: all), without needless padding."""
        start, stop, _ = part.indices(len(self))
        for low in range(start, stop, size or max(1, stop - start)):
            rows = slice(low, min(low + (size or stop - start), stop))
            longest = int(self.attention[rows].sum(1).max())
            yield (
                rows,
                Batch(
                    self.tokens[rows, :longest],
                    self.attention[rows, :longest],
                    self.prompt_lengths[rows],
                    self.response_lengths[rows],
                    self.mask[rows],
                ),
            )

    @property
    def positions(self) -> Tensor:
        """[B, T]: the place of each token in its sequence."""
        return (self.attention.cumsum(1) - 1).clamp(min=0)

    def before_response(self, values: Tensor) -> Tensor:
        """[B, R] out of [B, T, …]: for each response token the value one place before it.

        There a model's output predicts the token, and a critic's value is that of the state in
        which it was chosen. Outside the mask the values mean nothing.
        """
        span = torch.arange(self.mask.shape[1], device=values.device)
        places = (self.prompt_lengths[:, None] - 1 + span[None, :]).clamp(max=values.shape[1] - 1)
        if values.dim() == 2:
            return values.gather(1, places)
        index = places[:, :, None].expand(-1, -1, values.shape[2])
        return values.gather(1, index)

    @property
    def response_tokens(self) -> Tensor:
        """[B, R]: the responses, padded."""
        span = torch.arange(self.mask.shape[1], device=self.tokens.device)
        places = self.prompt_lengths[:, None] + span[None, :]
        return self.tokens.gather(1, places.clamp(max=self.tokens.shape[1] - 1))
