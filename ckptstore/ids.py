"""Random ids: the part of a checkpoint's name that makes it unique.

Ids come from ``os.urandom`` and never from a seeded generator: a trainer that resumes restores the
state of those, and two lives of it would then choose the same names. For tests that need the same
names in every run, ``CKPTSTORE_ID_SEED`` (or an :class:`IdFactory` of one's own) derives them.
"""

from __future__ import annotations

import os
from typing import Protocol

from blake3 import blake3

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class IdFactory(Protocol):
    """Makes the eight letters at the end of a name."""

    def __call__(self, run: str, step: int, attempt: int) -> str:
        """Eight letters a–z.

        Args:
            run: The run that is saved to.
            step: The step that is saved.
            attempt: 0, and one more each time the name made from the answer was taken.
        """


def random_letters() -> str:
    """Eight letters from the operating system's generator."""
    return "".join(_LETTERS[b % 26] for b in _unbiased(8))


def _unbiased(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found.extend(b for b in os.urandom(2 * count) if b < 234)  # 234 = 9 × 26
    return found[:count]


def random_ids(run: str, step: int, attempt: int) -> str:
    """The default factory: nothing but chance."""
    del run, step, attempt
    return random_letters()


def seeded_ids(seed: str) -> IdFactory:
    """A factory whose ids follow from ``seed``, run, step and attempt."""

    def make(run: str, step: int, attempt: int) -> str:
        digest = blake3(f"{seed}\n{run}\n{step}\n{attempt}".encode()).digest()
        return "".join(_LETTERS[b % 26] for b in digest[:8])

    return make


def default_ids() -> IdFactory:
    """Random ids, or seeded ones when ``CKPTSTORE_ID_SEED`` is set."""
    seed = os.environ.get("CKPTSTORE_ID_SEED")
    return seeded_ids(seed) if seed else random_ids
