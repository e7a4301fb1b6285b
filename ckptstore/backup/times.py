"""When a job is run: cron expressions, ``--every``, and what systemd calls the same times."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from ckptstore.durations import parse_duration
from ckptstore.errors import UsageError, printable

_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_FIELD = re.compile(r"[0-9A-Za-z*,/-]+")
_BEYOND = re.compile(r"[LW]$|\bL", re.IGNORECASE)
_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")

_MINUTES = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30)
_HOURS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class CronTimes:
    """The times of a cron expression.

    Attributes:
        expression: Five fields, one space between two.
    """

    expression: str

    def next(self, count: int = 3, after: datetime | None = None) -> list[datetime]:
        """The next times by this host's clock, as cron counts them."""
        now = after or datetime.now()  # noqa: DTZ005 - cron goes by the clock on the wall
        return list(islice(_parsed(self.expression, now), count))

    def calendar(self) -> list[str]:
        """The same times as values of systemd's ``OnCalendar``; several are OR-ed."""
        parsed = _parsed(self.expression)
        time = f"{_listed(parsed.hours, range(24))}:{_listed(parsed.minutes, range(60))}:00"
        months = _listed(parsed.months, range(1, 13))
        days = _listed(parsed.days, range(1, 32))
        week = sorted({int(str(d)) % 7 for d in parsed.weekdays})
        names = "" if len(week) == 7 else ",".join(_DAYS[d] for d in week) + " "
        if parsed.day_and or not names or days == "*":
            return [f"{names}*-{months}-{days} {time}"]
        return [f"*-{months}-{days} {time}", f"{names}*-{months}-* {time}"]


def _listed(found: Iterable[int], everything: range) -> str:
    values = sorted(set(found))
    return "*" if values == list(everything) else ",".join(f"{v:02d}" for v in values)


def parse_cron(text: str) -> CronTimes:
    """The times that a cron expression names.

    Raises:
        UsageError: cron would not take it, or it never comes true.
    """
    shown = printable(text[:100])
    expression = " ".join(text.split())
    if expression.lower() == "@reboot":
        raise UsageError("@reboot names no times", hint="for example: '30 2 * * *', @daily")
    expression = _MACROS.get(expression.lower(), expression)
    fields = expression.split(" ")
    if len(fields) != 5 or not all(map(_FIELD.fullmatch, fields)):
        raise UsageError(
            f"{shown!r} is no cron expression: it needs minute, hour, day of month, month and day "
            "of week",
            hint="for example: '30 2 * * *' (at 2:30), '0 */6 * * 1-5', @daily",
        )
    if _BEYOND.search(fields[2]) or _BEYOND.search(fields[4]):
        raise UsageError(f"{shown!r}: cron knows no last day (L) and no nearest weekday (W)")
    never = UsageError(f"{shown!r} never comes true: no month has such a day")
    problem = _problem(expression)
    if problem is None:
        if next(_parsed(expression), None) is None:
            raise never
        return CronTimes(expression)
    any_day = " ".join([*fields[:2], "*", *fields[3:]])
    if _problem(any_day) is None and _problem(f"* * {fields[2]} * *") is None:
        raise never  # each field can be, and the day is in none of the months
    raise UsageError(f"{shown!r} is no cron expression: {problem}")


def _problem(expression: str) -> str | None:
    """Why it cannot be read; ``None`` when it can."""
    try:
        _parsed(expression)
    except _cronsim().CronSimError as error:
        return printable(str(error)[:1].lower() + str(error)[1:])
    return None


def _parsed(expression: str, after: datetime | None = None) -> Any:
    """The library's iterator over the times after a time (any, when it is only asked about)."""
    start = after or datetime(2000, 1, 1)  # noqa: DTZ001 - as cron: without a zone
    return _cronsim().CronSim(expression, start)


def _cronsim() -> Any:
    try:
        import cronsim
    except ImportError:
        raise UsageError(
            "schedules need the package cronsim", hint="pip install 'ckptstore[backup]'"
        ) from None
    return cronsim


def parse_every(text: str) -> int:
    """The seconds of ``--every``.

    Raises:
        UsageError: it is no duration, not of whole minutes, or shorter than one.
    """
    seconds = parse_duration(text)
    if seconds < 60 or seconds % 60:
        raise UsageError(
            f"--every {printable(text)} cannot be: a job is run every so many whole minutes",
            hint="for example: 15min, 6h, 1d",
        )
    return int(seconds)


def cron_every(seconds: int, key: str) -> CronTimes:
    """The cron expression that is true every so often.

    Jobs of one period do not all start in the same minute: which minute (and hour) it is follows
    from ``key``, so it is the same each time.

    Raises:
        UsageError: cron has no expression for it.
    """
    minutes, chance = seconds // 60, int.from_bytes(hashlib.blake2b(key.encode()).digest()[:8])
    minute, hour = chance % 60, chance // 60 % 24
    if minutes in _MINUTES:
        start = minute % minutes
        field = "*" if minutes == 1 else f"*/{minutes}" if not start else f"{start}-59/{minutes}"
        return CronTimes(f"{field} * * * *")
    hours, rest = divmod(minutes, 60)
    if not rest and hours in _HOURS:
        start = hour % hours
        field = "*" if hours == 1 else f"*/{hours}" if not start else f"{start}-23/{hours}"
        return CronTimes(f"{minute} {field} * * *")
    if not rest and hours == 24:
        return CronTimes(f"{minute} {hour} * * *")
    if not rest and hours == 7 * 24:
        return CronTimes(f"{minute} {hour} * * {chance // 1440 % 7}")
    raise UsageError(
        f"cron cannot run a job every {_spelled(minutes)}",
        hint=f"cron can: {', '.join(map(str, _MINUTES))} min; {', '.join(map(str, _HOURS))} h; "
        "1 d; 7 d. For any other: --systemd, or --cron 'EXPRESSION'",
    )


def is_cron_period(seconds: int) -> bool:
    """Whether :func:`cron_every` has an expression for it."""
    try:
        cron_every(seconds, "")
    except UsageError:
        return False
    return True


def _spelled(minutes: int) -> str:
    if minutes % (24 * 60) == 0:
        return f"{minutes // (24 * 60)} d"
    return f"{minutes // 60} h" if minutes % 60 == 0 else f"{minutes} min"
