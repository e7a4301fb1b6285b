"""One look at all of a run's commits: which is newest, best, last verified, and what guards one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptstore import marks
from ckptstore.catalog import Catalog, Found
from ckptstore.layout import Name
from ckptstore.marks import Standing
from ckptstore.records import BestRule, Commit


@dataclass(frozen=True)
class RunView:
    """One look at all of a run's commits, for the questions that need all of them.

    Attributes:
        found: What stands at the commit keys, without voids.
        names: The commit keys, voids included.
        standings: Where marks leave those that have any.
    """

    found: Sequence[Found]
    names: Sequence[Name]
    standings: Mapping[Name, Standing]

    @classmethod
    def of(cls, catalog: Catalog, run: str) -> RunView:
        """Look now."""
        names = catalog.record_names(run)
        found = catalog.find_all(run, names)
        return cls([f for f in found if not f.is_void], names, marks.standings(catalog, run))

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

    def guards(self, name: Name) -> list[str]:
        """Why ``name`` should stay."""
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
