"""What must be there, computed from records alone and in other words than retention does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore.maintenance import Policy
from ckptstore.records import BestRule, Commit, Void
from ckptstore.store import Store

PURGED = ("its time in the trash is over", "removed from the trash to make room")
"""Reasons of the voids of what was committed once."""


def commits_of(store: Store, run: str) -> dict[str, tuple[int, float]]:
    """The commits of a run: step and reward, by name."""
    return {str(c.name): (c.step, c.commit.metrics["reward"]) for c in store.list(run)}


def must_keep(policy: Policy, commits: Mapping[str, tuple[int, float]], best: BestRule) -> set[str]:
    """The names that the counting rules keep."""
    assert best.mode == "max"
    names = sorted(commits, key=_order)
    kept = set(names[-(policy.keep_last or 0) :])
    if policy.keep_every is not None:
        kept |= {
            name
            for name in names
            if commits[name][0] % policy.keep_every == 0
            and not any(
                commits[n][0] == commits[name][0] for n in names if _order(n) > _order(name)
            )
        }
    by_reward = sorted(names, key=lambda n: commits[n][1], reverse=True)
    return kept | set(by_reward[: policy.keep_best or 0])


def _order(name: str) -> tuple[int, str]:
    """The order of saving: the sequence number, then the id at the end."""
    return int(name.partition("-")[0]), name.rpartition("-")[2]


@dataclass(frozen=True)
class History:
    """What a run of a store holds and held.

    Attributes:
        there: The commits, by name.
        gone: Those that were committed once, and are in the trash or purged.
        trashed: Those of them that can still be brought back.
    """

    there: Mapping[str, Commit]
    gone: frozenset[str]
    trashed: frozenset[str]

    @property
    def ever(self) -> frozenset[str]:
        """All that were ever committed."""
        return self.gone | frozenset(self.there)

    @classmethod
    def of(cls, store: Store, run: str) -> History:
        """Read it from a store that rests."""
        catalog = store.catalog
        found = catalog.find_all(run, catalog.record_names(run))
        there = {str(f.name): f.commit for f in found if f.commit is not None}
        voids = {str(f.name): f.record for f in found if isinstance(f.record, Void)}
        assert len(there) + len(voids) == len(found), "every record can be read"
        purged = {name for name, void in voids.items() if void.reason in PURGED}
        trashed = {str(name) for name in catalog.trash_names(run)} - set(there) - purged
        return cls(there, frozenset(purged | trashed), frozenset(trashed))
