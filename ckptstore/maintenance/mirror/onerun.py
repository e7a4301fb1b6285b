"""One pass of a mirror over one run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ckptstore.advice import repair_command, repair_from_command
from ckptstore.catalog import Found
from ckptstore.errors import (
    CkptError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    TemporaryError,
)
from ckptstore.layout import Name
from ckptstore.leases import is_live
from ckptstore.maintenance.mirror.carrying import Marks
from ckptstore.maintenance.mirror.copying import BusyError, copy_checkpoint
from ckptstore.maintenance.mirror.how import How
from ckptstore.maintenance.mirror.results import Skipped
from ckptstore.reading import Checkpoint
from ckptstore.records import Commit
from ckptstore.store import Store
from ckptstore.voiding import discard

log = logging.getLogger(__name__)

ACKNOWLEDGE_SECONDS = 5.0
"""What has been copied is noted in the source at most this often, and at the end of a run."""


@dataclass
class Memory:
    """What passes of one process need not find out again.

    Attributes:
        own_marks, damage: See :class:`Marks`.
        unwritable: The source cannot be written: it is not tried again.
        said_unnoted: It was said that something could not be noted in the source.
    """

    own_marks: set[str] = field(default_factory=set)
    damage: dict[frozenset[str], bool] = field(default_factory=dict)
    unwritable: bool = False
    said_unnoted: bool = False


class RunPass:
    """A pass over one run.

    Args:
        source, target, run: What to copy, and where to.
        how: Limits, order, ways to end it.
        memory: What earlier passes have learnt.
        acknowledged: What the source has noted so far that the target holds.
        acknowledge: Notes in the source what the target holds of the run.

    Attributes:
        lacking: What the target lacks, so far.
        copied: REFs of what was copied (in a dry run: would be).
        skipped: What could not be.
        sent: Bytes sent.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        run: str,
        how: How,
        memory: Memory,
        acknowledged: Collection[Name],
        acknowledge: Callable[[str, Iterable[Name]], None],
    ) -> None:
        self.source = source
        self.target = target
        self.run = run
        self.how = how
        self.memory = memory
        self.acknowledge = acknowledge
        self._acknowledged = acknowledged
        self.lacking: dict[Name, Commit] = {}
        self.copied: list[str] = []
        self.skipped: list[Skipped] = []
        self.sent = 0
        self._held: set[Name] = set()
        self._acknowledged_at = time.monotonic()

    def copy(self) -> None:
        """Copy what is lacking."""
        source, target = self.source.catalog, self.target.catalog
        there, trashed = self._there()  # in this order: a delete writes its trash record first
        self._marks = Marks(source, target, self.run, self.memory.own_marks, self.memory.damage)
        names = source.record_names(self.run)
        gone = set(source.trash_names(self.run)) | set(source.directories(self.run))
        self._held = {n for n in names if n in there or n in trashed}
        wanted = [n for n in names if n not in self._held]
        self._judge(source.find_all(self.run, wanted))
        foreign = self._foreign(there - set(names) - gone)
        if not self.how.dry_run:
            self._clean(there)
            self._check_copies(names, there)
        self.acknowledge(self.run, self._held)
        order = sorted(self.lacking, reverse=self.how.newest_first)
        for name in order:
            if self.how.ending:
                break
            if foreign is not None and name.seq >= foreign.seq:
                self._skip_foreign(name, foreign)
            else:
                self._copy(name)
        self.acknowledge(self.run, self._held)

    def _there(self) -> tuple[set[Name], set[Name]]:
        if not self.target.exists:
            return set(), set()
        catalog = self.target.catalog
        return set(catalog.record_names(self.run)), set(catalog.trash_names(self.run))

    def _judge(self, found: Sequence[Found]) -> None:
        """Take up what can be copied; a void has nothing to copy."""
        for one in found:
            if one.commit is not None:
                self.lacking[one.name] = one.commit
            elif not one.is_void:
                self._skip(f"{self.run}@{one.name}", str(one.problem), self._repair(one.name))

    def _skip(self, ref: str, reason: str, hint: str | None) -> None:
        self.skipped.append(Skipped(ref, reason, hint))

    def _repair(self, name: Name) -> str:
        ref = f"{self.run}@{name}"
        return repair_command(self.source.catalog, ref, without=self.target.uri)

    def _foreign(self, unknown: Iterable[Name]) -> Name | None:
        """The first checkpoint that was saved to the target itself and the source never knew.

        What the source saved later than that would compete with it for being the newest: somebody
        has gone on with the run in the mirror, or two runs have one name.
        """
        names = sorted(unknown)
        if not names:
            return None
        known = self.source.id
        for found in self.target.catalog.find_all(self.run, names):
            if found.commit is not None and found.commit.store != known:
                return found.name
        return None

    def _skip_foreign(self, name: Name, foreign: Name) -> None:
        self._skip(
            f"{self.run}@{name}",
            f"the run has gone on in {self.target.uri}: {foreign} there is not from "
            f"{self.source.uri}",
            f"keep one of the two: ckpt delete what is not wanted of run {self.run} in either, or "
            "mirror into another store",
        )

    def _clean(self, there: set[Name]) -> None:
        """Give up copies that were begun and whose source has been removed for good."""
        source = self.source.catalog
        for held in self.target.catalog.leases(self.run):
            ours = held.lease is not None and held.lease.copy_of == self.source.id
            if not ours or held.name in there or held.name in self.lacking:
                continue
            if is_live(held, self.target.backend.clock()):
                continue
            found = source.find(self.run, held.name)
            kept = source.find_trash(self.run, held.name)[0] is not None
            if found is not None and found.is_void and not kept:  # a lost record may come back
                reason = "its source was removed for good"
                if discard(self.target.catalog, self.run, held.name, reason):
                    self.target.backend.delete([held.key])

    def _check_copies(self, names: Sequence[Name], there: set[Name]) -> None:
        """Carry marks to what is there, and take nothing for mirrored that is damaged there."""
        for name in names:
            if name not in there:
                continue
            try:
                self._marks.carry(name)
            except NotFoundError:
                if not self._has_been_there(name):
                    raise
                continue
            if self._marks.is_damaged_there(name):
                self._spoilt(name, "it is damaged")
            elif name not in self._acknowledged and not self._has_its_record(name):
                self._spoilt(name, "its record is not what it is here")

    def _spoilt(self, name: Name, what: str) -> None:
        """A copy that is none: whoever prunes the source must not rely on it."""
        self._held.discard(name)
        ref = f"{self.run}@{name}"
        self._skip(
            ref,
            f"{what} in {self.target.uri}",
            repair_from_command(self.target.catalog, ref, self.source.uri),
        )

    def _has_its_record(self, name: Name) -> bool:
        there = self.target.catalog.find(self.run, name)
        if there is None or there.is_void:
            return True  # it was deleted there meanwhile
        here = self.source.catalog.find(self.run, name)
        if here is None or here.is_void:  # it was deleted here
            return there.commit is not None
        return there.commit is not None and here.data == there.data

    def _copy(self, name: Name) -> None:
        checkpoint = Checkpoint(
            self.source.catalog, self.run, self.lacking[name], ref=f"{self.run}@{name}"
        )
        try:
            done = self._try(checkpoint)
        except BusyError as error:
            log.info("%s", error)
        except (NotFoundError, ConflictError, IntegrityError, TemporaryError) as error:
            self._failed(checkpoint, error)
        else:
            if done:
                self._done(checkpoint)

    def _failed(
        self,
        checkpoint: Checkpoint,
        error: NotFoundError | ConflictError | IntegrityError | TemporaryError,
    ) -> None:
        """What an error of one copy means: deleted here or there meanwhile, or not to be copied."""
        name = checkpoint.name
        if isinstance(error, TemporaryError) and not self._answers():
            raise error
        if self._has_been_there(name):  # another mirror copied it at the same time
            del self.lacking[name]
            self._held.add(name)
        elif isinstance(error, TemporaryError):
            raise error
        elif isinstance(error, NotFoundError):
            if self._still_there(name):
                raise error
            del self.lacking[name]  # the source deleted it
        else:
            hint = self._repair(name) if isinstance(error, IntegrityError) else error.hint
            self._skip(checkpoint.ref, str(error), hint)

    def _try(self, checkpoint: Checkpoint) -> bool:
        """Copy it; whether it was (in a dry run: would be)."""
        name = checkpoint.name
        notes = checkpoint.standing.damage
        if checkpoint.standing.damaged:
            reason = f"damaged: {notes[0].path}: {notes[0].reason}" if notes else "damaged"
            self._skip(checkpoint.ref, reason, self._repair(name))
            return False
        if self.how.dry_run:
            return True
        if self.target.catalog.find(self.run, name) is not None:  # it came meanwhile
            del self.lacking[name]
            self._held.add(name)
            return False
        carry = self._marks.carrier(name)
        self.sent += copy_checkpoint(checkpoint, self.target.catalog, self.how, carry)
        return True

    def _done(self, checkpoint: Checkpoint) -> None:
        self.copied.append(checkpoint.ref)
        if self.how.dry_run:
            return
        del self.lacking[checkpoint.name]
        self._held.add(checkpoint.name)
        if time.monotonic() - self._acknowledged_at > ACKNOWLEDGE_SECONDS:
            self.acknowledge(self.run, self._held)
            self._acknowledged_at = time.monotonic()

    def _answers(self) -> bool:
        """Whether the target can be asked anything."""
        try:
            self.target.catalog.check_alive()
        except CkptError:
            return False
        return True

    def _has_been_there(self, name: Name) -> bool:
        """Whether the target holds the checkpoint, or has given it up since it was looked for."""
        catalog = self.target.catalog
        catalog.check_alive()
        found = catalog.find(self.run, name)
        if found is None:
            return catalog.find_trash(self.run, name)[0] is not None
        return found.is_void or (
            found.commit is not None and found.commit == self.lacking.get(name)
        )

    def _still_there(self, name: Name) -> bool:
        self.source.catalog.check_alive()
        found = self.source.catalog.find(self.run, name)
        return found is not None and not found.is_void
