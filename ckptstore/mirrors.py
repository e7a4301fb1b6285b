"""The mirrors that a store is expected to reach, and what each of them has acknowledged.

Whoever mirrors a store notes it there, so that everybody who deletes from the store can see which
checkpoints exist nowhere else yet, without asking a mirror that may be down:

    mirrors/<id>.json          where the mirror is, and how the last attempt went
    mirrors/<id>/<run>.json    the run's checkpoints that it holds, or holds no more by its own rule

The id is derived from the mirror's URI, because a mirror is owed everything from the moment it is
configured, also when it was never reached. What is noted here can be older than what is: a
checkpoint that is missing here is protected a little longer, and each pass of a mirror writes anew
what it found, so nothing stays acknowledged that a mirror has lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import blake3
import msgspec

from ckptstore import document
from ckptstore.catalog import Catalog
from ckptstore.errors import IntegrityError, NotFoundError
from ckptstore.ids import random_letters
from ckptstore.layout import MIRRORS, Name, is_run
from ckptstore.records import (
    Acknowledged,
    MirrorNote,
    decode_acknowledged,
    decode_mirror_note,
    timestamp,
    writer_here,
)


@dataclass(frozen=True)
class Mirror:
    """A mirror that the store knows of.

    Attributes:
        id: What its documents are called.
        note: What is known of it; ``None`` when that cannot be read. It is owed everything then.
    """

    id: str
    note: MirrorNote | None

    @property
    def uri(self) -> str:
        """Where it is, for people."""
        return self.note.uri if self.note is not None else f"(unreadable: {MIRRORS}/{self.id}.json)"

    def wants(self, run: str) -> bool:
        """Whether it shall hold this run."""
        patterns = self.note.runs if self.note is not None else ()
        return not patterns or any(fnmatchcase(run, p) for p in patterns)


def mirror_id(uri: str) -> str:
    """The id of the mirror at ``uri`` (which carries no secrets)."""
    return blake3.blake3(uri.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def known_mirrors(catalog: Catalog) -> list[Mirror]:
    """The mirrors that the store is expected to reach, by id."""
    found = []
    for entry in catalog.backend.list(MIRRORS):
        stem, dot, ending = entry.key.rpartition("/")[2].partition(".")
        if not entry.is_directory and dot and ending == "json" and stem:
            found.append(_mirror(catalog, stem))
    return sorted((m for m in found if m is not None), key=lambda m: m.id)


def _mirror(catalog: Catalog, mirror: str) -> Mirror | None:
    key = _note_key(mirror)
    try:
        data = catalog.backend.read(key, document.SIZE_LIMIT)
        return Mirror(mirror, decode_mirror_note(data, key))
    except NotFoundError:
        return None
    except IntegrityError:
        return Mirror(mirror, None)


def expect_mirror(catalog: Catalog, uri: str, runs: Sequence[str] = ()) -> Mirror:
    """Note that the store is mirrored to ``uri``; from now on the mirror is owed what it lacks.

    Args:
        catalog: The store.
        uri: Where the mirror is, without secrets.
        runs: Patterns of the runs it shall hold, beside those that it is expected to hold already;
            none is all.
    """
    catalog.require_writable()
    mirror = mirror_id(uri)
    found = _mirror(catalog, mirror)
    before = found.note if found is not None else None
    if before is not None:
        all_runs = not runs or not before.runs
        wanted = () if all_runs else tuple(dict.fromkeys((*before.runs, *runs)))
        if before.runs == wanted:
            return Mirror(mirror, before)
        note = msgspec.structs.replace(before, runs=wanted)
    else:
        writer = writer_here(random_letters())
        note = MirrorNote(uri=uri, since=timestamp(), runs=tuple(runs), writer=writer)
    _put(catalog, mirror, note)
    return Mirror(mirror, note)


def note_attempt(
    catalog: Catalog, mirror: Mirror, *, store: str | None = None, problem: str | None = None
) -> Mirror:
    """Note how a pass went.

    Args:
        catalog: The mirrored store.
        mirror: The mirror.
        store: The id of the store that was reached; ``None`` keeps what is known.
        problem: Why not all could be copied; ``None`` when the mirror holds all it is owed.
    """
    before = mirror.note
    assert before is not None
    now = timestamp()
    note = msgspec.structs.replace(
        before,
        store=store or before.store,
        tried=now,
        reached=now if problem is None else before.reached,
        problem=problem,
        writer=writer_here(random_letters()),
    )
    _put(catalog, mirror.id, note)
    return Mirror(mirror.id, note)


def _put(catalog: Catalog, mirror: str, note: MirrorNote) -> None:
    catalog.check_alive()  # nothing is written where the store is not any more
    catalog.backend.put(_note_key(mirror), document.encode(note))
    catalog.backend.sync([MIRRORS, ""])


def forget_mirror(catalog: Catalog, mirror: str) -> bool:
    """Expect the mirror no longer: nothing is owed to it. Returns whether it was known."""
    catalog.require_writable()
    known = _mirror(catalog, mirror) is not None
    catalog.backend.delete([_note_key(mirror)])
    catalog.backend.remove_tree(f"{MIRRORS}/{mirror}")
    return known


def acknowledge(catalog: Catalog, mirror: Mirror, run: str, names: Iterable[Name]) -> None:
    """Write anew which of a run's checkpoints the mirror holds, or has given up by its own rule."""
    body = Acknowledged(
        run=run,
        names=tuple(str(n) for n in sorted(names)),
        updated=timestamp(),
        writer=writer_here(random_letters()),
    )
    catalog.check_alive()
    catalog.backend.put(_names_key(mirror.id, run), document.encode(body))
    catalog.backend.sync([f"{MIRRORS}/{mirror.id}", MIRRORS])


def acknowledged(catalog: Catalog, mirror: Mirror, run: str) -> frozenset[Name]:
    """The run's checkpoints that the mirror need not be given any more; none if in doubt."""
    key = _names_key(mirror.id, run)
    try:
        data = catalog.backend.read(key, document.SIZE_LIMIT)
        body = decode_acknowledged(data, run, key)
    except (NotFoundError, IntegrityError):
        return frozenset()
    return frozenset(name for text in body.names if (name := Name.parse(text)) is not None)


def owed(catalog: Catalog, run: str, names: Iterable[Name]) -> dict[Name, tuple[Mirror, ...]]:
    """Which of a run's checkpoints are owed to which mirrors; those that none lacks are left out.

    Raises:
        CkptError: the store could not be read; whoever deletes must not go on then.
    """
    names = list(names)
    lacking: dict[Name, tuple[Mirror, ...]] = {}
    for mirror in known_mirrors(catalog):
        if not mirror.wants(run):
            continue
        there = acknowledged(catalog, mirror, run)
        for name in names:
            if name not in there:
                lacking[name] = (*lacking.get(name, ()), mirror)
    return lacking


def _note_key(mirror: str) -> str:
    return f"{MIRRORS}/{mirror}.json"


def _names_key(mirror: str, run: str) -> str:
    assert is_run(run)
    return f"{MIRRORS}/{mirror}/{run}.json"
