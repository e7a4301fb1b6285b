"""Retention: deleting what a policy does not keep, one run at a time.

What is kept is computed from the store, by any process, each time anew. Each deletion looks at the
guards again, so what was pinned, or became the best, since the plan was made stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptstore.catalog import Catalog, HeldLease
from ckptstore.deleting import delete
from ckptstore.errors import CkptError, ConflictError, IntegrityError, NotFoundError
from ckptstore.layout import Name, check_run
from ckptstore.leases import is_live
from ckptstore.listing import ref_of
from ckptstore.maintenance.deciding import Candidate, Decision, decide
from ckptstore.maintenance.gc import gc
from ckptstore.maintenance.policy import Policy
from ckptstore.reading import Checkpoint
from ckptstore.room import RETENTION, purge_trash, stored_size, trashed
from ckptstore.runview import RunView
from ckptstore.store import Store


@dataclass(frozen=True)
class PrunePlan:
    """What a retention would do with a run.

    Attributes:
        run, policy: What it is about.
        decisions: What becomes of each checkpoint, in the order of saving.
        refs: How a person names each.
        others: Bytes of the run beside its checkpoints that stay; 0 without ``max_size``.
        warnings: What has to be said aloud.
    """

    run: str
    policy: Policy
    decisions: tuple[Decision, ...]
    refs: dict[Name, str]
    others: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[Decision, ...]:
        """What stays."""
        return tuple(d for d in self.decisions if d.keep)

    @property
    def deleted(self) -> tuple[Decision, ...]:
        """What goes, or has gone."""
        return tuple(d for d in self.decisions if not d.keep)


@dataclass(frozen=True)
class PruneResult(PrunePlan):
    """What a retention did with a run; the decisions are as they were carried out.

    Attributes:
        freed: Bytes that were removed; those that another checkpoint shares are counted too.
        dry_run: Nothing was done.
    """

    freed: int = 0
    dry_run: bool = False


def prune(
    store: Store,
    run: str,
    policy: Policy,
    *,
    dry_run: bool = False,
    max_delete: int | None = None,
    damaged: bool = False,
    collect: bool = True,
    now: float | None = None,
) -> PruneResult:
    """Delete what a policy does not keep of a run.

    Args:
        store, run, policy: What is kept of what.
        dry_run: Only say what would be done.
        max_delete: Delete nothing if more than this would go.
        damaged: Delete damaged checkpoints too.
        collect: Free the space, and run gc for this run. Otherwise the next gc does.
        now: Seconds since the epoch, for ``keep_within``; by default the store's clock.

    Raises:
        NotFoundError: there is no such store or run.
        UsageError: the policy does not fit the run.
        ConflictError: it would leave no usable checkpoint, or ``max_delete`` does not allow it.
            Nothing was deleted.
    """
    plan = plan_prune(store, run, policy, damaged=damaged, now=now)
    check_count(len(plan.deleted), max_delete)
    if dry_run:
        return _result(plan, plan.decisions, 0, dry_run=True)
    return carry_out(store, plan, collect=collect)


def plan_prune(
    store: Store, run: str, policy: Policy, *, damaged: bool = False, now: float | None = None
) -> PrunePlan:
    """What :func:`prune` would do; nothing is changed. Raises what that does."""
    catalog = store.catalog
    catalog.require_run(check_run(run))
    directories, leases = catalog.directories(run), catalog.leases(run)
    view = RunView.of(catalog, run, owed=True)
    others = 0
    if policy.max_size is not None:
        others = _other_bytes(catalog, run, directories, leases, {f.name for f in view.found})
    candidates = _candidates(catalog, run, view, sizes=policy.max_size is not None)
    if now is None:
        now = _now(catalog) if policy.keep_within is not None else 0.0
    decisions = decide(
        candidates, policy, best=view.best_rule, now=now, others=others, damaged=damaged
    )
    _check_something_stays(run, decisions)
    newest = {f.name.step: f.name for f in view.found}
    plan = PrunePlan(
        run=run,
        policy=policy,
        decisions=tuple(decisions),
        refs={d.name: ref_of(run, d.name, newest) for d in decisions},
        others=others,
    )
    return replace(plan, warnings=(*(d.warning for d in decisions if d.warning), *_too_large(plan)))


def _candidates(catalog: Catalog, run: str, view: RunView, *, sizes: bool) -> list[Candidate]:
    found = []
    for one in view.found:
        name, commit, standing = one.name, one.commit, view.standing(one.name)
        guards = tuple(reason.removeprefix("it is ") for reason in view.guards(name))
        if commit is None:
            size = stored_size(catalog, run, name) if sizes else 0
            found.append(Candidate(name, size, guards=guards, readable=False))
            continue
        found.append(
            Candidate(
                name,
                commit.size,
                commit.created,
                tuple(standing.tags(commit)),
                standing.metrics(commit),
                guards,
                tuple(view.owed_to(name)),
                standing.damaged,
            )
        )
    return found


def _now(catalog: Catalog) -> float:
    """The store's clock, or this host's where nothing can be written: then nothing is deleted."""
    try:
        return catalog.backend.clock()
    except CkptError:
        return time.time()


def _other_bytes(
    catalog: Catalog,
    run: str,
    directories: Sequence[Name],
    leases: Sequence[HeldLease],
    committed: set[Name],
) -> int:
    """What the run takes beside its checkpoints and stays: trash, and what dead saves left.

    Args:
        catalog, run: Where.
        directories, leases, committed: What the run has, read in this order.
    """
    now = _now(catalog)
    trash = trashed(catalog, run, now)
    known = committed | {t.name for t in trash}
    known |= {held.name for held in leases if is_live(held, now)}
    left = sum(stored_size(catalog, run, name) for name in directories if name not in known)
    return left + sum(t.size for t in trash if not t.may_go)


def _check_something_stays(run: str, decisions: Sequence[Decision]) -> None:
    gone = [d for d in decisions if not d.keep]
    usable = [d for d in decisions if d.keep and d.candidate.readable and not d.candidate.damaged]
    if gone and not usable:
        raise ConflictError(
            f"nothing of run {run!r} is deleted: no intact checkpoint of it would be left",
            hint="ckpt repair may mend one from a mirror; ckpt delete --force deletes one",
        )


def _too_large(plan: PrunePlan) -> list[str]:
    limit = plan.policy.max_size
    size = plan.others + sum(d.candidate.size for d in plan.kept)
    if limit is None or size <= limit:
        return []
    taken = f"run {plan.run} takes {size:,} bytes, and max_size is {limit:,}"
    return [f"{taken}: what is left is guarded, damaged, owed to a mirror or in the trash"]


def check_count(count: int, max_delete: int | None) -> None:
    """Refuse to delete more than is allowed at once. Raises :class:`ConflictError`."""
    if max_delete is not None and count > max_delete:
        raise ConflictError(
            f"nothing is deleted: it would be {count}, and at most {max_delete} may go at once",
            hint="look at what would go with --dry-run; a larger --max-delete allows it",
        )


def carry_out(store: Store, plan: PrunePlan, *, collect: bool = True) -> PruneResult:
    """Delete what a plan says.

    Raises:
        CkptError: the storage failed. What was deleted until then is in the trash, or gone.
    """
    catalog = store.catalog
    catalog.require_deletable()
    decisions, warnings = [], list(plan.warnings)
    for decision in plan.decisions:
        done = decision if decision.keep else _delete(store, plan, decision)
        if done is None:
            continue
        decisions.append(done)
        if done.keep and not decision.keep:
            warnings.append(f"{plan.refs[done.name]} stays: {done.reasons[0]}")
    freed = 0
    if collect:
        freed, more = _free(store, plan, decisions)
        warnings += more
    return _result(replace(plan, warnings=tuple(warnings)), decisions, freed)


def _delete(store: Store, plan: PrunePlan, decision: Decision) -> Decision | None:
    """Delete one; what it came to, or ``None`` when someone else has deleted it."""
    catalog, run, name = store.catalog, plan.run, decision.name
    why = ", ".join(f"{rule} {value}" for rule, value in plan.policy.rules.items())
    reason = f"{RETENTION}{decision.reasons[0]}" + (f" ({why})" if why else "")
    try:
        found = catalog.find(run, name)
        if found is None or found.commit is None:
            return None
        checkpoint = Checkpoint(catalog, run, found.commit, ref=plan.refs[name])
        delete(catalog, checkpoint, grace=plan.policy.grace, even_owed=True, reason=reason)
    except NotFoundError:
        catalog.check_alive()
        return None
    except (ConflictError, IntegrityError) as error:  # it has come to be guarded since
        return replace(decision, keep=True, reasons=(str(error),), warning=None)
    return decision


def _free(store: Store, plan: PrunePlan, decisions: Sequence[Decision]) -> tuple[int, list[str]]:
    """Free the space of what has no grace period (any more), or for which max_size has no room."""
    catalog, run, limit = store.catalog, plan.run, plan.policy.max_size
    if not catalog.backend.is_exclusive():
        if not catalog.trash_names(run):
            return 0, []
        why = f"the storage of {catalog.uri} cannot create a file exclusively"
        hint = f"when no save is running: ckpt gc {catalog.uri} {run} --force"
        return 0, [f"the space is not free yet, for {why}; {hint}"]
    freed = 0
    try:
        if limit is not None:
            now = catalog.backend.clock()
            used = plan.others + sum(d.candidate.size for d in decisions if d.keep)
            used += sum(t.size for t in trashed(catalog, run, now) if t.may_go)
            freed = purge_trash(catalog, run, now, lambda freed: used - freed <= limit)
        return freed + gc(store, run).freed, []
    except CkptError as error:
        return freed, [f"the space is not all free yet: {error}"]


def _result(
    plan: PrunePlan, decisions: Sequence[Decision], freed: int, *, dry_run: bool = False
) -> PruneResult:
    return PruneResult(
        run=plan.run,
        policy=plan.policy,
        decisions=tuple(decisions),
        refs=plan.refs,
        others=plan.others,
        warnings=plan.warnings,
        freed=freed,
        dry_run=dry_run,
    )
