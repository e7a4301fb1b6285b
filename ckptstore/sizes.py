"""Amounts of bytes, and shares, as people write them."""

from __future__ import annotations

import re

from ckptstore.errors import UsageError, printable

LARGEST = 2**63 - 1

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}{b}": 1000**n for n, p in enumerate("kmgtpe", 1) for b in ("", "b")},
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgtpe", 1)},
}


def parse_size(text: str) -> int:
    """Bytes in a text such as ``500GiB``, ``1.5 TB``, ``800M`` or ``4096``.

    ``k``, ``M``, ``G``, ``T``, ``P`` and ``E`` are powers of 1000, with ``i`` of 1024; the case of
    letters does not matter.

    Raises:
        UsageError: it is something else, nothing at all, or 8 EiB and more.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    unit = _UNITS.get(match[2]) if match else None
    size = round(float(match[1]) * unit) if match and unit else 0
    if not 0 < size <= LARGEST:
        raise UsageError(
            f"{printable(text[:40])!r} is no amount of bytes", hint="for example: 500GiB, 1.5TB"
        )
    return size


def parse_share(text: str) -> float:
    """A share in a text such as ``5%``, ``12.5%`` or ``0.05``: more than 0, at most 1.

    Raises:
        UsageError: it is something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip(), re.ASCII)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{printable(text[:40])!r} is no share", hint="for example: 5% or 0.05")
    return share
