"""Several mirrors of one store at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptstore.errors import CkptError
from ckptstore.maintenance.mirror.how import How
from ckptstore.maintenance.mirror.onerun import Memory
from ckptstore.maintenance.mirror.passes import NothingYetError, mirror, note_failure
from ckptstore.maintenance.mirror.results import MirrorResult
from ckptstore.store import Store


@dataclass(frozen=True)
class Outcome:
    """What came of one of several mirrors.

    Attributes:
        target: Its URI.
        result: What the pass did; ``None`` when it could not begin.
        failure: Why it could not begin, or ended early.
    """

    target: str
    result: MirrorResult | None
    failure: CkptError | None

    @property
    def ok(self) -> bool:
        """Whether the mirror holds all that it is owed."""
        return self.failure is None and self.result is not None and self.result.ok

    @property
    def waits(self) -> bool:
        """Whether there is only nothing to mirror yet."""
        return isinstance(self.failure, NothingYetError)


def mirror_each(
    source: Store,
    targets: Sequence[tuple[str, Callable[[], Store]]],
    how: How | None = None,
    memories: Sequence[Memory] | None = None,
) -> list[Outcome]:
    """:func:`mirror` to each target at the same time; none waits for, or fails with, another.

    Args:
        source: The store to copy from.
        targets: For each its URI, and what opens it (which may fail).
        how: See :class:`How`; a limit on bytes a second is for all together.
        memories: What earlier passes have learnt, one for each target.
    """
    how = how or How()
    known = memories or [Memory() for _ in targets]

    def one(name: str, open_target: Callable[[], Store], memory: Memory) -> Outcome:
        try:
            result = mirror(source, open_target(), how, memory)
        except CkptError as error:
            if not isinstance(error, NothingYetError):
                note_failure(source, name, error)
            return Outcome(name, None, error)
        return Outcome(name, result, result.failure)

    with ThreadPoolExecutor(max(1, len(targets)), thread_name_prefix="ckptstore-mirror") as pool:
        pairs = zip(targets, known, strict=True)
        futures = [pool.submit(one, name, opened, memory) for (name, opened), memory in pairs]
        try:
            return [f.result() for f in futures]
        except BaseException:  # an interrupt: the copies keep what they have
            how.cancel.set()
            raise
