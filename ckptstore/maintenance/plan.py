"""Verification by plan: a part of a store at a time, the least recently verified first.

A store that is too large to be read in one night is read a share a night. What was verified when
is in the marks, so nothing but the store itself has to be kept, and it does not matter who runs
the next part, or where.

The order: what was never verified; then the least recently verified; last what is known to be
damaged, because nothing new is learned there. Damage that is known is part of every result, read
again or not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import ceil

from ckptstore.errors import CancelledError, Damage, NotFoundError, UsageError
from ckptstore.maintenance.verify import CheckResult, look_at, verify, with_bad_marks
from ckptstore.marks import Standing
from ckptstore.reading import Checkpoint
from ckptstore.store import Store
from ckptstore.transfer import ProgressCallback

CLOCK_SLACK = 3600.0
"""A verification this many seconds in the future still counts: hosts' clocks differ."""


class VerifyPlan(Iterator[CheckResult]):
    """The results of a plan, one for each checkpoint as soon as it is known.

    Args:
        checkpoints: What may be verified.
        problems: What is known to be wrong with the records beside them; given out first.
        sample: The share of the bytes to read, more than 0 and at most 1: checkpoints are taken
            in the plan's order until their bytes are that much. At least one is. So after
            ``1 / sample`` passes all have been read.
        max_duration: Seconds after which no further one is begun and the one at work is left.
        max_age: Seconds; what was verified more recently is left out.
        threads: Blocks in flight.
        progress: Told of every block read.
        cancel: Set it to end with :class:`CancelledError`.

    Attributes:
        due: What is to be read, in this order.
        unread: What is due and was not read because the time was over; complete at the end.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        problems: Sequence[CheckResult] = (),
        *,
        sample: float | None = None,
        max_duration: float | None = None,
        max_age: float | None = None,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        if sample is not None and not 0 < sample <= 1:
            raise UsageError(f"a share of {sample:g} cannot be verified", hint="for example: 5%")
        self._time = _Time(max_duration, cancel)
        self._threads = threads
        self._progress = progress
        self._problems = problems
        self.due = _due(checkpoints, sample, max_age)
        read = {id(c) for c in self.due}
        self._others = [c for c in checkpoints if id(c) not in read]
        self.unread: list[Checkpoint] = []
        self._results = self._run()

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(c.size for c in self.due)

    def __next__(self) -> CheckResult:
        return next(self._results)

    def report_to(self, progress: ProgressCallback | None) -> None:
        """Tell ``progress`` of every block from now on."""
        self._progress = progress

    def _run(self) -> Iterator[CheckResult]:
        yield from self._problems
        for checkpoint in self._others:
            yield from self._known(checkpoint)
        for checkpoint in self.due:
            if self._time.is_over:
                self.unread.append(checkpoint)
                yield from self._known(checkpoint)
                continue
            before = checkpoint.standing
            try:
                result = verify(
                    checkpoint,
                    deep=True,
                    threads=self._threads,
                    progress=self._progress,
                    cancel=self._time,
                )
            except NotFoundError:  # deleted meanwhile
                continue
            except CancelledError:
                if self._time.is_cancelled:
                    raise
                self.unread.append(checkpoint)
                yield from self._known(checkpoint)
                continue
            yield with_bad_marks(result, before)

    @staticmethod
    def _known(checkpoint: Checkpoint) -> Iterator[CheckResult]:
        """What is known of one that is not read, when there is anything wrong."""
        standing = checkpoint.standing
        damage = tuple(Damage(n.path, n.offset, n.length, n.reason) for n in standing.damage)
        if standing.damaged and not damage:
            damage = (Damage(f"marks/{checkpoint.name}", 0, 0, "noted as damaged"),)
        result = CheckResult(checkpoint.ref, checkpoint.run, str(checkpoint.name), 0, damage)
        result = with_bad_marks(result, standing)
        if not result.ok:
            yield result


def verify_plan(
    store: Store,
    runs: Sequence[str] = (),
    *,
    sample: float | None = None,
    max_duration: float | None = None,
    max_age: float | None = None,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> VerifyPlan:
    """Verify a part of a store, every byte of it, the least recently verified first.

    Args:
        store: The store.
        runs: Only these runs; none is all.
        sample, max_duration, max_age, threads, progress, cancel: See :class:`VerifyPlan`.

    Raises:
        NotFoundError: there is no such store or run.
    """
    begun = time.monotonic()
    for run in runs:
        store.catalog.require_run(run)
    looks = [look_at(store, run) for run in runs or store.runs()]
    if max_duration is not None:
        max_duration = max(0.0, max_duration - (time.monotonic() - begun))
    return VerifyPlan(
        [c for look in looks for c in look.checkpoints],
        [p for look in looks for p in look.problems],
        sample=sample,
        max_duration=max_duration,
        max_age=max_age,
        threads=threads,
        progress=progress,
        cancel=cancel,
    )


def _due(
    checkpoints: Sequence[Checkpoint], sample: float | None, max_age: float | None
) -> list[Checkpoint]:
    """What is to be read, in the plan's order."""
    now = datetime.now(UTC)
    ordered = sorted(checkpoints, key=lambda c: (c.standing.damaged, _looked(c.standing), c.name))
    due = [c for c in ordered if max_age is None or not _recent(c.standing, now, max_age)]
    if sample is None:
        return due
    wanted = ceil(sample * sum(c.size for c in checkpoints))
    taken: list[Checkpoint] = []
    for checkpoint in due:
        if taken and wanted <= 0:
            break
        taken.append(checkpoint)
        wanted -= checkpoint.size
    return taken


_NEVER = datetime.min.replace(tzinfo=UTC)


def _looked(standing: Standing) -> datetime:
    """When all of its content was last looked at."""
    damaged = (m.created for m in standing.of_kind("damaged").values() if m.deep)
    looks = [standing.verified, *damaged]
    return max((_time_of(text) for text in looks if text is not None), default=_NEVER)


def _time_of(text: str) -> datetime:
    try:
        then = datetime.fromisoformat(text)
    except ValueError:
        return _NEVER
    return then if then.tzinfo is not None else then.replace(tzinfo=UTC)


def _recent(standing: Standing, now: datetime, max_age: float) -> bool:
    age = (now - _looked(standing)).total_seconds()
    return -CLOCK_SLACK <= age < max_age


class _Time(threading.Event):
    """Set when the caller cancels, and when the time is over."""

    def __init__(self, seconds: float | None, cancel: threading.Event | None) -> None:
        super().__init__()
        self._end = None if seconds is None else time.monotonic() + seconds
        self._cancel = cancel

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._end is not None and time.monotonic() >= self._end

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller has had enough."""
        return self._cancel is not None and self._cancel.is_set()

    def is_set(self) -> bool:
        """Whether the work shall end."""
        return self.is_over or self.is_cancelled
