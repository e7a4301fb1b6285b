"""How far a store's mirrors are: by what they answer, else by what the store has noted."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore import mirrors
from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError, NotFoundError
from ckptstore.layout import Name
from ckptstore.maintenance.mirror.results import Lag
from ckptstore.marks import standing
from ckptstore.mirrors import Mirror
from ckptstore.records import Commit, moment
from ckptstore.store import open_store

ASK_SECONDS = 10.0
"""How long mirrors have to answer."""


@dataclass(frozen=True)
class Holding:
    """What a mirror answered about a run.

    Attributes:
        names: Its checkpoints that need not be copied (any more): there, in the trash or given up.
        newest: The newest intact one there that is not newer than the source's; ``None``: none.
        created: When that was saved.
    """

    names: frozenset[Name] = frozenset()
    newest: Name | None = None
    created: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a mirror answered.

    Attributes:
        runs: By run; empty when it did not answer.
        problem: Why it did not.
    """

    runs: Mapping[str, Holding] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class MirrorStatus:
    """A mirror of the store.

    Attributes:
        uri, id: Which one.
        asked, answered: Whether it was asked itself, and did answer.
        runs: Patterns of the runs that it shall hold; none is all.
        tried: When a pass of a mirror last ended.
        reached: When one last ended with all there that was owed.
        problem: What was wrong at the last pass, or now.
    """

    uri: str
    id: str
    asked: bool
    answered: bool
    runs: tuple[str, ...]
    tried: str | None
    reached: str | None
    problem: str | None

    @classmethod
    def of(cls, mirror: Mirror, answer: Answer | None) -> MirrorStatus:
        """What is known, and what it answered; ``None`` when it was not asked."""
        note = mirror.note
        now = answer.problem if answer is not None else None
        before = note.problem if note is not None else "what is noted of it cannot be read"
        return cls(
            uri=mirror.uri,
            id=mirror.id,
            asked=answer is not None,
            answered=answer is not None and answer.problem is None,
            runs=note.runs if note is not None else (),
            tried=note.tried if note is not None else None,
            reached=note.reached if note is not None else None,
            problem=now or before,
        )


@dataclass(frozen=True)
class RunMirror:
    """How far a mirror is with a run.

    Attributes:
        mirror: Its URI.
        live: Whether it answered; else this is what the store has noted.
        behind: What it lacks of what is intact here.
        newest: The newest checkpoint there that would survive; ``None`` when there is none.
        created: When that was saved; ``None`` when that is not known.
    """

    mirror: str
    live: bool
    behind: Lag
    newest: Name | None
    created: str | None


@dataclass(frozen=True)
class Loss:
    """What would be lost of a run if its store died now, with all that was trained since.

    Attributes:
        everything: No mirror holds a checkpoint of the run.
        checkpoints: Intact ones that are newer than the newest that a mirror holds.
        steps: From that to the newest here; never less than 0.
        seconds: Between these two saves (from the oldest here when it is everything), by their
            writers' clocks; ``None`` when not known.
    """

    everything: bool
    checkpoints: int
    steps: int
    seconds: float | None


def loss_of(intact: Mapping[Name, Commit], reached: Sequence[RunMirror]) -> Loss:
    """What would be lost of ``intact``, the run's checkpoints, with these mirrors."""
    if not intact:
        return Loss(False, 0, 0, 0.0)
    newest = max(intact)
    best = max((m for m in reached if m.newest is not None), key=_newest_there, default=None)
    if best is None or best.newest is None:
        first = moment(intact[min(intact)].created)
        return Loss(True, len(intact), newest.step, _between(first, intact[newest]))
    if best.newest >= newest:
        return Loss(False, 0, 0, 0.0)
    newer = sum(1 for name in intact if name > best.newest)
    saved = moment(best.created) if best.created is not None else None
    steps = max(0, newest.step - best.newest.step)
    return Loss(False, newer, steps, _between(saved, intact[newest]))


def _newest_there(reached: RunMirror) -> Name:
    assert reached.newest is not None
    return reached.newest


def _between(earlier: float | None, commit: Commit) -> float | None:
    later = moment(commit.created)
    return max(0.0, later - earlier) if earlier is not None and later is not None else None


def run_mirror(
    catalog: Catalog, mirror: Mirror, run: str, intact: Mapping[Name, Commit], answer: Answer | None
) -> RunMirror:
    """How far a mirror is with a run.

    Args:
        catalog: The mirrored store.
        mirror: The mirror.
        run: The run.
        intact: Its checkpoints here that a mirror can be given.
        answer: What the mirror answered; ``None`` when it was not asked.
    """
    holding = answer.runs.get(run) if answer is not None else None
    if holding is not None:
        there, newest, created = holding.names, holding.newest, holding.created
    else:
        there = mirrors.acknowledged(catalog, mirror, run)
        newest = max(there, default=None)
        here = intact.get(newest) if newest is not None else None
        created = here.created if here is not None else None
    behind = Lag.of(commit for name, commit in intact.items() if name not in there)
    return RunMirror(mirror.uri, holding is not None, behind, newest, created)


def ask_all(
    known: Sequence[Mirror], source: str, newest: Mapping[str, Name | None], seconds: float
) -> dict[str, Answer]:
    """Ask all mirrors at once; one that fails or takes too long has no answer but a problem.

    Args:
        known: The mirrors.
        source: Id of the store that they mirror.
        newest: The newest intact checkpoint of each run there.
        seconds: How long they have.

    Returns:
        By the mirror's id.
    """
    answers: dict[str, Answer] = {}

    def ask(mirror: Mirror) -> None:
        wanted = {run: name for run, name in newest.items() if mirror.wants(run)}
        try:
            answers[mirror.id] = Answer(_ask(mirror, source, wanted))
        except CkptError as error:
            answers[mirror.id] = Answer(problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a mirror does, its store has a status
            answers[mirror.id] = Answer(problem=f"it failed ({type(error).__name__})")

    asked = [m for m in known if m.note is not None]
    threads = [threading.Thread(target=ask, args=(m,), daemon=True) for m in asked]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = Answer(problem=f"it did not answer within {seconds:g} s")
    return {m.id: answers.get(m.id, late) for m in asked}


def _ask(mirror: Mirror, source: str, newest: Mapping[str, Name | None]) -> dict[str, Holding]:
    """What the mirror holds of these runs. Raises :class:`CkptError` when it does not say."""
    assert mirror.note is not None
    store = open_store(mirror.note.uri)
    try:
        if not store.exists:
            raise NotFoundError(f"there is no store at {mirror.uri}")
        if store.id == source or store.id != (mirror.note.store or store.id):
            raise NotFoundError(f"{mirror.uri} is another store than the one that was mirrored to")
        runs = set(store.runs())
        return {
            run: _holding(store.catalog, run, name) if run in runs else Holding()
            for run, name in newest.items()
        }
    finally:
        store.backend.close()


def _holding(catalog: Catalog, run: str, limit: Name | None) -> Holding:
    names = catalog.record_names(run)
    there = frozenset(names) | frozenset(catalog.trash_names(run))
    for name in reversed(names):
        if limit is not None and name > limit:
            continue
        found = catalog.find(run, name)
        commit = found.commit if found is not None else None
        if commit is not None and not standing(catalog, run, name).damaged:
            return Holding(there, name, commit.created)
    return Holding(there)
