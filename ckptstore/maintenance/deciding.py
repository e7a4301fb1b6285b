"""What a retention policy keeps of a run: a function of what the store holds, and of nothing else.

Three things decide, the stronger first: guards, then ``max_size``, then the rules. The order of
checkpoints is that of saving; times, which come from clocks that may be wrong, only say which hour
or day a checkpoint is counted to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from ckptstore.errors import UsageError
from ckptstore.layout import Name
from ckptstore.maintenance.policy import Policy
from ckptstore.records import BestRule


@dataclass(frozen=True)
class Candidate:
    """A checkpoint, as far as retention looks at it.

    Attributes:
        name: Which one.
        size: Bytes of its files; those that it shares with others are counted whole.
        created: By its writer's clock, in UTC.
        tags, metrics: Those it has now.
        guards: Why it must stay, whatever the rules say.
        owed: The mirrors that lack it.
        damaged: It is known to be damaged: no rule counts it.
        readable: Its record can be read; else nothing else is known of it.
    """

    name: Name
    size: int = 0
    created: str = ""
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    owed: tuple[str, ...] = ()
    damaged: bool = False
    readable: bool = True


@dataclass(frozen=True)
class Decision:
    """What becomes of a checkpoint, and why.

    Attributes:
        candidate: The checkpoint.
        keep: Whether it stays.
        reasons: All reasons to keep it; or why it goes.
        warning: What has to be said aloud about it.
    """

    candidate: Candidate
    keep: bool
    reasons: tuple[str, ...]
    warning: str | None = None

    @property
    def name(self) -> Name:
        """Which checkpoint."""
        return self.candidate.name


_BUCKETS: Mapping[str, Callable[[datetime], Hashable]] = {
    "keep_hourly": lambda t: (t.date(), t.hour),
    "keep_daily": lambda t: t.date(),
    "keep_weekly": lambda t: t.isocalendar()[:2],
    "keep_monthly": lambda t: (t.year, t.month),
}


def decide(
    candidates: Sequence[Candidate],
    policy: Policy,
    *,
    best: BestRule | None,
    now: float = 0.0,
    others: int = 0,
    damaged: bool = False,
) -> list[Decision]:
    """What becomes of each checkpoint of a run.

    Args:
        candidates: All of them, in the order of saving.
        policy: What is kept.
        best: The run's rule for best.
        now: Seconds since the epoch; counts for ``keep_within`` alone.
        others: Bytes of the run, beside the checkpoints, that stay: trash and dead saves.
        damaged: Delete the damaged ones too; otherwise they are left alone.

    Returns:
        A decision for each, in the same order.

    Raises:
        UsageError: ``keep_best`` without a rule for best.
    """
    good = [c for c in candidates if c.readable and not c.damaged]
    if policy.keep_best is not None and best is None and good:
        raise UsageError(
            "keep_best needs a rule that says what best is, and the run has none",
            hint="push with --best METRIC:max (or :min); the trainer takes storage.best_metric",
        )
    kept = _by_rules(good, policy, best, now)
    reasons = {c.name: (*c.guards, *kept.get(c.name, ())) for c in candidates}
    for c in candidates:
        if not c.readable:
            reasons[c.name] = ("its record cannot be read", *c.guards)
        elif c.damaged and not damaged:
            reasons[c.name] = ("damaged: left alone without --damaged", *c.guards)
    too_much = _over(candidates, reasons, policy, others)
    doomed = [c for c in candidates if not reasons[c.name] or c.name in too_much]
    owed = [c for c in doomed if c.owed and not c.damaged]
    held = {c.name for c in owed[len(owed) - min(len(owed), policy.owed_limit) :]}
    return [_decision(c, reasons[c.name], policy, too_much, held) for c in candidates]


def _by_rules(
    good: Sequence[Candidate], policy: Policy, best: BestRule | None, now: float
) -> dict[Name, list[str]]:
    """Which rules keep which of the checkpoints; without rules, all of them."""
    kept: dict[Name, list[str]] = {}

    def keep(some: Sequence[Candidate], reason: str) -> None:
        for c in some:
            kept.setdefault(c.name, []).append(reason)

    if not policy.rules:
        keep(good, "there is room")
    if policy.keep_last is not None:
        keep(good[-policy.keep_last :], "keep_last")
    if policy.keep_every is not None:
        newest = {c.name.step: c for c in good if c.name.step % policy.keep_every == 0}
        keep(list(newest.values()), "keep_every")
    if policy.keep_best is not None and best is not None:
        keep(_best(good, best)[: policy.keep_best], "keep_best")
    for pattern in policy.keep_tag:
        fitting = [c for c in good if any(fnmatchcase(t, pattern) for t in c.tags)]
        keep(fitting, f"keep_tag {pattern}")
    for reason, some in _by_time(good, policy, now):
        keep(some, reason)
    return kept


def _by_time(
    good: Sequence[Candidate], policy: Policy, now: float
) -> Iterator[tuple[str, list[Candidate]]]:
    """The rules that look at times, each with what it keeps."""
    times = [(c, _time(c.created)) for c in good]
    if policy.keep_within is not None:
        since = now - policy.keep_within
        # A time that cannot be read is no reason to delete; one in the future counts as now.
        yield "keep_within", [c for c, t in times if t is None or t.timestamp() >= since]
    for name, bucket in _BUCKETS.items():
        count = getattr(policy, name)
        if count is not None:
            yield name, _newest_of_each(times, bucket, count)


def _best(good: Sequence[Candidate], best: BestRule) -> list[Candidate]:
    """Those that have the metric, the best first; of equals the newest."""
    sign = -1.0 if best.mode == "max" else 1.0
    newest_first = [c for c in reversed(good) if best.metric in c.metrics]
    return sorted(newest_first, key=lambda c: sign * c.metrics[best.metric])


def _newest_of_each(
    times: Sequence[tuple[Candidate, datetime | None]],
    bucket: Callable[[datetime], Hashable],
    count: int,
) -> list[Candidate]:
    """The newest of each of the last buckets; which are the last, the order of saving says."""
    found: dict[Hashable, Candidate] = {}
    for c, time in reversed(times):
        if time is not None and (len(found) < count or bucket(time) in found):
            found.setdefault(bucket(time), c)
    return list(found.values())


def _time(created: str) -> datetime | None:
    """When a record says that it was made, in UTC; ``None`` when it says nothing that can be."""
    try:
        time = datetime.fromisoformat(created)
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _over(
    candidates: Sequence[Candidate],
    reasons: Mapping[Name, tuple[str, ...]],
    policy: Policy,
    others: int,
) -> set[Name]:
    """The oldest of those that the rules keep, as many as must go to make the rest fit."""
    if policy.max_size is None:
        return set()
    total = others + sum(c.size for c in candidates if reasons[c.name])
    gone = set()
    for c in candidates:
        if total <= policy.max_size:
            break
        if reasons[c.name] and not c.guards and not c.damaged and c.readable:
            gone.add(c.name)
            total -= c.size
    return gone


def _decision(
    c: Candidate,
    reasons: tuple[str, ...],
    policy: Policy,
    too_much: set[Name],
    held: set[Name],
) -> Decision:
    if reasons and c.name not in too_much:
        return Decision(c, True, reasons)
    if c.name in held:
        return Decision(c, True, (f"owed to {', '.join(c.owed)}",))
    why = "damaged" if c.damaged else "no rule keeps it"
    if c.name in too_much:
        why = f"over max_size, though {', '.join(reasons)} would keep it"
        if reasons == ("there is room",):
            why = "over max_size"
    warning = None
    if c.owed and not c.damaged:
        warning = f"step {c.name.step} ({c.name}) goes although {', '.join(c.owed)} lacks it: " + (
            f"more than {policy.owed_limit} checkpoints would be held back for mirrors"
            if policy.owed_limit
            else "nothing is held back for mirrors"
        )
    return Decision(c, False, (why,), warning)
