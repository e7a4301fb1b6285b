"""One look at all of a run's commits: which is newest, best, last verified, and what guards one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptstore import marks, mirrors
from ckptstore.catalog import Catalog, Found
from ckptstore.layout import Name
from ckptstore.marks import Standing
from ckptstore.mirrors import Mirror
from ckptstore.records import BestRule, Commit


@dataclass(frozen=True)
class RunView:
    """One look at all of a run's commits, for the questions that need all of them.

    Attributes:
        found: What stands at the commit keys, without voids.
        names: The commit keys, voids included.
        standings: Where marks leave those that have any.
        owed: The mirrors that lack a commit, for each that one lacks; only if it was asked for.
    """

    found: Sequence[Found]
    names: Sequence[Name]
    standings: Mapping[Name, Standing]
    owed: Mapping[Name, tuple[Mirror, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, catalog: Catalog, run: str, *, owed: bool = False) -> RunView:
        """Look now; with ``owed`` also at what the mirrors lack."""
        names = catalog.record_names(run)
        found = [f for f in catalog.find_all(run, names) if not f.is_void]
        lacking = mirrors.owed(catalog, run, [f.name for f in found]) if owed else {}
        return cls(found, names, marks.standings(catalog, run), lacking)

    def standing(self, name: Name) -> Standing:
        """Where its marks leave a checkpoint."""
        return self.standings.get(name, Standing())

    @property
    def commits(self) -> list[tuple[Name, Commit]]:
        """The readable commits, in order of saving."""
        return [(f.name, f.commit) for f in self.found if f.commit is not None]

    @property
    def newest(self) -> Name | None:
        """The newest commit that is not known to be damaged."""
        good = [name for name, _ in self.commits if not self.standing(name).damaged]
        return good[-1] if good else None

    @property
    def last_verified(self) -> Name | None:
        """The newest commit of which every byte was found right."""
        verified = [
            name
            for name, _ in self.commits
            if self.standing(name).verified and not self.standing(name).damaged
        ]
        return verified[-1] if verified else None

    @property
    def best_rule(self) -> BestRule | None:
        """The rule for best that is in force: the newest commit's."""
        return next((c.best for _, c in reversed(self.commits) if c.best is not None), None)

    @property
    def best(self) -> Name | None:
        """The best commit that is not known to be damaged; the newest of equals."""
        rule = self.best_rule
        best: tuple[float, Name] | None = None
        for name, commit in self.commits:
            value = self.standing(name).metrics(commit).get(rule.metric) if rule else None
            if rule is None or value is None or self.standing(name).damaged:
                continue
            if best is None or not rule.better(best[0], value):
                best = (value, name)
        return best[1] if best is not None else None

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
