"""Mirroring again and again, whatever happens to either side."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from ckptstore.errors import AccessDeniedError, CkptError, UsageError
from ckptstore.maintenance.mirror.how import How
from ckptstore.maintenance.mirror.onerun import Memory
from ckptstore.maintenance.mirror.pairing import where
from ckptstore.maintenance.mirror.passes import NothingYetError, mirror, note_failure
from ckptstore.maintenance.mirror.several import Outcome
from ckptstore.mirrors import expect_mirror
from ckptstore.store import Store

log = logging.getLogger(__name__)

FIRST_PAUSE = 5.0
LONGEST_PAUSE = 300.0
"""Seconds: after failures the pause between passes doubles from the one to the other."""


class Follower:
    """One mirror that is kept in step; run each in a thread of its own.

    Args:
        name: The URI of the target.
        open_source, open_target: Open the stores; both are opened anew until they can be.
        how: See :class:`How`.
        interval: Seconds between passes.
        told: Called after each pass with what came of it.
    """

    def __init__(
        self,
        name: str,
        open_source: Callable[[], Store],
        open_target: Callable[[], Store],
        how: How,
        *,
        interval: float,
        told: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._name = name
        self._open_source = open_source
        self._open_target = open_target
        self._how = how
        self._interval = interval
        self._last = False
        self._woken = threading.Event()
        self._ending = threading.Event()
        self._told = told
        self._memory = Memory()
        self._expected = False
        self._pair: tuple[Store, Store] | None = None
        self._problem: str | None = None

    def run(self) -> Outcome:
        """Mirror until it is told to end; what goes wrong is said once, until it has changed.

        Returns:
            What came of the last pass.

        Raises:
            UsageError: the stores cannot be a source and its mirror, today or ever.
        """
        failures = 0
        while True:
            self._woken.clear()
            is_last = self._last
            outcome = self.once()
            self._say(outcome)
            if self._told is not None:
                self._told(outcome)
            if is_last or self._how.ending:
                return outcome
            failed = outcome.failure is not None and not outcome.waits
            failures = failures + 1 if failed else 0
            if failed:  # each try costs something: a new checkpoint is no reason for one
                first = min(max(self._interval, 1.0), FIRST_PAUSE)
                self._ending.wait(min(first * 2 ** min(failures - 1, 10), LONGEST_PAUSE))
            else:
                self._woken.wait(self._interval)

    def wake(self) -> None:
        """Have the next pass begin now, unless the last one failed; or end, after ``how.stop``."""
        if self._how.ending:
            self._ending.set()
        self._woken.set()

    def finish(self) -> None:
        """Have it end after one more whole pass."""
        self._last = True
        self._ending.set()
        self._woken.set()

    def once(self) -> Outcome:
        """One pass."""
        outcome = self._pass()
        if outcome.failure is not None:
            self._pair = None
        return outcome

    def _pass(self) -> Outcome:
        source = None
        try:
            if self._pair is None:
                source = self._open_source()
                self._expect(source)
                self._pair = (source, self._open_target())
            source = self._pair[0]
            result = mirror(*self._pair, self._how, self._memory)
        except UsageError:
            raise
        except CkptError as error:
            if source is not None and not isinstance(error, NothingYetError):
                note_failure(source, self._name, error)
            return Outcome(self._name, None, error)
        return Outcome(self._name, result, result.failure)

    def _expect(self, source: Store) -> None:
        """The mirror is owed everything from now on, also while it cannot be reached."""
        if not self._expected and source.exists:
            with suppress(AccessDeniedError):  # a pass says so
                expect_mirror(source.catalog, where(self._name), self._how.runs)
            self._expected = True

    def _say(self, outcome: Outcome) -> None:
        problem = _problem(outcome)
        lacks = outcome.result is not None and outcome.result.behind.checkpoints > 0
        if problem == self._problem or (problem is None and lacks):
            return
        self._problem = problem
        if problem is not None:
            log.warning("%s", problem)
        else:
            log.warning("the mirror %s is in step again", self._name)


def _problem(outcome: Outcome) -> str | None:
    if outcome.failure is not None:
        if outcome.waits:
            return f"the mirror {outcome.target} waits: {outcome.failure}"
        return f"the mirror {outcome.target} is behind: {outcome.failure}"
    skipped = outcome.result.skipped if outcome.result is not None else ()
    if not skipped:
        return None
    more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
    hint = f"; {skipped[0].hint}" if skipped[0].hint else ""
    what = f"{skipped[0].ref}: {skipped[0].reason}{more}{hint}"
    return f"the mirror {outcome.target} lacks what could not be copied: {what}"


def problems(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each mirror that does not hold all that it is owed."""
    return [text for outcome in outcomes if (text := _problem(outcome)) is not None]
