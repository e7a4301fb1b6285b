"""Marks: what happened to a checkpoint after its commit, and where that leaves it.

Marks are only ever added. One that ends another's effect names it, so the outcome is the same in
whatever order they are read and whatever the clocks of their writers said; of two that were made
without knowing of each other the one that protects wins (a pin beside an unpin is a pin).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptstore import document
from ckptstore.catalog import Catalog
from ckptstore.errors import ConflictError, Damage, IntegrityError, NotFoundError, UsageError
from ckptstore.ids import random_letters
from ckptstore.layout import Name, RunKeys, check_tag
from ckptstore.records import Commit, DamageNote, Mark, decode_mark, finite, timestamp, writer_here

DAMAGE_NOTES = 1000
"""A mark names this many damaged places at most."""

_BIRTH = "birth:"


@dataclass(frozen=True)
class Standing:
    """Where a checkpoint's marks leave it.

    Attributes:
        marks: The marks that count, by id.
        unreadable: Keys of marks that are damaged; what they said is unknown, so they protect.
    """

    marks: Mapping[str, Mark] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    unreadable: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> dict[str, Mark]:
        """The marks of a kind that nothing has ended, by id."""
        if not self.marks:
            return {}
        return {i: m for i, m in self.marks.items() if m.kind == kind and i not in self.removed}

    @property
    def pinned(self) -> bool:
        """Whether it must not be deleted."""
        return bool(self.of_kind("pin"))

    @property
    def damage(self) -> tuple[DamageNote, ...]:
        """What the last verification (or load) found damaged; empty when nothing is known."""
        return tuple(note for mark in self.of_kind("damaged").values() for note in mark.damage)

    @property
    def content_damage(self) -> tuple[DamageNote, ...]:
        """The part of it that only reading content can find."""
        marks = self.of_kind("damaged").values()
        return tuple(note for mark in marks if mark.deep for note in mark.damage)

    @property
    def damaged(self) -> bool:
        """Whether it was found damaged and not found whole or repaired since."""
        return bool(self.of_kind("damaged"))

    @property
    def verified(self) -> str | None:
        """When every byte was last found right, by the verifier's clock."""
        return max((m.created for m in self.of_kind("verified").values() if m.deep), default=None)

    def tags(self, commit: Commit) -> list[str]:
        """The tags it has now, sorted."""
        if not self.marks:
            return sorted(commit.tags)
        tags = {t for t in commit.tags if f"{_BIRTH}{t}" not in self.removed}
        tags.update(m.tag for m in self.of_kind("tag").values() if m.tag is not None)
        return sorted(tags)

    def metrics(self, commit: Commit) -> dict[str, float]:
        """Its metrics: those at the save, and later ones over them in the order of their ids."""
        merged = dict(commit.metrics)
        for _, mark in sorted(self.of_kind("metrics").items()):
            merged.update(mark.metrics)
        return merged


def standings(catalog: Catalog, run: str) -> dict[Name, Standing]:
    """The standing of every marked checkpoint of a run."""
    names = [
        name
        for e in catalog.backend.list(RunKeys(run).marks)
        if (name := Name.parse(e.key.rpartition("/")[2])) is not None
    ]
    found = catalog.each(lambda name: standing(catalog, run, name), names)
    return dict(zip(names, found, strict=True))


def standing(catalog: Catalog, run: str, name: Name) -> Standing:
    """Where the marks of one checkpoint leave it."""
    marks: dict[str, Mark] = {}
    unreadable = []
    for entry in catalog.backend.list(RunKeys(run).marks_of(name)):
        file_name = entry.key.rpartition("/")[2]
        if entry.is_directory or not file_name.endswith(".json") or file_name.startswith("."):
            continue
        try:
            data = catalog.backend.read(entry.key, document.SIZE_LIMIT)
            marks[file_name[:-5]] = decode_mark(data, run, name, f"the mark {entry.key}")
        except NotFoundError:
            continue
        except IntegrityError:
            unreadable.append(entry.key)
    removed = frozenset(i for mark in marks.values() for i in mark.removes)
    return Standing(marks, removed, tuple(sorted(unreadable)))


def _add(catalog: Catalog, mark: Mark, name: Name) -> None:
    mark_id = f"{time.time_ns() // 1_000_000:013d}-{mark.writer.id}"
    key = f"{RunKeys(mark.run).marks_of(name)}/{mark_id}.json"
    directory = RunKeys(mark.run).marks_of(name)
    catalog.create_document(key, document.encode(mark))
    catalog.backend.sync([RunKeys(mark.run).marks, directory, mark.run])


def _new(run: str, name: Name, kind: str, **fields: object) -> Mark:
    writer = writer_here(random_letters())
    body = {"name": str(name), "run": run, "kind": kind, "created": timestamp(), "writer": writer}
    return Mark(**body, **fields)  # type: ignore[arg-type]


def pin(catalog: Catalog, run: str, name: Name) -> bool:
    """Protect a checkpoint from deletion. Returns whether it was not protected before."""
    catalog.require_writable()
    if standing(catalog, run, name).pinned:
        return False
    _add(catalog, _new(run, name, "pin"), name)
    found = catalog.find(run, name)
    if found is None or found.is_void:
        kept = "it is pinned, so gc keeps it: bring it back with ckpt undelete"
        raise ConflictError(
            f"{run}@{name} was deleted at the same time", hint=kept if found is None else None
        )
    return True


def unpin(catalog: Catalog, run: str, name: Name) -> bool:
    """End a pin. Returns whether there was one."""
    catalog.require_writable()
    pins = tuple(standing(catalog, run, name).of_kind("pin"))
    if pins:
        _add(catalog, _new(run, name, "unpin", removes=pins), name)
    return bool(pins)


def add_tag(catalog: Catalog, run: str, commit: Commit, name: Name, tag: str) -> bool:
    """Give a checkpoint a tag. Returns whether it lacked it."""
    catalog.require_writable()
    if check_tag(tag) in standing(catalog, run, name).tags(commit):
        return False
    _add(catalog, _new(run, name, "tag", tag=tag), name)
    return True


def remove_tag(catalog: Catalog, run: str, name: Name, commit: Commit, tag: str) -> bool:
    """Take a tag away. Returns whether there was one."""
    catalog.require_writable()
    now = standing(catalog, run, name)
    if check_tag(tag) not in now.tags(commit):
        return False
    removes = [i for i, mark in now.of_kind("tag").items() if mark.tag == tag]
    if tag in commit.tags:
        removes.append(f"{_BIRTH}{tag}")
    _add(catalog, _new(run, name, "untag", tag=tag, removes=tuple(removes)), name)
    return True


def add_metrics(catalog: Catalog, run: str, name: Name, metrics: Mapping[str, float]) -> None:
    """Add metrics that were measured after the save.

    Raises:
        UsageError: none of them is a finite number.
    """
    catalog.require_writable()
    kept = finite(metrics.items())
    if not kept:
        raise UsageError("no metric is a finite number")
    _add(catalog, _new(run, name, "metrics", metrics=kept), name)


def note_verified(
    catalog: Catalog, run: str, name: Name, checked_bytes: int, *, deep: bool
) -> None:
    """Note that a checkpoint was found whole; this ends what was noted as damage.

    A quick look at sizes proves nothing about content, so it ends only damage that quick looks see.
    """
    catalog.require_writable()
    now = standing(catalog, run, name)
    ended = [i for i, m in now.of_kind("damaged").items() if deep or not m.deep]
    if deep:
        ended += now.of_kind("verified")
    if deep or ended:
        fields = {"removes": tuple(ended), "deep": deep, "checked_bytes": checked_bytes}
        _add(catalog, _new(run, name, "verified", **fields), name)


def note_damage(
    catalog: Catalog,
    run: str,
    name: Name,
    damage: Iterable[Damage],
    *,
    deep: bool,
    whole: bool = False,
) -> None:
    """Note what was found damaged. Noting the same again adds nothing.

    Args:
        catalog: The store.
        run, name: The checkpoint.
        damage: What was found.
        deep: Content is known to differ, so only a look at all content can end this.
        whole: All content was looked at, so this is all there is: it ends what was noted before.
    """
    catalog.require_writable()
    notes = tuple(_notes(damage))
    now = standing(catalog, run, name)
    known = set(now.damage)
    if now.damaged and known.issuperset(notes):
        return
    ended = tuple(now.of_kind("damaged")) if whole else ()
    _add(catalog, _new(run, name, "damaged", damage=notes, deep=deep, removes=ended), name)


def note_repaired(catalog: Catalog, run: str, name: Name, damage: Iterable[Damage]) -> None:
    """Note that what was damaged is whole again; this ends what was noted as damage."""
    catalog.require_writable()
    ended = tuple(standing(catalog, run, name).of_kind("damaged"))
    notes = tuple(_notes(damage))
    _add(catalog, _new(run, name, "repaired", damage=notes, removes=ended), name)


def _notes(damage: Iterable[Damage]) -> list[DamageNote]:
    return [
        DamageNote(path=d.path, reason=d.reason, offset=d.offset, length=d.length)
        for d in list(damage)[:DAMAGE_NOTES]
    ]
