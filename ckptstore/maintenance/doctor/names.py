"""Names: which are kept exactly as they are."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptstore.backends.findings import Finding
from ckptstore.errors import AccessDeniedError, CkptError, NotFoundError, TemporaryError, printable
from ckptstore.maintenance.doctor.bench import Bench

NAMES: Mapping[str, str] = {
    "plain.bin": "plain",
    "with space": "a space",
    "a[1]*?.pt": "[ ] * ?",
    "a#b": "#",
    "100%41": "%",
    "a+b": "+",
    "a:b": ":",
    "back\\slash": "a backslash",
    "ünï-日本語-🙂": "letters that are not ASCII",
    "e\u0301": "a letter and its accent apart",
    "\u00e9": "a letter and its accent in one",
    "Case": "capital letters",
    "case": "small letters",
    ".hidden": "a dot in front",
    "trailing.": "a dot at the end",
}
"""Names that some kind of storage changes, and what is special about each."""

_LIMIT = 1000
_THREADS = 8


def names(bench: Bench) -> Finding:
    """Every name is listed and read as itself, and none stands for another."""
    check, directory = "names", bench.key("names")
    forbidden = set(bench.here.capabilities.forbidden)
    tried = [name for name in NAMES if not forbidden & set(name)]

    def put(name: str) -> bool:
        try:
            bench.here.put(f"{directory}/{name}", name.encode())
        except (AccessDeniedError, TemporaryError):
            raise
        except CkptError:
            return False
        return True

    def read(name: str) -> bytes | None:
        try:
            return bench.other.read(f"{directory}/{name}", _LIMIT)
        except NotFoundError:
            return None

    with ThreadPoolExecutor(_THREADS) as pool:
        taken = dict(zip(tried, pool.map(put, tried), strict=True))
        kept = [name for name in tried if taken[name]]
        found = dict(zip(kept, pool.map(read, kept), strict=True))
    listed = {
        entry.key.removeprefix(f"{directory}/"): entry.size
        for entry in bench.other.list(directory, recursive=True)
    }
    bench.here.delete([f"{directory}/{name}" for name in kept])  # also those no listing shows
    wrong = [
        _told(name, taken[name], found.get(name), listed)
        for name in tried
        if found.get(name) != name.encode() or name not in listed
    ]
    numbers = {"tried": len(tried), "changed": len(wrong)}
    if wrong:
        return Finding.warning(
            check,
            "; ".join(wrong),
            "a save with such a file fails and names it; all other files are safe",
            **numbers,
        )
    never = f"; these cannot be in one: {printable(' '.join(sorted(forbidden)))}" * bool(forbidden)
    kept = [c for c in "[]*?#%+:\\" if c not in forbidden]
    return Finding.ok(
        check,
        f"kept exactly: spaces, {' '.join(kept)} and letters of all kinds{never}",
        **numbers,
    )


def _told(name: str, taken: bool, found: bytes | None, listed: Mapping[str, int]) -> str:
    shown, what = printable(name), NAMES[name]
    if "\u0301" in name:
        shown = "e\\u0301"
    if not taken:
        return f"'{shown}' ({what}) is refused"
    if name not in listed:
        became = next((key for key in listed if key not in NAMES and _alike(key, name)), None)
        if became is not None:
            return f"'{shown}' ({what}) becomes '{printable(became)}'"
        return f"'{shown}' ({what}) is not in a listing"
    if found is None:
        return f"'{shown}' ({what}) is listed and cannot be read"
    return f"'{shown}' ({what}) is the same as '{printable(found.decode(errors='replace'))}'"


def _alike(key: str, name: str) -> bool:
    """Whether ``key`` may be what became of ``name``: the same but for what is no letter."""

    def letters(text: str) -> str:
        return "".join(c for c in text if c.isalnum())

    return letters(key) == letters(name)
