"""Retention against an obvious second implementation, over random histories."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.layout import Name
from ckptstore.maintenance.deciding import Candidate, decide
from ckptstore.maintenance.policy import Policy
from ckptstore.records import BestRule
from tests.conftest import FULL
from tests.unit.support import examples

NOW = dt.datetime(2026, 10, 25, 3, 30, tzinfo=dt.UTC)
"""In this night Europe's clocks go back; here nothing must come of it."""

BEST = BestRule("r", "max")

spans = st.sampled_from([0, 40, 59, 61, 1800, 3600, 5400, 86_400, 7 * 86_400, 31 * 86_400])


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    """Saves in order; steps roll back, and the host's clock jumps to and fro."""
    found, step, clock = [], 0, NOW - dt.timedelta(days=draw(st.integers(0, 90)))
    for seq in range(1, draw(st.integers(0, 12)) + 1):
        back = draw(st.integers(0, 9)) == 0
        step = draw(st.integers(0, step)) if back else step + draw(st.sampled_from([0, 1, 5, 10]))
        clock += dt.timedelta(seconds=draw(spans) * draw(st.sampled_from([1, 1, 1, 1, -1, 400])))
        # Stamps with the offsets of summer and winter time, as another writer might spell them.
        zone = dt.timezone(dt.timedelta(hours=draw(st.sampled_from([0, 1, 2]))))
        stamp = clock.astimezone(zone).isoformat(timespec="milliseconds")
        odd = draw(
            st.sampled_from([None] * 12 + ["", "yesterday", "9999-12-31T23:59:59.999-23:59"])
        )
        found.append(
            Candidate(
                Name(seq, "abcdefgh", step),
                draw(st.integers(0, 5)),
                odd if odd is not None else stamp,
                tuple(draw(st.lists(st.sampled_from(["rel-1", "rel-2", "x"]), unique=True))),
                draw(st.sampled_from([{}, {"r": 1.0}, {"r": 2.0}, {"r": 3.0}, {"q": 9.0}])),
                tuple(draw(st.sampled_from([[]] * 6 + [["pinned"]]))),
                tuple(draw(st.sampled_from([[]] * 3 + [["s3://a"], ["s3://a", "/b"]]))),
                damaged=draw(st.integers(0, 7)) == 0,
                readable=draw(st.integers(0, 15)) > 0,
            )
        )
    return found


count = st.one_of(st.none(), st.none(), st.integers(1, 4))
policies = st.fixed_dictionaries(
    {
        "keep_last": count,
        "keep_every": st.one_of(st.none(), st.sampled_from([1, 2, 5, 10])),
        "keep_best": count,
        "keep_within": st.one_of(st.none(), st.none(), spans.map(float)),
        "keep_hourly": count,
        "keep_daily": count,
        "keep_weekly": count,
        "keep_monthly": count,
        "keep_tag": st.sampled_from([(), (), ("rel-*",), ("x", "rel-1")]),
        "max_size": st.one_of(st.none(), st.integers(1, 30)),
        "owed_limit": st.integers(0, 4),
    }
)


def instant(c: Candidate) -> dt.datetime | None:
    try:
        return dt.datetime.fromisoformat(c.created).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        return None


LABELS: dict[str, Callable[[dt.datetime], str]] = {
    "keep_hourly": lambda t: t.strftime("%Y-%m-%d %H"),
    "keep_daily": lambda t: t.strftime("%Y-%m-%d"),
    "keep_weekly": lambda t: t.strftime("%G-%V"),
    "keep_monthly": lambda t: t.strftime("%Y-%m"),
}


def one_rule_keeps(c: Candidate, good: list[Candidate], rules: dict[str, Any]) -> bool:
    """Whether a rule keeps ``c``, each spelt out by counting what comes before it."""
    later = [o for o in good if o.name.seq > c.name.seq]
    wanted = rules["keep_best"]
    if wanted is not None and "r" in c.metrics:
        mine = c.metrics["r"]
        better = [o for o in good if o.metrics.get("r", -1.0) > mine]
        equals = [o for o in later if o.metrics.get("r") == mine]
        if len(better) + len(equals) < wanted:
            return True
    last, every = rules["keep_last"], rules["keep_every"]
    return (
        (last is not None and len(later) < last)
        or (every is not None and c.name.step % every == 0 and is_newest_of_step(c, later))
        or time_keeps(instant(c), later, rules)
        or any(
            tag == pattern or (pattern == "rel-*" and tag.startswith("rel-"))
            for pattern in rules["keep_tag"]
            for tag in c.tags
        )
    )


def is_newest_of_step(c: Candidate, later: list[Candidate]) -> bool:
    return c.name.step not in [o.name.step for o in later]


def time_keeps(time: dt.datetime | None, later: list[Candidate], rules: dict[str, Any]) -> bool:
    within = rules["keep_within"]
    if within is not None and (time is None or (NOW - time).total_seconds() <= within):
        return True
    for name, label in LABELS.items():
        if rules[name] is not None and time is not None:
            labels = [label(t) for o in later if (t := instant(o)) is not None]
            if label(time) not in labels and len(set(labels)) < rules[name]:
                return True
    return False


def model(
    history: list[Candidate], rules: dict[str, Any], others: int, damaged: bool
) -> tuple[set[int], set[int]]:
    """The sequence numbers that stay, and those that go although a mirror lacks them."""
    good = [c for c in history if c.readable and not c.damaged]
    only_size = all(v is None or v == () for k, v in rules.items() if k.startswith("keep"))
    fixed = {
        c.name.seq for c in history if c.guards or not c.readable or (c.damaged and not damaged)
    }
    ruled = {c.name.seq for c in good if only_size or one_rule_keeps(c, good, rules)}
    stay = fixed | ruled
    if rules["max_size"] is not None:
        size = {c.name.seq: c.size for c in history}
        while others + sum(size[s] for s in stay) > rules["max_size"] and stay - fixed:
            stay.remove(min(stay - fixed))
    lacking = sorted(c.name.seq for c in good if c.owed and c.name.seq not in stay)
    held = set(lacking[-rules["owed_limit"] :]) if rules["owed_limit"] else set()
    return stay | held, set(lacking) - held


@given(histories(), policies, st.integers(0, 10), st.booleans())
@examples(3000 if FULL else 250)
def test_retention_equals_the_model(
    history: list[Candidate], rules: dict[str, Any], others: int, damaged: bool
) -> None:
    try:
        policy = Policy(**rules)
    except UsageError:
        assert all(v is None or v == () for k, v in rules.items() if k != "owed_limit")
        return
    decisions = decide(
        history, policy, best=BEST, now=NOW.timestamp(), others=others, damaged=damaged
    )
    assert [d.candidate for d in decisions] == history
    kept, warned = model(history, rules, others, damaged)
    assert {d.name.seq for d in decisions if d.keep} == kept
    assert {d.name.seq for d in decisions if d.warning} == warned
    assert all(d.reasons for d in decisions)


@given(histories(), policies)
@examples(100)
def test_times_decide_nothing_for_rules_that_count(
    history: list[Candidate], rules: dict[str, Any]
) -> None:
    """However wrong clocks are, the same checkpoints stay, and a smaller limit keeps fewer."""
    counting = {k: v for k, v in rules.items() if k in ("keep_last", "keep_every", "keep_best")}
    if not any(counting.values()):
        return
    policy = Policy(**counting)
    wrong = [dataclasses.replace(c, created="1970-01-01T00:00:00Z") for c in history]
    first = decide(history, policy, best=BEST)
    second = decide(wrong, policy, best=BEST)
    assert [d.keep for d in first] == [d.keep for d in second]


@pytest.mark.parametrize("hours", range(26))
def test_a_change_to_winter_time_makes_no_hour_twice_and_none_once(hours: int) -> None:
    """Local time shows 02:30 twice that night; as hours of UTC they are two."""
    start = dt.datetime(2026, 10, 24, 14, 30, tzinfo=dt.UTC)
    history = []
    for n in range(30):
        moment = start + dt.timedelta(hours=n)
        zone = dt.timezone(dt.timedelta(hours=2 if moment < NOW.replace(hour=1, minute=0) else 1))
        stamp = moment.astimezone(zone).isoformat()
        history.append(Candidate(Name(n + 1, "abcdefgh", n), created=stamp))
    decisions = decide(history, Policy(keep_hourly=hours + 1), best=None)
    assert sum(d.keep for d in decisions) == hours + 1
