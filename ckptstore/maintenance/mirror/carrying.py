"""Marks on their way to a mirror.

Pins, tags and metrics are carried along, byte for byte and under the same name, so carrying them
twice changes nothing. What a verification has found is about one store's bytes and stays there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from ckptstore import document
from ckptstore.catalog import Catalog
from ckptstore.errors import IntegrityError, NotFoundError
from ckptstore.layout import Name, RunKeys, is_temporary
from ckptstore.marks import standing
from ckptstore.records import decode_mark

CARRIED = frozenset({"pin", "unpin", "tag", "untag", "metrics"})


class Marks:
    """The marks of one run, in the source and in a mirror of it, as one listing each shows them.

    Args:
        source, target: The stores.
        run: The run.
        own: Keys of marks that are known to stay in their store; kept from pass to pass.
        damage: Which checkpoints of the target its marks call damaged, by their marks; likewise.
    """

    def __init__(
        self,
        source: Catalog,
        target: Catalog,
        run: str,
        own: set[str],
        damage: dict[frozenset[str], bool],
    ) -> None:
        self._source = source
        self._target = target
        self._run = run
        self._own = own
        self._damage = damage
        self._there = _listed(target, run)
        self._here = _listed(source, run)

    def carry(self, name: Name) -> None:
        """Give the target the marks of a checkpoint that it lacks.

        Raises:
            NotFoundError: the target is removing the checkpoint, and its marks with it.
            CkptError: storage failed. A mark that cannot be read stays where it is.
        """
        lacking = self._here.get(name, frozenset()) - self._there.get(name, frozenset()) - self._own
        if lacking:
            self._carry(name, lacking)

    def _carry(self, name: Name, lacking: frozenset[str]) -> None:
        found = self._target.find(self._run, name)
        if found is not None and found.is_void:  # gc would only have to remove them again
            return
        added = False
        for key in sorted(lacking):
            try:
                data = self._source.backend.read(key, document.SIZE_LIMIT)
                mark = decode_mark(data, self._run, name, f"the mark {key}")
            except (IntegrityError, NotFoundError):
                continue
            if mark.kind in CARRIED:
                self._target.create_document(key, data)
                added = True
            else:
                self._own.add(key)
        if added:
            keys = RunKeys(self._run)
            self._target.backend.sync([keys.marks, keys.marks_of(name), self._run])

    def carrier(self, name: Name) -> Callable[[], None]:
        """:meth:`carry` for later; it looks again for what has been marked since."""

        def carry() -> None:
            self._here = {**self._here, name: _of(self._source, self._run, name)}
            self.carry(name)

        return carry

    def is_damaged_there(self, name: Name) -> bool:
        """Whether the target's own marks call its copy damaged."""
        own = self._there.get(name, frozenset()) - self._here.get(name, frozenset())
        if not own:
            return False
        if own not in self._damage:
            self._damage[own] = standing(self._target, self._run, name).damaged
        return self._damage[own]


def _listed(catalog: Catalog, run: str) -> Mapping[Name, frozenset[str]]:
    root = RunKeys(run).marks
    found: dict[Name, set[str]] = defaultdict(set)
    for entry in catalog.backend.list(root, recursive=True):
        name = Name.parse(entry.key[len(root) + 1 :].partition("/")[0])
        if name is not None and entry.key.endswith(".json") and not is_temporary(entry.key):
            found[name].add(entry.key)
    return {name: frozenset(keys) for name, keys in found.items()}


def _of(catalog: Catalog, run: str, name: Name) -> frozenset[str]:
    listed = catalog.backend.list(RunKeys(run).marks_of(name))
    return frozenset(e.key for e in listed if e.key.endswith(".json") and not is_temporary(e.key))
