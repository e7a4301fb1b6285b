"""Trying the orders in which concurrent actors can interleave, at the boundaries of operations.

Each actor is a function that is given its own view of one memory store. It runs in a thread that
waits before every storage operation until the scheduler lets it go on, so a schedule is a sequence
of actor numbers, and the same schedule always leads to the same state. The explorer walks through
all schedules depth first and does not walk on from a state that it has seen: two schedules are in
the same state when the store holds the same things and every actor has seen the same answers.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptstore.backends.base import Entry
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.errors import CkptError
from ckptstore.testing.hooks import HookedBackend

T = TypeVar("T")
Actor = Callable[[HookedBackend], object]
Check = Callable[[Space], str | None]
"""Looks at a state; says what is wrong with it, or ``None``."""


class _Halt(BaseException):
    """Ends an actor whose schedule is over."""


class _Steps(HookedBackend):
    """The view of one actor: each operation waits for its turn, and its answer is noted."""

    def __init__(self, space: Space, clock: Callable[[], float], actor: _Running) -> None:
        super().__init__(MemoryBackend(space, clock=clock), lambda *_: None)
        self._actor = actor

    def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
        """One step."""
        del key
        self._actor.wait_for_turn()
        try:
            result = call()
        except CkptError as error:
            self._actor.seen.append(f"{operation} {type(error).__name__}")
            raise
        self._actor.seen.append(f"{operation} {_shape(result)}")
        return result


def _shape(result: object) -> str:
    """What an actor can learn from an answer, without ids and times that differ in every run."""
    if isinstance(result, bytes):
        return _kind(result)
    if isinstance(result, list):
        return ",".join(sorted(e.key for e in result if isinstance(e, Entry)))
    if isinstance(result, Entry):
        return f"{result.size}"
    return repr(result) if isinstance(result, bool | str | None) else type(result).__name__


def _kind(data: bytes) -> str:
    for kind in (b'"kind":"void"', b'"kind":"commit"'):
        if kind in data:
            return kind.decode()
    return "data"


class _Running:
    """An actor in its thread."""

    def __init__(self, space: Space, clock: Callable[[], float], actor: Actor) -> None:
        self.seen: list[str] = []
        self.ended = False
        self.error: BaseException | None = None
        self._halt = False
        self._turn = threading.Semaphore(0)
        self._waiting = threading.Semaphore(0)
        view = _Steps(space, clock, self)
        self._thread = threading.Thread(target=self._run, args=(actor, view), daemon=True)
        self._thread.start()
        self._waiting.acquire()

    def _run(self, actor: Actor, view: HookedBackend) -> None:
        try:
            result = actor(view)
            self.seen.append(f"returned {result!r}")
        except _Halt:
            pass
        except CkptError as error:
            self.seen.append(f"ended with {type(error).__name__}")
        except BaseException as error:  # noqa: BLE001 - a bug in an actor is told to the test
            self.error = error
        self.ended = True
        self._waiting.release()

    def wait_for_turn(self) -> None:
        """Called by the actor before each operation."""
        self._waiting.release()
        self._turn.acquire()
        if self._halt:
            raise _Halt

    def step(self) -> None:
        """Let it do one operation, up to the next."""
        self._turn.release()
        self._waiting.acquire()

    def stop(self) -> None:
        """End it."""
        self._halt = True
        while not self.ended:
            self._turn.release()
            self._waiting.acquire()
        self._thread.join()


@dataclass
class Exploration:
    """What was tried.

    Attributes:
        states: States that were looked at.
        schedules: Schedules that were run to their end.
        outcomes: How the actors ended, for each complete schedule (distinct ones).
    """

    states: int = 0
    schedules: int = 0
    outcomes: set[tuple[str, ...]] = field(default_factory=set)


def explore(
    start: Space, actors: Sequence[Actor], check: Check, *, clock: Callable[[], float]
) -> Exploration:
    """Run the actors in every order, checking each state on the way.

    Args:
        start: The store's content at the start; it is copied for each schedule.
        actors: What runs at the same time.
        check: Called with every state.
        clock: The store's clock.

    Raises:
        AssertionError: ``check`` found something wrong; the message holds the schedule.
    """
    found = Exploration()
    seen: set[tuple[object, ...]] = set()
    pending: list[tuple[int, ...]] = [()]
    while pending:
        pending += _advance(start, actors, check, clock, pending.pop(), seen, found)
    return found


def sample(
    start: Space,
    actors: Sequence[Actor],
    check: Check,
    *,
    clock: Callable[[], float],
    runs: int,
    seed: int = 0,
    at_end: Check | None = None,
) -> Exploration:
    """Like :func:`explore`, but only ``runs`` random schedules, each to its end.

    How readily a schedule goes from one actor to another differs from run to run, so that both
    long uninterrupted stretches and close interleavings occur. ``at_end`` is checked when all
    actors have ended.
    """
    found = Exploration()
    rng = random.Random(seed)  # noqa: S311 - a reproducible order, no secret
    for _ in range(runs):
        space = start.copy()
        running = [_Running(space, clock, actor) for actor in actors]
        try:
            restless = rng.choice((0.05, 0.2, 0.5, 1.0))
            current, schedule = rng.randrange(len(actors)), []
            while alive := [i for i, one in enumerate(running) if not one.ended]:
                if current not in alive or rng.random() < restless:
                    current = rng.choice(alive)
                running[current].step()
                schedule.append(current)
                found.states += 1
                _check(space, running, check, schedule)
            if at_end is not None:
                _check(space, running, at_end, schedule)
            found.schedules += 1
            found.outcomes.add(tuple(one.seen[-1] for one in running))
        finally:
            for one in running:
                one.stop()
    return found


def _check(
    space: Space, running: Sequence[_Running], check: Check, schedule: Sequence[int]
) -> None:
    for one in running:
        if one.error is not None:
            raise one.error
    problem = check(space)
    log = [one.seen for one in running]
    assert problem is None, f"{problem}; schedule {schedule}, answers {log}"


def _advance(
    start: Space,
    actors: Sequence[Actor],
    check: Check,
    clock: Callable[[], float],
    schedule: tuple[int, ...],
    seen: set[tuple[object, ...]],
    found: Exploration,
) -> list[tuple[int, ...]]:
    """Run one schedule from the start; the schedules that go on from its state, if it is new."""
    space = start.copy()
    running = [_Running(space, clock, actor) for actor in actors]
    try:
        for actor in schedule:
            running[actor].step()
        signature = _signature(space, running)
        if signature in seen:
            return []
        seen.add(signature)
        found.states += 1
        _check(space, running, check, schedule)
        alive = [i for i, one in enumerate(running) if not one.ended]
        if not alive:
            found.schedules += 1
            found.outcomes.add(tuple(one.seen[-1] for one in running))
        return [(*schedule, i) for i in alive]
    finally:
        for one in running:
            one.stop()


def _signature(space: Space, running: Sequence[_Running]) -> tuple[object, ...]:
    with space.lock:
        content = tuple(
            sorted((key, _kind(data), modified) for key, (data, modified) in space.objects.items())
        )
    return (content, *(("|".join(one.seen), one.ended) for one in running))
