"""Records and markers that are lost or cannot be read, and putting them back.

A record may be put back only when it is certain that this store had it: a commit in the place of a
void would bring back what was given up for good, one beside a trash record what was deleted. What
makes it certain:

- its own damaged bytes: one byte changed (the digest proves what it was), or nearly all the bytes
  of a source's record;
- or that every file of the checkpoint is there and no trash record is. Whoever creates a void
  where a commit was removes the directory, and the trash record last of all.

A void may always stand where nothing can be read and there is no directory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore.catalog import Catalog
from ckptstore.errors import CkptError, IntegrityError
from ckptstore.layout import Name, RunKeys
from ckptstore.leases import is_live
from ckptstore.listing import RECORD_LOST
from ckptstore.maintenance.mending import alike, from_sources, mended, replace_damaged
from ckptstore.records import Commit, Record, decode_record
from ckptstore.store import Store
from ckptstore.voiding import ensure_void


class LostRecord:
    """A commit key where a readable record should stand and does not.

    Args:
        catalog: The store.
        run, name: The checkpoint.
        sources: Where else its record may be.

    Attributes:
        problem: Why it cannot be read, or cannot be put back; ``None`` while it is only missing.
        origin: Where the good one comes from, for people.
    """

    def __init__(self, catalog: Catalog, run: str, name: Name, sources: Sequence[Store]) -> None:
        self._catalog = catalog
        self._run = run
        self._name = name
        self._keys = RunKeys(run)
        self._sources = sources
        found = catalog.find(run, name)
        self._missing = found is None
        self._damaged = found.data if found is not None else b""
        self._good = b""
        self.problem = str(found.problem) if found is not None else None
        self.origin = ""

    def what_it_was(self) -> Record | None:
        """The record that belongs there, or ``None``; ``problem`` says why not."""
        good = mended(self._damaged)
        record = self._decoded(good) if good is not None else None
        if record is not None and good is not None:
            self._good, self.origin = good, "one byte of it had changed"
            return record
        doubt = None
        key = self._keys.record(self._name)
        for data, source in from_sources(self._sources, key, self._is_record):
            record = self._decoded(data)
            doubt = self._doubt(record, alike(self._damaged, data))
            if doubt is None:
                self._good, self.origin = data, f"from {source.uri}"
                return record
        if doubt is not None:
            self.problem = f"{self.problem or RECORD_LOST}; it is not put back: {doubt}"
        return None

    def _doubt(self, record: Record | None, proven: bool) -> str | None:
        """Why a source's record may not be this store's.

        Args:
            record: The record.
            proven: What stands here is a damaged copy of it.
        """
        if self._is_trashed():
            return "the checkpoint was deleted (ckpt undelete brings it back)"
        directory = self._keys.directory(self._name)
        listed = self._catalog.backend.list(directory, recursive=True)
        there = {e.key[len(directory) + 1 :] for e in listed}
        if not isinstance(record, Commit):
            if there and not proven:
                return "a source has given up what is complete here"
            return None
        if self._missing and self._is_being_saved():
            return "a save is writing it"
        if proven:
            return None
        if not there:
            return "nothing of it is here (ckpt mirror copies what a store lacks)"
        if self._missing:
            return None  # it is created exclusively, so a void that stands there wins
        try:
            files = self._catalog.manifest(self._run, record).files
        except IntegrityError:
            return "its manifest is damaged too, and so it could have been given up"
        missing = [e.path for e in files if e.path not in there]
        return "files of it are missing, and so it could have been given up" if missing else None

    def _is_being_saved(self) -> bool:
        held = [h for h in self._catalog.leases(self._run) if h.name == self._name]
        if not held:
            return False
        now = self._catalog.backend.clock()
        return any(is_live(h, now) for h in held)

    def _decoded(self, data: bytes) -> Record | None:
        try:
            return decode_record(data, self._run, self._name, "")
        except IntegrityError:
            return None

    def _is_record(self, data: bytes) -> bool:
        return self._decoded(data) is not None

    def put_back(self) -> str | None:
        """Put the record where it belongs. Returns why that could not be done.

        A missing one is created exclusively. One that cannot be read is replaced, and then what a
        deletion since the first look (after another repair) would have left is looked for: a
        commit must not undo that.
        """
        catalog, key = self._catalog, self._keys.record(self._name)
        trashed = self._is_trashed()
        if self._missing:
            if not catalog.create_document(key, self._good):
                return "something else stands there now"
        elif not replace_damaged(catalog.backend, key, self._damaged, self._good):
            return "it changed meanwhile"
        catalog.backend.sync([self._keys.commits])
        if not isinstance(self._decoded(self._good), Commit):
            return None
        if self._is_trashed() and not trashed:
            catalog.backend.remove_if(key, self._good)
            return "the checkpoint was deleted meanwhile"
        if not catalog.backend.list(self._keys.directory(self._name)):
            if catalog.backend.remove_if(key, self._good):
                ensure_void(catalog, self._run, self._name, "it was removed for good")
            return "the checkpoint was removed for good meanwhile"
        return None

    def _is_trashed(self) -> bool:
        return self._catalog.backend.stat(self._keys.trash_record(self._name)) is not None


def find_name(store: Store, run: str, step: int | None) -> Name | None:
    """The newest checkpoint of a run (with this step), its record readable, damaged or lost."""
    catalog = store.catalog
    directories, leases = catalog.directories(run), catalog.leases(run)
    records = catalog.record_names(run)
    lost = catalog.lost_records(run, directories, leases, records)
    for name in sorted({*records, *lost}, reverse=True):
        if step is not None and name.step != step:
            continue
        try:
            found = catalog.find(run, name)
        except CkptError:
            continue
        if found is None or not found.is_void:
            return name
    return None
