"""Room for a training's saves: retention after each of them, and what to do when the disk is full.

All of it happens beside training: the retention in a thread of its own, on the coordinator alone.
Nothing that goes wrong in it is more than a warning, for the checkpoint that was just saved stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ckptstore.errors import CkptError, NoSpaceError
from ckptstore.lives import require_newest
from ckptstore.maintenance.policy import Policy
from ckptstore.maintenance.retention import prune
from ckptstore.records import Commit
from ckptstore.room import empty_trash, make_room
from ckptstore.store import Store
from ckptstore.torch.ranks import Ranks

log = logging.getLogger(__name__)


class Retention:
    """Prunes a run after each of its saves, and makes room for them.

    Args:
        store, run: What is saved to.
        policy: What is kept; ``None`` keeps all.
    """

    def __init__(self, store: Store, run: str, policy: Policy | None) -> None:
        self._store = store
        self._run = run
        self._policy = policy
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckptstore-retention")
        self._pruning: Future[None] | None = None
        self._told: frozenset[str] = frozenset()
        self._was_short = False

    def save(self, write: Callable[[], Commit], ranks: Ranks, life: int | None) -> Commit:
        """Write a checkpoint, once more if the disk was full and room could be made. A collective.

        Args:
            write: Writes it; a collective that raises the same on every rank.
            ranks: Those that write.
            life: The run's life that saves; a newer one ends its retention.

        Raises:
            CkptError: what ``write`` raised.
        """
        if ranks.is_coordinator:
            self._prepare()
        try:
            commit = write()
        except NoSpaceError:
            if not ranks.on_coordinator(self._free):
                raise
            commit = write()
        if ranks.is_coordinator and self._policy is not None:
            self._pruning = self._thread.submit(self._prune, self._policy, life)
        return commit

    def wait(self) -> None:
        """Wait until the retention has ended."""
        if self._pruning is not None:
            self._pruning.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        self._thread.shutdown()

    def _prepare(self) -> None:
        """Warn if the next checkpoint may not fit; it will be about as large as the newest."""
        self.wait()
        catalog = self._store.catalog
        try:
            newest = catalog.newest(self._run) if self._store.exists else None
            if newest is None or newest.commit is None:
                return
            need = newest.commit.size
            short = make_room(catalog, self._run, need)
        except CkptError:  # the save will say it
            return
        if short and not self._was_short:
            log.warning(
                "%s has room for %s bytes, and the newest checkpoint of %s has %s: the next save "
                "may fail",
                *(catalog.uri, f"{need - short:,}", self._run, f"{need:,}"),
            )
        self._was_short = short > 0

    def _free(self) -> bool:
        """Free what can be when a save has found the disk full; whether anything was."""
        self.wait()
        freed = 0
        try:
            freed = empty_trash(self._store.catalog, self._run)
            if self._policy is not None:
                at_once = replace(self._policy, owed_limit=0, grace=0.0)
                result = prune(self._store, self._run, at_once)
                freed += result.freed
                self._tell(result.warnings)
        except CkptError as error:
            log.warning("the disk is full, and not all could be freed that may go: %s", error)
        if freed:
            log.warning(
                "the disk was full: %s bytes were freed, and the save is tried again", f"{freed:,}"
            )
        return freed > 0

    def _prune(self, policy: Policy, life: int | None) -> None:
        try:
            if life is not None:
                require_newest(self._store.catalog, self._run, life)
            result = prune(self._store, self._run, policy)
        except Exception as error:  # noqa: BLE001 - training goes on whatever happens here
            log.warning("old checkpoints of %s were not all deleted: %s", self._run, error)
            return
        for decision in result.deleted:
            log.info("retention deleted %s: %s", decision.name, decision.reasons[0])
        self._tell(result.warnings)

    def _tell(self, warnings: tuple[str, ...]) -> None:
        """Warn; what was said last time is not said again."""
        for text in warnings:
            if text not in self._told:
                log.warning("%s", text)
        self._told = frozenset(warnings)
