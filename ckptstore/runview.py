"""One look at all of a run's commits: which is newest, best, last verified, and what guards one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from ckptstore import marks, mirrors
from ckptstore.backends.base import Entry
from ckptstore.catalog import Catalog, Found
from ckptstore.layout import Name, RunKeys, record_name
from ckptstore.marks import Standing
from ckptstore.mirrors import Mirror
from ckptstore.records import BestRule, Commit


class Seen(NamedTuple):
    """A record as it was listed, and what it held."""

    entry: Entry
    found: Found


class Holders(NamedTuple):
    """The commits that decide what is guarded, and the one whose rule says what is best."""

    newest: Name | None
    best: Name | None
    last_verified: Name | None
    ruler: Name | None


@dataclass(frozen=True)
class RunView:
    """One look at all of a run's commits, for the questions that need all of them.

    Attributes:
        run: The run.
        names: The commit keys, voids included, in order of saving.
        records: What stands at them.
        standings: Where marks leave those that have any.
        owed: The mirrors that lack a commit, for each that one lacks; only if it was asked for.
        known: The holders, where an earlier look found them and nothing has changed since.
    """

    run: str
    names: Sequence[Name]
    records: Mapping[Name, Seen]
    standings: Mapping[Name, Standing]
    owed: Mapping[Name, tuple[Mirror, ...]] = field(default_factory=dict)
    known: Holders | None = None

    @classmethod
    def of(cls, catalog: Catalog, run: str, *, owed: bool = False) -> RunView:
        """Look now; with ``owed`` also at what the mirrors lack."""
        names, records, _ = _records(catalog, run, {})
        standing = [name for name, seen in records.items() if not seen.found.is_void]
        lacking = mirrors.owed(catalog, run, standing) if owed else {}
        return cls(run, names, records, marks.standings(catalog, run), lacking)

    def again(self, catalog: Catalog, about: Name, *, owed: bool = False) -> RunView:
        """Look again, for what guards ``about`` now, without reading all of the run.

        Records are listed anew, and those read that were not seen before. Then the record and the
        marks of ``about``, and of each that the answer rests on, are read until all of these are
        as they are now. Of the others older marks are believed. That can only protect more: who
        is not the newest, best or last verified beside a commit that is better *now* is not so
        beside more of them either.
        """
        names, records, fresh = _records(catalog, self.run, self.records)
        unchanged = not fresh and all(n in records for n in self.holders if n is not None)
        view = RunView(
            self.run, names, records, self.standings, known=self.holders if unchanged else None
        )
        sure: set[Name] = set()
        while unsure := {about, *view.holders} - sure - {None}:
            view = view._renewed(catalog, sorted(n for n in unsure if n is not None))
            sure.update(n for n in unsure if n is not None)
        return replace(view, owed=mirrors.owed(catalog, self.run, [about])) if owed else view

    def _renewed(self, catalog: Catalog, names: Sequence[Name]) -> RunView:
        """This view with the records and marks of these as they are now."""
        looks = catalog.each(
            lambda name: (catalog.find(self.run, name), marks.standing(catalog, self.run, name)),
            names,
        )
        records, standings = dict(self.records), dict(self.standings)
        for name, (found, standing) in zip(names, looks, strict=True):
            seen = records.pop(name, None)
            if found is not None:
                nowhere = Entry(RunKeys(self.run).record(name), -1, 0.0)
                records[name] = Seen(seen.entry if seen is not None else nowhere, found)
            standings[name] = standing
        same = all(
            _data(self.records.get(name)) == _data(records.get(name))
            and self.standing(name) == standings[name]
            for name in names
        )
        if same:
            return self
        return RunView(
            self.run, self.names, dict(sorted(records.items(), key=itemgetter(0))), standings
        )

    @cached_property
    def found(self) -> list[Found]:
        """What stands at the commit keys, without voids, in order of saving."""
        return [seen.found for seen in self.records.values() if not seen.found.is_void]

    @cached_property
    def commits(self) -> list[tuple[Name, Commit]]:
        """The readable commits, in order of saving."""
        return [(f.name, f.commit) for f in self.found if f.commit is not None]

    def standing(self, name: Name) -> Standing:
        """Where its marks leave a checkpoint."""
        return self.standings.get(name, Standing())

    @cached_property
    def holders(self) -> Holders:
        """Which commits are the newest, the best and the last verified."""
        if self.known is not None:
            return self.known
        newest = last_verified = ruler = None
        for name, commit in reversed(self.commits):
            standing = self.standings.get(name)
            good = standing is None or not standing.damaged
            if newest is None and good:
                newest = name
            if last_verified is None and good and standing is not None and standing.verified:
                last_verified = name
            if ruler is None and commit.best is not None:
                ruler = name
        return Holders(newest, self._best(ruler), last_verified, ruler)

    def _best(self, ruler: Name | None) -> Name | None:
        commit = self.records[ruler].found.commit if ruler is not None else None
        rule = commit.best if commit is not None else None
        best: tuple[float, Name] | None = None
        for name, commit in self.commits if rule is not None else ():
            standing = self.standing(name)
            value = standing.metrics(commit).get(rule.metric) if rule is not None else None
            if value is None or standing.damaged:
                continue
            if best is None or rule is None or not rule.better(best[0], value):
                best = (value, name)
        return best[1] if best is not None else None

    @property
    def newest(self) -> Name | None:
        """The newest commit that is not known to be damaged."""
        return self.holders.newest

    @property
    def last_verified(self) -> Name | None:
        """The newest commit of which every byte was found right."""
        return self.holders.last_verified

    @property
    def best_rule(self) -> BestRule | None:
        """The rule for best that is in force: the newest commit's."""
        ruler = self.holders.ruler
        commit = self.records[ruler].found.commit if ruler is not None else None
        return commit.best if commit is not None else None

    @property
    def best(self) -> Name | None:
        """The best commit that is not known to be damaged; the newest of equals."""
        return self.holders.best

    def owed_to(self, name: Name) -> list[str]:
        """Where the mirrors are that lack ``name``; what is damaged they could not take."""
        return [] if self.standing(name).damaged else [m.uri for m in self.owed.get(name, ())]

    def guards(self, name: Name) -> list[str]:
        """Why ``name`` should stay, whatever the mirrors hold."""
        standing = self.standing(name)
        reasons = []
        if standing.pinned:
            reasons.append("it is pinned")
        if standing.unreadable:
            reasons.append("a mark of it cannot be read and may be a pin")
        if name == self.newest:
            reasons.append("it is the newest of its run")
        if name == self.best:
            reasons.append("it is the best of its run")
        if name == self.last_verified:
            reasons.append("it is the last one that was verified")
        return reasons


def _records(
    catalog: Catalog, run: str, before: Mapping[Name, Seen]
) -> tuple[list[Name], dict[Name, Seen], bool]:
    """The names that are listed, what stands there, and whether anything is new since ``before``.

    What is listed with the size and time of before is not read again. That a void has come in the
    place of a commit may be seen late where a listing can be old, so whoever needs to be sure of a
    record reads it.
    """
    catalog.marker()
    listed = {entry.key: entry for entry in catalog.backend.list(RunKeys(run).commits)}
    kept: dict[Name, Seen] = {}
    for known, seen in before.items():
        if seen.found.record is not None and listed.get(seen.entry.key) == seen.entry:
            kept[known] = seen
            del listed[seen.entry.key]
    new = [
        (name, entry)
        for key, entry in listed.items()
        if (name := record_name(key.rpartition("/")[2])) is not None
    ]
    new.sort(key=itemgetter(0))
    if not kept and not new:
        catalog.check_alive()
    if not new:
        return list(kept), kept, False
    found = catalog.each(lambda one: catalog.find(run, one[0]), new)
    read = {n: Seen(e, f) for (n, e), f in zip(new, found, strict=True) if f is not None}
    added = [name for name, _ in new]
    if not kept:
        return added, read, True
    return sorted([*kept, *added]), _sorted(kept | read), True


def _sorted(records: Mapping[Name, Seen]) -> dict[Name, Seen]:
    return dict(sorted(records.items(), key=itemgetter(0)))


def _data(seen: Seen | None) -> bytes | None:
    return None if seen is None else seen.found.data
