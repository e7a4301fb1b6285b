"""Does every rank see the same store? A disk of one node alone looks like one to all of them."""

from __future__ import annotations

from contextlib import suppress

from ckptstore.errors import CkptError, NotFoundError
from ckptstore.ids import random_letters
from ckptstore.layout import TEMPORARY_PREFIX
from ckptstore.store import Store
from ckptstore.torch import Ranks


def check_same_store(store: Store, ranks: Ranks) -> None:
    """Have every rank read what rank 0 writes. A collective; the store is made if there is none.

    Raises:
        CkptError: a rank cannot reach the store, or reaches another one.
    """

    def write() -> tuple[str, bytes]:
        key, nonce = f"{TEMPORARY_PREFIX}{random_letters()}", random_letters().encode()
        store.create()
        store.catalog.require_writable()
        store.backend.put(key, nonce)
        return key, nonce

    def read() -> None:
        try:
            found = store.backend.read(key, limit=64)
        except NotFoundError:
            found = b""
        if found != written:
            raise NotFoundError(
                f"this rank does not see what rank 0 wrote to the store at {store.uri}",
                hint="is it on a disk of one node alone? storage.uri must be the same place from "
                "every node",
            )

    key, written = ranks.on_coordinator(write)
    try:
        ranks.everywhere(read)
    finally:
        if ranks.is_coordinator:
            with suppress(CkptError):  # gc takes it: its name says that it is temporary
                store.backend.delete([key])
