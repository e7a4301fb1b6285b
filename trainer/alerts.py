"""Conditions that a person should know of, each said once until it has ended.

An alert is fed at each checkpoint and answers with a sentence, or ``None``. Its ``state`` is plain
data for the checkpoint; an alert made from it goes on as if the run had not stopped, so a resumed
run does not repeat itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from rich.filesize import decimal

PATIENCE = 3
"""Checkpoints without a better reward before that is said."""

SIZE_TOLERANCE = 0.2
"""Share by which a checkpoint's size may be off.

Checkpoints of one run hold the same tensors, so their sizes differ by metadata alone; a lost
optimizer state takes away half or more, a lost critic about as much.
"""

SIZE_WINDOW = 8
"""Predecessors that count; after as many of a new size, that is the usual one."""


class RewardStalled:
    """The reward has not improved over the last three checkpoints.

    It ends with a better reward than any before.

    Args:
        state: Of the alert of an earlier life.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        given = state or {}
        self._best: float | None = given.get("best")
        self._best_step: int | None = given.get("best_step")
        self._since: int = given.get("since", 0)

    @property
    def state(self) -> dict[str, Any]:
        """What ``__init__`` takes."""
        return {"best": self._best, "best_step": self._best_step, "since": self._since}

    def check(self, step: int, reward: float) -> str | None:
        """Take the reward of a checkpoint; one that is not finite is no improvement."""
        if math.isfinite(reward) and (self._best is None or reward > self._best):
            self._best, self._best_step, self._since = reward, step, 0
            return None
        self._since += 1
        if self._since != PATIENCE:
            return None
        if self._best is None:
            return (
                f"no reward was a finite number up to step {step} ({PATIENCE} checkpoints): "
                "look at the reward function and at actor/loss"
            )
        return (
            f"the reward has not improved over {PATIENCE} checkpoints: {reward:.4g} at step "
            f"{step}, best {self._best:.4g} at step {self._best_step}; look at kl/mean and "
            f"actor/grad_norm, and stop or go back to step {self._best_step} if it has not "
            "converged"
        )


class SizeChanged:
    """A checkpoint is more than 20 % larger or smaller than the median of its predecessors.

    It ends with a checkpoint within that range. Up to eight predecessors count.

    Args:
        run: Name of the run, for the sentence.
        state: Of the alert of an earlier life.
    """

    def __init__(self, run: str, state: Mapping[str, Any] | None = None) -> None:
        given = state or {}
        self._run = run
        self._sizes: list[int] = list(given.get("sizes", ()))
        self._last_step: int | None = given.get("last_step")
        self._said: bool = given.get("said", False)

    @property
    def state(self) -> dict[str, Any]:
        """What ``__init__`` takes."""
        return {"sizes": list(self._sizes), "last_step": self._last_step, "said": self._said}

    def check(self, step: int, size: int) -> str | None:
        """Take the size of a checkpoint in bytes."""
        usual = median(self._sizes) if self._sizes else size
        before, count = self._last_step, len(self._sizes)
        self._sizes = [*self._sizes, size][-SIZE_WINDOW:]
        self._last_step = step
        off = (size - usual) / usual if usual else float(size > 0)
        said, self._said = self._said, abs(off) > SIZE_TOLERANCE
        if said or not self._said:
            return None
        than = "the one before" if count == 1 else f"the {count} before it in the median"
        return (
            f"the checkpoint of step {step} has {decimal(size)}, {abs(off):.0%} "
            f"{'more' if off > 0 else 'less'} than {than} ({decimal(int(usual))}): if "
            "storage.save_contents was not changed on purpose, see what differs with "
            f"`ckpt diff {self._run}@{before} {self._run}@{step}`"
        )


class MirrorLag:
    """A mirror is more checkpoints behind than it may be; it ends when it is not any more.

    Args:
        limit: Checkpoints a mirror may be behind.
        state: Of the alert of an earlier life.
    """

    def __init__(self, limit: int, state: Mapping[str, Any] | None = None) -> None:
        self._limit = limit
        self._late: set[str] = set((state or {}).get("late", ()))

    @property
    def state(self) -> dict[str, Any]:
        """What ``__init__`` takes."""
        return {"late": sorted(self._late)}

    def check(self, mirror: str, behind: int) -> str | None:
        """Take how many committed checkpoints a mirror lacks.

        Args:
            mirror: Its name in the sentence; without secrets.
            behind: Checkpoints it lacks.
        """
        if behind <= self._limit:
            self._late.discard(mirror)
            return None
        if mirror in self._late:
            return None
        self._late.add(mirror)
        return (
            f"the mirror {mirror} is {behind} checkpoints behind (trainer.alert_mirror_lag is "
            f"{self._limit}): see that it can be reached and has space; if it is too slow for "
            "this, save less often"
        )
