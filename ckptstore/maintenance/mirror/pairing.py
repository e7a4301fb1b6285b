"""Whether two stores can be a source and its mirror."""

from __future__ import annotations

import os

from ckptstore import mirrors
from ckptstore.backends import open_backend
from ckptstore.errors import ConflictError, NotFoundError, UsageError
from ckptstore.mirrors import Mirror
from ckptstore.store import Store
from ckptstore.uri import StoreURI


def check_pair(source: Store, target: Store) -> Mirror | None:
    """What the source knows of the target so far.

    Raises:
        UsageError: they are one store, or one lies in the other.
        NotFoundError: the target was a store when it was last reached and is none now: an
            unmounted disk looks like an empty one.
        ConflictError: it is another store now.
    """
    _check_apart(source, target)
    note = next((m for m in mirrors.known_mirrors(source.catalog) if m.uri == target.uri), None)
    before = note.note.store if note is not None and note.note is not None else None
    forget = f"to begin it anew: ckpt mirror --forget {source.uri} {target.uri}"
    if before is not None and not target.exists:
        raise NotFoundError(
            f"the mirror {target.uri} of {source.uri} is no store any more",
            hint=f"is it mounted? {forget}",
        )
    if target.exists and target.id == source.id:
        raise UsageError(
            f"{target.uri} and {source.uri} are one store, or one is a plain copy of the other",
            hint="name another place for the mirror",
        )
    if before is not None and target.id != before:
        raise ConflictError(
            f"{target.uri} is another store than the one that {source.uri} was mirrored to",
            hint=f"is the right disk mounted? {forget}",
        )
    return note


def where(uri: str) -> str:
    """The URI as the store at it calls itself; nothing is asked of the storage.

    Raises:
        UsageError: it is malformed.
    """
    return open_backend(StoreURI.parse(uri)).uri


def _check_apart(source: Store, target: Store) -> None:
    one, other = _place(source), _place(target)
    if one == other:
        raise UsageError(f"{source.uri} cannot be mirrored onto itself", hint="name another place")
    if one.startswith(f"{other}/") or other.startswith(f"{one}/"):
        raise UsageError(
            f"{target.uri} and {source.uri} lie one in the other", hint="name a place beside it"
        )


def _place(store: Store) -> str:
    local = store.backend.local_path("")
    if local is not None:
        return os.path.realpath(local).rstrip("/")
    return store.uri.partition("?")[0].rstrip("/")
