"""Retention policies: what shall be kept of a run, as a program, an option or a file says it.

[retention."gsm8k-*"]
keep_last = 3
keep_best = 1
keep_within = "7d"
max_size = "500GiB"
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from ckptstore.config import PROJECT_FILE, load_sections
from ckptstore.durations import LONGEST, parse_duration, spell_duration
from ckptstore.errors import UsageError, printable
from ckptstore.sizes import LARGEST, parse_size

OWED_LIMIT = 10
"""So many checkpoints that a mirror lacks are held back for it unless a policy says otherwise."""

_COUNTS = (
    *("keep_last", "keep_every", "keep_best"),
    *("keep_hourly", "keep_daily", "keep_weekly", "keep_monthly"),
)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is kept of a run: whatever one of the rules keeps, and what is guarded.

    Attributes:
        keep_last: The newest so many, in the order of saving.
        keep_every: Steps that this divides; of several checkpoints of such a step the newest.
        keep_best: The best so many by the run's rule for best; of equals the newest.
        keep_within: Those saved in the last so many seconds.
        keep_hourly, keep_daily, keep_weekly, keep_monthly: The newest of each of the last so many
            hours, days, weeks or months of UTC that have one.
        keep_tag: Patterns (``*``, ``?``, ``[…]``); those with a tag that fits one.
        max_size: Bytes that the run may take, with its trash and what dead saves left. Where that
            is less than what the rules keep, the oldest go; guarded ones stay.
        owed_limit: At most so many checkpoints are kept only because a mirror lacks them.
        grace: Seconds that a deleted checkpoint can be brought back.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    keep_within: float | None = None
    keep_hourly: int | None = None
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_monthly: int | None = None
    keep_tag: tuple[str, ...] = ()
    max_size: int | None = None
    owed_limit: int = OWED_LIMIT
    grace: float = 0.0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and value >= 1):
                raise UsageError(f"{name} must be a whole number of at least 1")
        for name in ("keep_within", "grace"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= LONGEST:
                raise UsageError(f"{name} must be a duration of at most a century")
        if self.max_size is not None and not 0 < self.max_size <= LARGEST:
            raise UsageError("max_size must be an amount of bytes")
        if not (_is_whole(self.owed_limit) and self.owed_limit >= 0):
            raise UsageError("owed_limit must be a whole number, or 0")
        if not all(self.keep_tag):
            raise UsageError("keep_tag must be patterns of tags")
        if not self.rules and self.max_size is None:
            raise UsageError(
                "a retention without any rule would delete everything",
                hint=f"give one or more of: {', '.join(RULES)}",
            )

    @property
    def rules(self) -> dict[str, str]:
        """The rules that keep something, each with its value for people; none keeps all."""
        found = {name: str(v) for name in _COUNTS if (v := getattr(self, name)) is not None}
        if self.keep_within is not None:
            found["keep_within"] = spell_duration(self.keep_within)
        if self.keep_tag:
            found["keep_tag"] = ", ".join(self.keep_tag)
        return found

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: str) -> Policy:
        """The policy that a table of a file spells.

        Args:
            values: Numbers; durations and sizes as text (``"7d"``, ``"500GiB"``).
            origin: Where they stand, for messages.

        Raises:
            UsageError: a key is unknown, a value cannot be, or no rule is among them.
        """
        known = [f.name for f in fields(cls)]
        read: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise UsageError(f"{origin}: unknown key {printable(key)!r}", hint=hint)
            try:
                read[key] = _read(key, value)
            except UsageError as error:
                raise UsageError(f"{origin}: {key}: {error}", hint=error.hint) from error
        try:
            return cls(**read)
        except UsageError as error:
            raise UsageError(f"{origin}: {error}", hint=error.hint) from error


RULES = (*_COUNTS[:3], "keep_within", *_COUNTS[3:], "keep_tag", "max_size")
"""The names of the rules, of which a policy has one at least."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(key: str, value: Any) -> Any:
    """A value of a file as :class:`Policy` takes it."""
    if key in ("keep_within", "grace"):
        if not isinstance(value, str):
            raise UsageError('it must be a duration such as "24h"')
        return parse_duration(value)
    if key == "max_size":
        if not isinstance(value, str):
            raise UsageError('it must be an amount such as "500GiB"')
        return parse_size(value)
    if key == "keep_tag":
        tags = [value] if isinstance(value, str) else value
        if not isinstance(tags, list) or not all(isinstance(t, str) for t in tags):
            raise UsageError('it must be a pattern such as "release-*", or a list of them')
        return tuple(tags)
    if not _is_whole(value):
        raise UsageError("it must be a whole number")
    return value


def configured_policy(run: str) -> Policy | None:
    """The policy of ``ckpt.toml`` for a run; ``None`` when none fits.

    ``[retention."PATTERN"]``: the table with exactly the run's name, else the first whose pattern
    fits, those of the project's file before those of the user's.

    Raises:
        UsageError: a file is no TOML, or the table that fits is wrong.
    """
    sections = load_sections("retention")
    ordered = sorted(sections.values(), key=lambda s: s.origin != PROJECT_FILE)
    fitting = (s for s in ordered if fnmatchcase(run, s.name))
    section = sections.get(run) or next(fitting, None)
    if section is None:
        return None
    return Policy.of(section.values, f'{section.origin}: [retention."{printable(section.name)}"]')
