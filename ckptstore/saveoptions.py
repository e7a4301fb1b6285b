"""What a save is told beside its files."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptstore.errors import UsageError
from ckptstore.layout import check_life, check_tag
from ckptstore.records import BestRule
from ckptstore.transfer import ProgressCallback


@dataclass(frozen=True)
class SaveOptions:
    """What a save is told beside its files.

    Attributes:
        metadata: Any JSON object; kept in the manifest.
        metrics: Numbers for the record; those that are not finite are left out.
        best: The rule for the run's best checkpoint; ``None`` keeps the rule in force.
        tags: Tags from birth on.
        threads: Blocks in flight.
        progress: Told of every block.
        cancel: Set it to end the save with :class:`CancelledError`.
        keep_partial: When the save fails, leave its files for the next one to take over. They are
            not visible as a checkpoint, and gc removes them in time.
        life: The run's life that the save belongs to (:meth:`Store.begin_life`): it fails with
            :class:`SupersededError` when a newer one has begun. ``None``: it belongs to none.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: BestRule | None = None
    tags: Sequence[str] = ()
    threads: int | None = None
    progress: ProgressCallback | None = None
    cancel: threading.Event | None = None
    keep_partial: bool = False
    life: int | None = None

    def check(self) -> None:
        """Refuse what could not be committed in the end.

        Raises:
            UsageError: a tag or the life cannot be one, or the metadata is no JSON object.
        """
        if self.life is not None:
            check_life(self.life)
        for tag in self.tags:
            check_tag(tag)
        self.json_metadata()

    def json_metadata(self) -> dict[str, Any]:
        """The metadata as it will be read back.

        Raises:
            UsageError: it is no JSON object, or holds NaN or an infinity.
        """
        try:
            text = json.dumps((dict(self.metadata), list(self.metrics)), allow_nan=False)
            metadata: dict[str, Any] = json.loads(text)[0]
            msgspec.json.encode((metadata, list(self.metrics)))  # also refuses what is no text
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise UsageError(f"the metadata cannot be stored as JSON: {error}") from error
        return metadata
