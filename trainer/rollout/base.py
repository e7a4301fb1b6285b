"""What the trainer asks of an engine that generates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from blake3 import blake3

from ckptstore.errors import CkptError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Tokens a response at most, its end included.
        temperature: 0 takes the likeliest token.
        top_p, top_k: Keep the likeliest tokens only; ``top_k`` 0 keeps all.
    """

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Response:
    """What was generated for a prompt.

    Attributes:
        tokens: Its tokens, with the end-of-sequence token where it came to that.
        logprobs: Of each, under the distribution before ``top_p`` and ``top_k``.
    """

    tokens: list[int]
    logprobs: list[float]


class Rollout(Protocol):
    """An engine with weights of its own."""

    @property
    def version(self) -> int | None:
        """Which weights it holds; ``None`` when they are not known."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take whole weights by their Hugging Face names.

        Raises:
            CkptError: they are not the names that the engine's model has.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling
    ) -> list[Response]:
        """Responses to prompts.

        Args:
            prompts: Token ids; there may be none.
            keys: Each one's randomness: the same prompts, keys and weights give the same tokens.
            sampling: How tokens are chosen.
        """


def sample_key(seed: int, step: int, sample: int, repetition: int) -> int:
    """The randomness of one response: 63 bits that follow from what it is a response to."""
    digest = blake3(f"{seed}/{step}/{sample}/{repetition}".encode()).digest(length=8)
    return int.from_bytes(digest, "little") >> 1


def check_names(given: Iterable[str], wanted: Iterable[str], engine: str) -> None:
    """Refuse weights that are not those of the engine's model.

    A layer left out of a push raises nothing by itself: the engine goes on with old weights.

    Raises:
        CkptError: names are missing, or have no place.
    """
    given, wanted = set(given), set(wanted)
    missing, foreign = sorted(wanted - given), sorted(given - wanted)
    if missing or foreign:
        what = f"lacks {missing[0]}" if missing else f"has {foreign[0]}, which it does not know"
        raise CkptError(
            f"the weights pushed to the {engine} engine are not its model's: the push {what} "
            f"({len(missing)} missing, {len(foreign)} unknown)"
        )
