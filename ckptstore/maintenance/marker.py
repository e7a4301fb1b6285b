"""The store's marker when it is damaged or lost: the store cannot even be opened then.

What it must not get is a wrong id. The id is the store's own, so no mirror has it in its marker;
and that most records name an id proves nothing, for in a mirror they all name the store that they
were first saved to. Two stores with one id would take each other's acknowledgements. So the id is
taken only from what proves it: the damaged marker itself, when one byte has changed; what a
mirrored store has noted of the store at this place; or whoever asks for the repair.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ckptstore import document
from ckptstore.backends.base import Backend
from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError, Damage, IntegrityError, UsageError, printable
from ckptstore.ids import default_ids
from ckptstore.layout import MARKER, RunKeys, is_run, record_name
from ckptstore.maintenance.mending import is_document, mended, read_or_none, replace_damaged
from ckptstore.maintenance.repair import Fixed, RepairResult
from ckptstore.manifest import FORMAT
from ckptstore.mirrors import known_mirrors
from ckptstore.records import Features, Marker, decode_any_record, decode_marker, timestamp
from ckptstore.store import Store

_ID = re.compile("[a-z]{16}")


def restore_marker(
    backend: Backend,
    sources: Sequence[Store] = (),
    *,
    store_id: str | None = None,
    dry_run: bool = False,
) -> RepairResult | None:
    """Put back the marker of a store, when it is damaged or lost.

    Args:
        backend: Where the store is.
        sources: Stores that may be mirrored to it.
        store_id: Its id, for a marker of which nothing else proves it.
        dry_run: Only say what would be done.

    Returns:
        What was done; ``None`` when the marker is good, or there is no sign of a store.

    Raises:
        IntegrityError: the marker is of a newer format.
        UsageError: ``store_id`` cannot be one.
    """
    if store_id is not None and not _ID.fullmatch(store_id):
        raise UsageError(f"{printable(store_id)!r} is no store's id", hint="it has 16 letters")
    there = backend.stat(MARKER) is not None
    damaged = read_or_none(backend, MARKER) or b""
    if is_document(damaged):
        decode_marker(damaged, f"the store {backend.uri} ({MARKER})")
        return None
    runs = [e.key for e in backend.list("") if e.is_directory and is_run(e.key)]
    runs = [run for run in runs if backend.list(RunKeys(run).commits)]
    if not there and not damaged and not runs:
        return None
    good, how = _what_it_was(backend, damaged, sources, store_id)
    problem = "is damaged" if there else "is lost"
    if good is None:
        return RepairResult(
            backend.uri, "", MARKER, left=(Damage(MARKER, 0, 0, f"it {problem}; {how}"),)
        )
    if not dry_run:
        _put(backend, damaged, good, there=there)
    return RepairResult(backend.uri, "", MARKER, fixed=(Fixed(MARKER, how),))


def _put(backend: Backend, damaged: bytes, good: bytes, *, there: bool) -> None:
    """A lost one is created exclusively; somebody may have made the store anew."""
    if there:
        done = replace_damaged(backend, MARKER, damaged, good)
    else:
        done = Catalog(backend, default_ids()).create_document(MARKER, good)
    if not done:
        raise IntegrityError(f"{MARKER} of {backend.uri} changed while it was repaired")


def _what_it_was(
    backend: Backend, damaged: bytes, sources: Sequence[Store], store_id: str | None
) -> tuple[bytes | None, str]:
    """The good marker, and where it comes from; or ``None``, and what is missing."""
    good = mended(damaged)
    if good is not None:
        decode_marker(good, f"the store {backend.uri} ({MARKER})")
        return good, "one byte of it had changed"
    noted = store_id or _noted_id(backend.uri, sources)
    if noted is None:
        named = _named_ids(backend)
        known = f" (its records name {', '.join(named)})" if named else ""
        return None, f"its id cannot be known{known}: give it with --store-id"
    features = [s.catalog.marker().requires for s in sources]
    marker = Marker(
        format=FORMAT,
        store=noted,
        created=timestamp(),
        requires=Features(
            read=_all(f.read for f in features),
            write=_all(f.write for f in features),
            delete=_all(f.delete for f in features),
        ),
    )
    how = "the id was given" if store_id is not None else "the id was noted by a mirrored store"
    return document.encode(marker), how


def _all(features: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({f for some in features for f in some}))


def _noted_id(uri: str, sources: Sequence[Store]) -> str | None:
    """The id that a source has met when it was mirrored to this place; ``None`` in any doubt."""
    met: set[str] = set()
    for source in sources:
        try:
            notes = [m.note for m in known_mirrors(source.catalog) if m.note is not None]
        except CkptError:
            continue
        met |= {n.store for n in notes if n.uri == uri and n.store is not None}
    good = [one for one in met if _ID.fullmatch(one)]
    return good[0] if len(good) == 1 == len(met) else None


def _named_ids(backend: Backend) -> list[str]:
    """The ids that the store's records name, the most frequent first, for people."""
    count: Counter[str] = Counter()
    for run in (e.key for e in backend.list("") if e.is_directory and is_run(e.key)):
        for entry in backend.list(RunKeys(run).commits)[:100]:
            data = read_or_none(backend, entry.key)
            if data is None or record_name(entry.key.rpartition("/")[2]) is None:
                continue
            try:
                store = decode_any_record(data, entry.key).store
            except IntegrityError:
                continue
            if _ID.fullmatch(store):
                count[store] += 1
    return [store for store, _ in count.most_common(3)]
