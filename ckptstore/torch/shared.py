"""A save that several ranks write: rank 0 begins and commits it, every rank adds files."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch.distributed as dist

from ckptstore.adding import Adding
from ckptstore.backends.base import Reader
from ckptstore.errors import UsageError
from ckptstore.layout import Name
from ckptstore.manifest import FileEntry
from ckptstore.records import Commit
from ckptstore.saveoptions import SaveOptions
from ckptstore.saving import Save
from ckptstore.store import Store
from ckptstore.torch.ranks import Ranks


class SharedSave:
    """A save under way on all ranks: a context manager that commits on success.

    Making one, and leaving its block, are collectives. A rank that fails makes the save fail on all
    of them, with its number in the message; then nothing is visible in the store.

    Args:
        store: The store; every rank opens the same.
        run, step: What is saved.
        group: The ranks; its backend must send objects from host memory (gloo). ``None`` is this
            process alone.
        options: What a save is told; rank 0's count.

    Attributes:
        ranks: The ranks.
        committed: The record, on every rank, once it is committed.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        step: int,
        group: dist.ProcessGroup | Ranks | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        self.ranks = group if isinstance(group, Ranks) else Ranks(group)
        self.committed: Commit | None = None
        self._save: Save | None = None
        options = options or SaveOptions()

        def begin() -> Name:
            self._save = Save(store.catalog, run, step, options)
            return self._save.name

        name = self.ranks.on_coordinator(begin)
        self._adding: Adding = self._save or Adding(store.backend, run, name, options)

    def add(self, path: str, open_reader: Callable[[], Reader], size: int) -> None:
        """Store ``size`` bytes that a reader gives as ``path``: in parallel, hashed in passing."""
        self._adding.add_transfers([self._adding.transfer(path, size, open_reader)])

    def add_bytes(self, path: str, data: bytes) -> None:
        """Store ``data`` as ``path``."""
        self._adding.add_bytes(path, data)

    def add_file(self, path: str, source: str | os.PathLike[str]) -> None:
        """Store a file of this rank's machine as ``path``."""
        self._adding.add_file(path, source)

    def commit(self) -> Commit:
        """Make the checkpoint exist, once every rank has called this. A collective.

        Raises:
            CkptError: a rank failed, two ranks wrote one file, or the storage failed.
        """
        entries = self.ranks.gathered(self._finished)

        def commit() -> Commit:
            assert self._save is not None
            assert entries is not None
            self._collect(self._save, entries)
            return self._save.commit()

        self.committed = self.ranks.on_coordinator(commit)
        return self.committed

    def _finished(self) -> list[FileEntry]:
        if self._save is not None:
            return []
        return self._adding.entries

    @staticmethod
    def _collect(save: Save, entries: list[list[FileEntry]]) -> None:
        """Count what the other ranks wrote."""
        for rank, files in enumerate(entries):
            for entry in files:
                if entry.path in save.paths:
                    raise UsageError(f"rank {rank} wrote {entry.path!r}, and another rank too")
                save.complete(entry, entry.size)

    def abort(self, error: BaseException | None = None) -> None:
        """End the save without a checkpoint; what rank 0 began, it clears away."""
        if self._save is not None:
            self._save.abort(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):  # an interrupt waits for nobody
            self.abort(error)
            return

        def outcome() -> None:
            if error is not None:
                raise error

        try:
            self.ranks.everywhere(outcome)
            self.commit()
        except BaseException as failure:
            self.abort(failure)
            if failure is not error:
                raise
