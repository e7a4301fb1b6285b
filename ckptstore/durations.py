"""Durations as people write and read them."""

from __future__ import annotations

import math
import re

from ckptstore.errors import UsageError, printable

LONGEST = 100 * 366 * 86400.0
"""No duration is longer, in seconds."""

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def parse_duration(text: str) -> float:
    """Seconds in a text such as ``90s``, ``30min``, ``24h`` or ``7d``; a bare 0 is none.

    Raises:
        UsageError: it is something else, or longer than a century.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.ASCII)
    seconds = float(match[1]) * _UNITS.get(match[2], 0.0) if match else math.inf
    if match is None or seconds > LONGEST or (match[2] not in _UNITS and float(match[1]) != 0):
        raise UsageError(
            f"{printable(text[:40])!r} is no duration", hint="for example: 90s, 30min, 24h, 7d"
        )
    return seconds


def spell_duration(seconds: float) -> str:
    """``seconds`` in the largest unit of which there are at least two: ``36 h``, ``3 d``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def spell_moment(seconds: float) -> str:
    """A short time in the unit that shows it: ``12 µs``, ``3.4 ms``, ``250 ms``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
