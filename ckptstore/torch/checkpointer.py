"""Saving and loading the state of a training loop."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist

from ckptstore.errors import CkptError, IntegrityError, NotFoundError, SupersededError, UsageError
from ckptstore.layout import Name
from ckptstore.maintenance.policy import Policy
from ckptstore.reading import Checkpoint
from ckptstore.records import BestRule, Commit
from ckptstore.resume import ResumePlan, plan_resume
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store, open_store
from ckptstore.torch.loading import load_part
from ckptstore.torch.ranks import Ranks
from ckptstore.torch.retaining import Retention
from ckptstore.torch.writing import Files, StateWriter

log = logging.getLogger(__name__)


class PendingSave:
    """A save that was begun; with ``wait=False`` it may still be written.

    Attributes:
        step: What is saved.
        stall: Seconds that the caller was kept from going on.
    """

    def __init__(self, step: int, future: Future[Commit]) -> None:
        self.step = step
        self.stall = 0.0
        self._future = future

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self._future.done()

    def result(self) -> Commit:
        """The record, once it is committed.

        Raises:
            CkptError: the save failed; there is no such checkpoint.
        """
        return self._future.result()


class Checkpointer:
    """Saves and loads a training loop's state, on all ranks together.

    All methods are collectives: every rank calls them, in the same order.

        checkpointer = Checkpointer("/data/ckpts", "gsm8k")
        state = {"model": model_state, "optimizer": optimizer_state}
        resumed = checkpointer.load(state)              # the newest intact one, or None
        ...
        checkpointer.save(step, state, wait=False)      # training goes on while it is written
        ...
        checkpointer.close()                            # waits, and raises what went wrong

    Args:
        store: The store, or its URI.
        run: The run.
        group: The ranks; ``None`` takes those of ``torch.distributed`` where it is initialized.
            Gloo groups of the same ranks are made: saves must not meet other collectives.
        life: The run's life that saves belong to (:meth:`Store.begin_life`).
        on_error: What a failed save means: ``raise`` raises its error, from a background save at
            the next call. ``warn`` logs it, and training goes on; but a save that failed because a
            newer life of the run has begun is always raised.
        best: The rule for the run's best checkpoint.
        retention: What is kept of the run after each save; ``None`` keeps all.
        threads: Blocks (16 MiB) in flight on a rank.
        timeout: Seconds after which a rank that does not answer is an error.

    Attributes:
        ranks: The ranks, for what a caller wants to agree on; no save that is under way uses it.
    """

    def __init__(
        self,
        store: Store | str,
        run: str,
        *,
        group: dist.ProcessGroup | None = None,
        life: int | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        best: BestRule | None = None,
        retention: Policy | None = None,
        threads: int | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self.store = open_store(store) if isinstance(store, str) else store
        self.run = run
        self.life = life
        self._on_error = on_error
        self._best = best
        self._threads = threads
        self.ranks = Ranks(_own_group(group, timeout))
        # Collectives of two threads in one group would meet: the writing thread has its own.
        self._save_ranks = Ranks(_own_group(group, timeout))
        self._writer = StateWriter(self._save_ranks)
        self._retention = Retention(self.store, run, retention)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckptstore-save")
        self._pending: list[PendingSave] = []
        self._told: str | None = None
        self._forgotten = weakref.finalize(self, _warn_forgotten, run, self._pending)
        self._closed = False

    # Saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        files: Files | None = None,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        wait: bool = True,
    ) -> PendingSave:
        """Save a state.

        One save is in flight at most: this waits for the one before, and says what became of it.

        Args:
            step: The step that the state is of.
            state: Parts by name; each is a nest of mappings with tensors (also DTensors) at its
                leaves, and with numbers, words and lists, of which rank 0's are stored. Each part
                becomes a directory that stock tools for distributed checkpoints read.
            files: Files beside the parts, from any rank; no two ranks give the same path.
            metadata, metrics, tags: As those of :meth:`Store.save`; rank 0's count.
            wait: Return when the checkpoint exists. Otherwise the state is copied to host memory,
                and may be changed as soon as this returns; files given by path may not be, until
                the save has ended.

        Raises:
            CkptError: with ``on_error="raise"``, what went wrong: in this save when it is waited
                for, else in the one before.
        """
        begun = time.perf_counter()
        if self._closed:
            raise UsageError(f"the checkpointer of {self.run} is closed")
        self.wait()
        options = SaveOptions(
            metadata=metadata or {},
            metrics=metrics or {},
            best=self._best,
            tags=tags,
            threads=self._threads,
            life=self.life,
        )
        taken = self._writer.take(state, files or {}, stage=not wait)

        def write() -> Commit:
            return self._writer.write(self.store, self.run, step, taken, options)

        future = self._thread.submit(self._retention.save, write, self._save_ranks, self.life)
        pending = PendingSave(step, future)
        self._pending.append(pending)
        if wait:
            self.wait()
        pending.stall = time.perf_counter() - begun
        return pending

    def wait(self) -> Commit | None:
        """Wait for the save in flight.

        Returns:
            Its record; ``None`` when none is in flight, or it failed with ``on_error="warn"``.

        Raises:
            CkptError: it failed, with ``on_error="raise"``.
            SupersededError: a newer life of the run has begun; this one must end.
        """
        if not self._pending:
            return None
        pending = self._pending[0]
        try:
            commit = pending.result()
            self._told = None
            return commit
        except SupersededError:
            raise
        except Exception as error:
            if self._on_error == "raise":
                raise
            self._tell(pending.step, explain(error))
            return None
        finally:
            if pending.done:
                self._pending.clear()

    def _tell(self, step: int, text: str) -> None:
        """Say why a step was not saved; the same reason again is said in short."""
        if text == self._told:
            log.error("step %d of %s was not saved either", step, self.run)
        else:
            log.error("step %d of %s was not saved: %s", step, self.run, text)
        self._told = text

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Ask for the host memory that ``save(state, wait=False)`` will copy to, before it does.

        Raises:
            CkptError: as :meth:`wait`: that memory is in use while a save is in flight.
        """
        self.wait()
        self._writer.take(state, {}, stage=True)

    # Loading

    def load(
        self,
        state: Mapping[str, MutableMapping[str, Any]],
        checkpoint: Checkpoint | None = None,
        *,
        strict: bool = True,
    ) -> Checkpoint | None:
        """Load a state in place: the newest intact checkpoint's, or that of ``checkpoint``.

        Content is verified while it is read. A checkpoint found damaged is passed over for the next
        older one, by all ranks together.

        Args:
            state: Parts by name, as saved; of a model on any number of ranks. Tensors are filled,
                other values replaced.
            checkpoint: One checkpoint, which is not passed over. When it turns out to be damaged,
                part of the state has been filled.
            strict: Whether state and checkpoint must have the same tensors.

        Returns:
            The checkpoint; ``None`` when the run has none at all.

        Raises:
            IntegrityError: none of the run's checkpoints is intact, or ``checkpoint`` is not.
            UsageError: it is of another model.
            CkptError: as :meth:`wait`, for a save in flight is waited for.
        """

        def load(found: Checkpoint) -> None:
            for part, value in state.items():
                load_part(found, part, value, strict=strict, threads=self._threads)

        if checkpoint is not None:
            self.wait()
            self.ranks.everywhere(lambda: load(checkpoint))
            return checkpoint
        return self.newest_intact(load)

    def newest_intact(
        self,
        load: Callable[[Checkpoint], object],
        *,
        store: Store | None = None,
        run: str | None = None,
        plan: Callable[[Mapping[Name, str]], ResumePlan] | None = None,
    ) -> Checkpoint | None:
        """Load the newest checkpoint that every rank finds intact, with a function of one's own.

        Args:
            load: Called on every rank with the same checkpoint; must be no collective. When it
                raises :class:`IntegrityError` on a rank, the next older one is tried.
            store, run: Where to look; by default where this saves to.
            plan: Chooses, on rank 0, given what was refused (or deleted) since it was asked first;
                :func:`plan_resume` by default.

        Returns:
            The checkpoint; ``None`` when the run has none at all.

        Raises:
            IntegrityError: the run has checkpoints and none is intact.
            NotFoundError: a rank does not see the checkpoint that rank 0 sees.
        """
        self.wait()
        store, run = store or self.store, run or self.run
        plan = plan or (lambda refused: plan_resume(store, run, refused=refused))
        refused: dict[Name, str] = {}
        gone: dict[Name, _GoneError] = {}

        def choose() -> Name | None:
            try:
                found = plan(refused)
            except NotFoundError:
                return None
            return _chosen(found, refused, gone)

        while (name := self.ranks.on_coordinator(choose)) is not None:
            try:
                return self._load_everywhere(store, run, name, load)
            except IntegrityError as error:
                log.warning("%s@%d is passed over: %s", run, name.step, error)
                refused[name] = str(error)
            except _GoneError as error:  # if it was deleted meanwhile, the next plan knows
                gone[name], refused[name] = error, str(error)
        return None

    def _load_everywhere(
        self, store: Store, run: str, name: Name, load: Callable[[Checkpoint], object]
    ) -> Checkpoint:
        checkpoint: Checkpoint | None = None

        def one() -> None:
            nonlocal checkpoint
            try:
                checkpoint = store.get(run, name=str(name))
            except NotFoundError as error:
                raise _GoneError(str(error), hint=error.hint) from error
            load(checkpoint)

        self.ranks.everywhere(one)
        assert checkpoint is not None
        return checkpoint

    # Ending

    def close(self) -> None:
        """Wait for the save in flight, and give all memory back.

        Raises:
            CkptError: as :meth:`wait`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._retention.close()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            if not isinstance(error, Exception):  # an interrupt waits for nobody
                return
            self._on_error = "warn"  # what the block raised is not to be hidden by a failed save
        self.close()


def _chosen(
    plan: ResumePlan, refused: Mapping[Name, str], gone: Mapping[Name, _GoneError]
) -> Name | None:
    """What a plan chooses; ``None`` when the run has no checkpoint at all."""
    for there in gone.keys() & {passed.name for passed in plan.passed_over}:
        raise gone[there]  # and yet a rank does not see it
    if plan.chosen is None and plan.commits == 0:
        return None
    name = plan.require().name
    if name not in refused:
        return name
    raise IntegrityError(f"{plan.run}@{name.step} is not intact: {refused[name]}")


class _GoneError(NotFoundError):
    """What was chosen is not there; what a load misses in it is another matter."""


def explain(error: BaseException) -> str:
    """An error and its hint, as one line."""
    hint = error.hint if isinstance(error, CkptError) else None
    what = str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
    return f"{what} ({hint})" if hint else what


def _own_group(group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup | None:
    """A gloo group of the same ranks; ``None`` for a single process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) == 1:
        return None
    own: dist.ProcessGroup = dist.new_group(
        ranks,
        backend="gloo",
        timeout=timedelta(seconds=timeout),
        # Where all ranks take part there is no need for it, and its names differ between ranks
        # that are in different numbers of groups.
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    return own


def _warn_forgotten(run: str, pending: list[PendingSave]) -> None:
    """A program that ends without ``close`` still learns what became of its last save."""
    for save in pending:
        try:
            save.result()
        except Exception as error:  # noqa: BLE001 - all that is left to do is to tell
            log.error("step %d of %s was not saved: %s", save.step, run, explain(error))
