"""What to do about damage: the command that repairs it, for messages.

Whatever cannot be found out here is left open in the command; looking never fails, because the
damage is the news.
"""

from __future__ import annotations

import shlex

from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError
from ckptstore.mirrors import known_mirrors


def repair_command(catalog: Catalog, ref: str, *, without: str | None = None) -> str:
    """The command that repairs a checkpoint from a mirror that the store knows.

    Args:
        catalog: The store.
        ref: The checkpoint.
        without: URI of a mirror that is known to lack it.
    """
    run = ref.partition("@")[0]
    return _command([ref, "--store", catalog.uri], _mirror_of(catalog, run, without))


def repair_from_command(catalog: Catalog, ref: str, source: str) -> str:
    """The command that repairs a checkpoint of a mirror from the store that it mirrors."""
    return _command([ref, "--store", catalog.uri], source)


def repair_all_command(catalog: Catalog, run: str | None = None) -> str:
    """The command that repairs all of a store, or of one of its runs."""
    named = [catalog.uri] if run is None else [catalog.uri, run]
    return _command(named, _mirror_of(catalog, run))


def what_to_do(catalog: Catalog, run: str, ref: str) -> str:
    """The hint of an error about a damaged checkpoint."""
    newest = _command_line(["ckpt", "resume-info", f"{run}@latest", "--store", catalog.uri])
    return f"{repair_command(catalog, ref)} (the newest intact checkpoint: {newest})"


def _command(words: list[str], mirror: str | None) -> str:
    start = _command_line(["ckpt", "repair", *words, "--from"])
    return f"{start} {shlex.quote(mirror) if mirror is not None else 'STORE'}"


def _command_line(words: list[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _mirror_of(catalog: Catalog, run: str | None, without: str | None = None) -> str | None:
    """Where a mirror of the run is; one that was reached before one that never was."""
    try:
        known = [m for m in known_mirrors(catalog) if m.note is not None and m.uri != without]
    except CkptError:
        return None
    fit = [m for m in known if run is None or m.wants(run)]
    fit.sort(key=lambda m: (m.note is None or m.note.reached is None, m.id))
    return fit[0].uri if fit else None
