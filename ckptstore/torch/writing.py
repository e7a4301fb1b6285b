"""Taking a state as it is now, and writing it from all ranks as one checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from ckptstore.errors import UsageError
from ckptstore.layout import check_new_path
from ckptstore.records import Commit
from ckptstore.saveoptions import SaveOptions
from ckptstore.store import Store
from ckptstore.torch import values
from ckptstore.torch.metadata import STATE
from ckptstore.torch.planning import SavePlanner
from ckptstore.torch.ranks import Ranks
from ckptstore.torch.shared import SharedSave
from ckptstore.torch.staging import Staging
from ckptstore.torch.writer import StoreWriter

Files = Mapping[str, bytes | str | os.PathLike[str]]
"""Files beside the parts: content, or the path of a file of this rank's machine."""


@dataclass
class Taken:
    """A state as it was when the save was called.

    Attributes:
        parts: What this rank knows of each part.
        others: Each part's values that are no tensors.
        files: Files beside the parts.
    """

    parts: dict[str, SavePlanner]
    others: dict[str, bytes]
    files: Files

    def tensors(self) -> dict[tuple[str, MetadataIndex], torch.Tensor]:
        """All tensors, by part and index."""
        return {
            (part, index): tensor
            for part, planner in self.parts.items()
            for index, tensor in planner.tensors.items()
        }


@dataclass
class _Agreed:
    """What the ranks agreed on when a part was last saved.

    Attributes:
        local: What this rank could have written.
        final: What it wrote.
        metadata: The index; on the coordinator only.
    """

    local: SavePlan
    final: SavePlan
    metadata: Metadata | None


@dataclass
class _Told:
    """What each rank tells the others before anything is written.

    Attributes:
        parts: Names of its parts.
        files: Paths of its files.
        as_before: Whether its part of every plan is that of the last save.
    """

    parts: list[str]
    files: list[str]
    as_before: bool


class StateWriter:
    """Writes states; what the ranks agreed on is kept for as long as it fits.

    Args:
        ranks: The ranks, which nothing else may use while a save is written.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._staging = Staging()
        self._agreed: dict[str, _Agreed] = {}

    def take(self, state: Mapping[str, Any], files: Files, *, stage: bool) -> Taken | Exception:
        """The state as it is now; no collective.

        Args:
            state, files: As those of :meth:`Checkpointer.save`.
            stage: Copy its tensors to host memory, where they stay until the next call.

        Returns:
            The state; or what is wrong with it, to be told by all ranks together, by
            :meth:`write`.
        """
        try:
            for path in files:
                check_new_path(path)
            taken = Taken({}, {}, dict(files))
            for part, value in state.items():
                check_new_path(part)
                if not isinstance(value, Mapping):
                    raise UsageError(
                        f"state[{part!r}] is a {type(value).__name__}: a part is a mapping",
                        hint='give {"model": {...}, "optimizer": {...}}',
                    )
                tensors, others = values.split(value, part)
                coordinator = self._ranks.is_coordinator
                taken.parts[part] = SavePlanner(tensors, is_coordinator=coordinator)
                taken.others[part] = values.encode(others) if others else b""
            if stage:
                for (part, index), copy in self._staging.copy(taken.tensors()).items():
                    taken.parts[part].tensors[index] = copy
        except Exception as error:  # noqa: BLE001 - raised on every rank, by write
            return error
        return taken

    def write(
        self, store: Store, run: str, step: int, taken: Taken | Exception, options: SaveOptions
    ) -> Commit:
        """Write what was taken. A collective.

        Raises:
            CkptError: a rank failed, or the ranks do not fit together; there is no checkpoint.
        """

        def tell() -> _Told:
            if isinstance(taken, Exception):
                raise taken
            known = {part: agreed.local for part, agreed in self._agreed.items()}
            same = all(known.get(p) == planner.local_plan for p, planner in taken.parts.items())
            return _Told(list(taken.parts), list(taken.files), same)

        told = self._ranks.everywhere(tell)
        _check_together(told)
        assert isinstance(taken, Taken)
        as_before = all(t.as_before for t in told)
        with SharedSave(store, run, step, self._ranks, options) as save:
            for part, planner in taken.parts.items():
                self._write_part(save, part, planner, taken.others[part], as_before=as_before)
            for path, content in taken.files.items():
                if isinstance(content, bytes):
                    save.add_bytes(path, content)
                else:
                    save.add_file(path, content)
        assert save.committed is not None
        return save.committed

    def _write_part(
        self, save: SharedSave, part: str, planner: SavePlanner, others: bytes, *, as_before: bool
    ) -> None:
        writer = StoreWriter(save, part)
        if not as_before:
            self._agreed[part] = self._agree(planner)
        agreed = self._agreed[part]
        final = planner.finish_plan(agreed.final)
        results = self._ranks.gathered(lambda: writer.write_data(final, planner).value())

        def finish() -> None:
            assert agreed.metadata is not None
            assert results is not None
            writer.finish(agreed.metadata, results)
            if others:
                save.add_bytes(f"{part}/{STATE}", others)

        self._ranks.on_coordinator(finish)

    def _agree(self, planner: SavePlanner) -> _Agreed:
        """Which rank writes what, and the index of it all."""
        plans = self._ranks.gathered(lambda: planner.local_plan)
        metadata: Metadata | None = None

        def decide() -> list[SavePlan]:
            nonlocal metadata
            assert plans is not None
            final, metadata = planner.create_global_plan(plans)
            return final

        return _Agreed(planner.local_plan, self._ranks.scattered(decide), metadata)

    def close(self) -> None:
        """Give the host memory back."""
        self._staging.close()


def _check_together(told: list[_Told]) -> None:
    """Refuse states of which the ranks do not have the same parts, or files that two of them give.

    Every rank comes to the same answer.
    """
    for rank, one in enumerate(told):
        if one.parts != told[0].parts:
            raise UsageError(
                f"rank {rank} saves the parts {_spell(one.parts)}, rank 0 {_spell(told[0].parts)}",
                hint="give the same parts, in the same order, on every rank",
            )
    given = Counter(path for one in told for path in one.files)
    for path, count in given.items():
        if count > 1:
            ranks = [str(rank) for rank, one in enumerate(told) if path in one.files]
            raise UsageError(
                f"the file {path!r} is given by the ranks {', '.join(ranks)}",
                hint="give it on one of them, or put the rank into its name",
            )


def _spell(names: list[str]) -> str:
    return ", ".join(names) or "(none)"
