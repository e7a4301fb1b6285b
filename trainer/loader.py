"""The order of samples, and a position in it that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

from ckptstore.errors import UsageError


def epoch_order(count: int, epoch: int, seed: int, *, shuffle: bool) -> list[int]:
    """The order of an epoch's samples: a function of its arguments and nothing else."""
    order = list(range(count))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - nothing secret
    return order


class LoaderState(msgspec.Struct, kw_only=True, frozen=True):
    """Where a loader stands.

    Attributes:
        epoch: Passes that were finished before the present one.
        position: Samples of this epoch that were handed out.
        consumed: Samples that were handed out in all.
        count: Samples an epoch has.
        batch_size: Of the last batch.
        seed, shuffle: What this epoch's order follows from.
    """

    epoch: int = 0
    position: int = 0
    consumed: int = 0
    count: int
    batch_size: int
    seed: int
    shuffle: bool


class Loader:
    """Batches of indices, from one position for all ranks.

    Batches are full: the end of an epoch that does not fill one is left out, as verl's loader does
    (``drop_last``). An epoch ends when the next batch is asked for, so a position saved after an
    epoch's last batch goes on with the next epoch's first.

    After ``load_state_dict`` with another batch size, the epoch goes on after the samples that it
    handed out, in the same order. With another seed or ``shuffle``, too: the epoch that has begun
    ends in the order that it began in, so that no sample comes twice, and the next one follows the
    new setting.

    Args:
        count: Samples an epoch has.
        batch_size: Samples a batch, over all ranks.
        shuffle: A new order each epoch instead of the dataset's.
        seed: What the orders follow from, with the epoch.

    Raises:
        UsageError: an epoch does not fill a batch.
    """

    def __init__(self, count: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise UsageError(f"data.batch_size is {batch_size}, must be at least 1")
        if batch_size > count:
            raise UsageError(
                f"data.batch_size is {batch_size}, and the data has {count} samples",
                hint="a smaller data.batch_size, or more data",
            )
        self._next = LoaderState(count=count, batch_size=batch_size, seed=seed, shuffle=shuffle)
        self._start(self._next)

    def _start(self, state: LoaderState) -> None:
        self._state = state
        self._order = epoch_order(state.count, state.epoch, state.seed, shuffle=state.shuffle)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in a whole epoch."""
        return self._next.count // self._next.batch_size

    @property
    def epoch_ended(self) -> bool:
        """Whether the next batch is the first of another epoch."""
        return self._state.count - self._state.position < self._next.batch_size

    def next_batch(self) -> tuple[int, list[int]]:
        """The epoch, counted from 0, and the indices of the next batch."""
        size = self._next.batch_size
        if self.epoch_ended:
            self._start(
                msgspec.structs.replace(
                    self._next, epoch=self._state.epoch + 1, consumed=self._state.consumed
                )
            )
        start = self._state.position
        self._state = msgspec.structs.replace(
            self._state,
            position=start + size,
            consumed=self._state.consumed + size,
            batch_size=size,
        )
        return self._state.epoch, self._order[start : start + size]

    def state_dict(self) -> dict[str, int | bool]:
        """The position, as JSON can hold it (``LoaderState`` says what is what)."""
        return msgspec.structs.asdict(self._state)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where another loader was.

        Raises:
            UsageError: the state is no loader's, or is from data with another number of samples.
        """
        try:
            loaded = msgspec.convert(dict(state), LoaderState)
        except msgspec.ValidationError as error:
            raise UsageError(f"this is no state of a data loader: {error}") from error
        count = self._next.count
        if loaded.count != count:
            raise UsageError(
                f"the data had {loaded.count} samples when the checkpoint was saved and has"
                f" {count} now, so the position in it means nothing",
                hint="train on the same data files with the same data.max_prompt_length,"
                " or start a new run with trainer.resume_from",
            )
        if loaded.epoch < 0 or not 0 <= loaded.position <= count:
            raise UsageError(
                f"this is no state of a data loader: position {loaded.position} of {count}"
                f" in epoch {loaded.epoch}"
            )
        self._start(loaded)
