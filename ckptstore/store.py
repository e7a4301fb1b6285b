"""The store as a program uses it: open, save, list, find."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ckptstore import deleting, listing, marks
from ckptstore.advice import what_to_do
from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.catalog import Catalog, Found
from ckptstore.deleting import DEFAULT_GRACE
from ckptstore.errors import IntegrityError, NotFoundError, UsageError
from ckptstore.ids import IdFactory, default_ids
from ckptstore.layout import Name, check_run, check_step
from ckptstore.listing import Row, ref_of
from ckptstore.lives import begin_life
from ckptstore.pushing import PushResult, push
from ckptstore.reading import Checkpoint
from ckptstore.records import BestRule
from ckptstore.runview import RunView
from ckptstore.saveoptions import SaveOptions
from ckptstore.saving import Save
from ckptstore.scanning import Scan, scan, step_of
from ckptstore.transfer import ProgressCallback
from ckptstore.uri import Ref, StoreURI


def open_store(uri: str, *, ids: IdFactory | None = None) -> Store:
    """Open the store at a path or URI; it need not exist yet.

    Nothing is made by opening: the first save (or :meth:`Store.create`) makes the store.

    Raises:
        UsageError: the URI is malformed, or its scheme or an option is unknown.
        IntegrityError: the store there is of a newer format, or its marker is damaged.
    """
    parsed = StoreURI.parse(os.fspath(uri))
    return Store(open_backend(parsed), ids=ids)


class Store:
    """A place that checkpoints live in.

    Args:
        backend: The storage.
        ids: Makes the ids in names; chance by default.
    """

    def __init__(self, backend: Backend, *, ids: IdFactory | None = None) -> None:
        self.backend = backend
        self.catalog = Catalog(backend, ids or default_ids())
        self.catalog.find_marker()

    def __repr__(self) -> str:
        return f"<Store {self.uri}>"

    @property
    def uri(self) -> str:
        """Where it is, without options and secrets."""
        return self.backend.uri

    @property
    def exists(self) -> bool:
        """Whether there is a store yet."""
        return self.catalog.find_marker() is not None

    @property
    def id(self) -> str:
        """The store's identity. Raises :class:`NotFoundError` when there is no store."""
        return self.catalog.marker().store

    def create(self, *, into_nonempty: bool = False) -> bool:
        """Make the store if there is none. Returns whether it was made.

        Raises:
            ConflictError: other things lie there, and ``into_nonempty`` is not set.
        """
        existed = self.exists
        self.catalog.create(into_nonempty=into_nonempty)
        return not existed

    # Saving

    def begin_life(self, run: str) -> int:
        """Begin a new life of a run, before it is decided what the run resumes from.

        When this has returned, no save that was given an older life can commit any more: what a
        plan made from now on does not see will never be. The store is made if there is none.

        Returns:
            The life's number, to be given to each of its saves.

        Raises:
            CkptError: the storage failed; the older lives may go on.
        """
        check_run(run)
        self.catalog.create()
        return begin_life(self.catalog, run).life

    def save(
        self,
        run: str,
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        best: BestRule | None = None,
        tags: Sequence[str] = (),
        threads: int | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        life: int | None = None,
    ) -> Save:
        """Begin a save; use it as a context manager, which commits on success.

        Args:
            run, step: What is saved.
            metadata: Any JSON object; kept in the manifest.
            metrics: Numbers for the record; NaN and infinities are left out with a warning.
            best: The rule for the run's best checkpoint; by default the one in force.
            tags: Tags from birth on.
            threads: Blocks in flight; each costs 16 MiB of memory.
            progress: Called with the bytes just written.
            cancel: Set it from any thread to end the save.
            life: The run's life that the save belongs to, from :meth:`begin_life`.

        Raises:
            SupersededError: a newer life of the run has begun.
        """
        options = SaveOptions(
            metadata=metadata or {},
            metrics=metrics or {},
            best=best,
            tags=tags,
            threads=threads,
            progress=progress,
            cancel=cancel,
            life=life,
        )
        return Save(self.catalog, run, step, options)

    def push(
        self,
        source: str | os.PathLike[str] | Scan,
        run: str,
        step: int | None = None,
        options: SaveOptions | None = None,
    ) -> PushResult:
        """Store a directory as a checkpoint; what the store has already is not sent again.

        Args:
            source: The directory, or a scan of it.
            run: The run.
            step: The step; ``None`` reads it from the directory (:func:`step_of`).
            options: What a save is told; a failed push leaves its files for the next by default.

        Raises:
            NotFoundError: there is no such directory.
            SourceChangedError: it was written to meanwhile.
        """
        check_run(run)
        scanned = source if isinstance(source, Scan) else scan(source)
        step = check_step(step_of(scanned) if step is None else step)
        return push(self.catalog, scanned, run, step, options or SaveOptions(keep_partial=True))

    # Finding

    def runs(self) -> list[str]:
        """The names of the runs."""
        return self.catalog.runs()

    def list(self, run: str) -> list[Checkpoint]:
        """The readable commits of a run, in order of saving.

        Raises:
            NotFoundError: there is no such store or run.
        """
        check_run(run)
        self.catalog.require_run(run)
        view = RunView.of(self.catalog, run)
        newest = {f.name.step: f.name for f in view.found}
        return [
            Checkpoint(
                self.catalog,
                run,
                commit,
                ref=ref_of(run, name, newest),
                standing=view.standing(name),
            )
            for name, commit in view.commits
        ]

    def latest(self, run: str) -> Checkpoint | None:
        """The newest commit of a run, or ``None``.

        Raises:
            IntegrityError: the newest record cannot be read (``resume`` falls back, this does not).
        """
        check_run(run)
        self.catalog.marker()
        found = self.catalog.newest(run)
        return self.checkpoint_of(run, found) if found is not None else None

    def get(self, run: str, *, step: int | None = None, name: str | None = None) -> Checkpoint:
        """A commit by its step (the newest with it) or by its full name.

        Raises:
            NotFoundError: there is none.
            IntegrityError: its record cannot be read.
        """
        if (step is None) == (name is None):
            raise UsageError("give either a step or a name")
        if step is not None:
            check_step(step)
        return self.resolve(Ref(None, check_run(run), str(step) if name is None else name))

    def resolve(self, ref: Ref) -> Checkpoint:
        """The commit that a REF names.

        Raises:
            NotFoundError: there is none.
            IntegrityError: its record cannot be read.
        """
        run, selector = ref.run, ref.selector or "latest"
        self.catalog.require_run(run)
        if ref.name is not None:
            return self._named(run, ref.name)
        if ref.step is not None:
            return self._with_step(run, ref.step)
        if selector == "latest":
            newest = self.catalog.newest(run)
            if newest is None:
                raise NotFoundError(f"run {run!r} in {self.uri} has no checkpoint")
            return self.checkpoint_of(run, newest)
        view = RunView.of(self.catalog, run)
        if selector == "best":
            if view.best_rule is None:
                raise NotFoundError(
                    f"run {run!r} has no rule for its best checkpoint",
                    hint="push with --best METRIC:max (or :min)",
                )
            if view.best is None:
                raise NotFoundError(
                    f"no intact checkpoint of {run!r} has the metric {view.best_rule.metric!r}"
                )
            return self._named(run, view.best)
        for name, commit in reversed(view.commits):
            if selector in view.standing(name).tags(commit):
                return self._named(run, name)
        raise NotFoundError(f"no checkpoint of {run!r} in {self.uri} has the tag {selector!r}")

    def _named(self, run: str, name: Name) -> Checkpoint:
        found = self.catalog.find(run, name)
        if found is None or found.is_void:
            raise NotFoundError(f"there is no checkpoint {name} in run {run!r} of {self.uri}")
        return self.checkpoint_of(run, found)

    def _with_step(self, run: str, step: int) -> Checkpoint:
        found = self.catalog.newest(run, step)
        if found is not None:
            return self.checkpoint_of(run, found)
        steps = sorted({f.name.step for f in RunView.of(self.catalog, run).found})
        near = sorted(steps, key=lambda s: (abs(s - step), s))[:5]
        hint = f"near it: {', '.join(map(str, sorted(near)))}" if near else None
        raise NotFoundError(f"run {run!r} in {self.uri} has no step {step}", hint=hint)

    def checkpoint_of(self, run: str, found: Found) -> Checkpoint:
        """The commit that was found.

        Raises:
            IntegrityError: its record cannot be read.
        """
        if found.commit is None:
            assert found.problem is not None
            raise IntegrityError(
                str(found.problem),
                hint=found.problem.hint or what_to_do(self.catalog, run, f"{run}@{found.name}"),
            )
        newest = self.catalog.newest(run, found.name.step)
        names = {found.name.step: newest.name} if newest is not None else {}
        return Checkpoint(self.catalog, run, found.commit, ref=ref_of(run, found.name, names))

    def rows(self, run: str | None = None, *, everything: bool = False) -> Sequence[Row]:
        """A listing for people: see :func:`ckptstore.listing.rows`."""
        return listing.rows(self.catalog, run, everything=everything)

    # Changing what is there

    def delete(
        self, checkpoint: Checkpoint, *, grace: float = DEFAULT_GRACE, force: bool = False
    ) -> None:
        """Move a checkpoint to the trash; see :func:`ckptstore.deleting.delete`."""
        deleting.delete(self.catalog, checkpoint, grace=grace, force=force)

    def undelete(self, ref: Ref) -> Checkpoint:
        """Bring back what :meth:`delete` took: the newest in the trash that ``ref`` fits.

        Raises:
            NotFoundError: nothing in the trash fits.
        """
        self.catalog.require_run(ref.run)
        names = [
            name
            for name in self.catalog.trash_names(ref.run)
            if name == ref.name or name.step == ref.step or ref.selector == "latest"
        ]
        if ref.name is not None and not names:
            names = [ref.name]
        if not names:
            raise NotFoundError(
                f"nothing in the trash of {ref.run!r} is {ref}",
                hint=f"what is: ckpt list {self.uri} {ref.run} --all",
            )
        return deleting.undelete(self.catalog, ref.run, names[-1])

    def pin(self, checkpoint: Checkpoint) -> bool:
        """Protect a checkpoint from deletion. Returns whether that changed anything."""
        return marks.pin(self.catalog, checkpoint.run, checkpoint.name)

    def unpin(self, checkpoint: Checkpoint) -> bool:
        """End a pin. Returns whether that changed anything."""
        return marks.unpin(self.catalog, checkpoint.run, checkpoint.name)

    def tag(self, checkpoint: Checkpoint, tag: str) -> bool:
        """Give a checkpoint a tag. Returns whether that changed anything."""
        run, name = checkpoint.run, checkpoint.name
        return marks.add_tag(self.catalog, run, checkpoint.commit, name, tag)

    def untag(self, checkpoint: Checkpoint, tag: str) -> bool:
        """Take a tag away. Returns whether that changed anything."""
        run, name = checkpoint.run, checkpoint.name
        return marks.remove_tag(self.catalog, run, name, checkpoint.commit, tag)

    def add_metrics(self, checkpoint: Checkpoint, metrics: Mapping[str, float]) -> None:
        """Add metrics that were measured after the save."""
        marks.add_metrics(self.catalog, checkpoint.run, checkpoint.name, metrics)
