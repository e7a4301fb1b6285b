"""Cron expressions, periods, and what systemd calls the same times."""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.backup.times import CronTimes, cron_every, is_cron_period, parse_cron, parse_every
from ckptstore.errors import UsageError

START = datetime(2026, 3, 1)  # noqa: DTZ001 - as cron: without a zone

MISSING = shutil.which("systemd-analyze") is None
needs_systemd = pytest.mark.skipif(
    MISSING and os.environ.get("CKPT_REQUIRE_TOOLS") != "1", reason="systemd-analyze is missing"
)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("30 2 * * *", "2026-03-01 02:30"),
        ("  30   2 * * MON-FRI ", "2026-03-02 02:30"),
        ("*/15 * * * *", "2026-03-01 00:15"),
        ("@weekly", "2026-03-08 00:00"),
        ("0 0 29 2 *", "2028-02-29 00:00"),
        ("0 0 13 * 5", "2026-03-06 00:00"),
        ("0 0 */13 * 7", "2026-03-01 00:00"),
    ],
)
def test_the_next_time(text: str, first: str) -> None:
    before = datetime(2026, 2, 28, 23, 59)  # noqa: DTZ001
    after = before if first.endswith("01 00:00") else START
    assert str(parse_cron(text).next(1, after)[0])[:16] == first


@pytest.mark.parametrize(
    "text", ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "5 5 31 feb *", "0 0 30 2 */1"]
)
def test_what_never_comes_true_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="never comes true"):
        parse_cron(text)


@pytest.mark.parametrize(
    "text",
    ["", "* * * *", "* * * * * *", "61 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *",
     "* * * * 8", "*/0 * * * *", "5-1 * * * *", "a b c d e", "0 0 L * *", "0 0 LW * *",
     "0 0 * * 5L", "0 0 * * 1#2", "@reboot", "@often", "* * * * *\n* * * * *", "0 0 1 1 *;rm",
     "-1 * * * *", "1,,2 * * * *", "\x1b[2J"],
)  # fmt: skip
def test_what_cron_would_not_take_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cron(text)
    assert "\x1b" not in str(caught.value)


def test_a_31st_in_a_month_that_has_none_beside_a_weekday_does_come() -> None:
    assert parse_cron("0 0 30 2 1").next(1, START)


@pytest.mark.parametrize("text", ["30s", "90s", "0", "soon", "-6h", "200000d"])
def test_periods_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError):
        parse_every(text)


@pytest.mark.parametrize(
    "text", ["1min", "2m", "15min", "30min", "60min", "1h", "6h", "12h", "24h", "1d"]
)
@pytest.mark.parametrize("key", ["a", "b", "nightly\n/data"])
def test_periods_that_cron_has(text: str, key: str) -> None:
    seconds = parse_every(text)
    times = cron_every(seconds, key)
    assert times == cron_every(seconds, key)
    assert parse_cron(times.expression) == times
    coming = times.next(50, START)
    assert {(b - a).total_seconds() for a, b in pairwise(coming)} == {seconds}


def test_a_week() -> None:
    coming = cron_every(parse_every("7d"), "x").next(5, START)
    assert {(b - a).days for a, b in pairwise(coming)} == {7}


@pytest.mark.parametrize("text", ["7h", "90min", "45min", "5h", "2d", "36h", "61min"])
def test_periods_that_cron_has_not(text: str) -> None:
    assert not is_cron_period(parse_every(text))
    with pytest.raises(UsageError, match=r"cron cannot run a job every \d+ (min|h|d)$") as caught:
        cron_every(parse_every(text), "x")
    assert "--systemd" in str(caught.value.hint)


def test_jobs_of_one_period_start_at_different_times() -> None:
    assert len({cron_every(6 * 3600, f"job{n}").expression for n in range(20)}) > 10


@needs_systemd
@pytest.mark.parametrize(
    "text", ["30 2 * * *", "*/7 1-5,9 * * 1-5", "0 0 13 * 5", "0 0 1 1 0", "@monthly"]
)
def test_systemd_means_the_same_times(text: str) -> None:
    times = parse_cron(text)
    coming: set[str] = set()
    for one in times.calendar():
        done = subprocess.run(
            ["systemd-analyze", "calendar", "--iterations=12", "--base-time=2026-03-01 00:00", one],
            capture_output=True,
            text=True,
            env={**os.environ, "TZ": "UTC", "LC_ALL": "C"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            _, _, when = line.partition(": ")
            if "Next elapse" in line or "Iter" in line or "iter" in line:
                coming.add(when.split(maxsplit=1)[1].removesuffix(" UTC")[:16])
    base = datetime(2026, 3, 1, tzinfo=UTC).replace(tzinfo=None)
    assert sorted(coming)[:12] == [str(t)[:16] for t in times.next(12, base)]


_FIELDS = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]


@st.composite
def _expressions(draw: st.DrawFn) -> str:
    fields = []
    for low, high in _FIELDS:
        one = st.integers(low, high)
        fields.append(
            draw(
                st.one_of(
                    st.just("*"),
                    one.map(str),
                    st.integers(1, high).map(lambda n: f"*/{n}"),
                    st.lists(one, min_size=1, max_size=4).map(lambda v: ",".join(map(str, v))),
                    st.tuples(one, one).map(lambda t: f"{min(t)}-{max(t)}"),
                )
            )
        )
    return " ".join(fields)


@settings(max_examples=100, deadline=None)
@given(_expressions())
def test_any_expression_has_times_or_is_refused(text: str) -> None:
    try:
        times = parse_cron(text)
    except UsageError as error:
        if "never comes true" not in str(error):
            raise
        return
    first = times.next(1, START)[0]
    minute, hour, *_ = text.split()
    assert minute in ("*", str(first.minute)) or not minute.isdigit()
    assert hour in ("*", str(first.hour)) or not hour.isdigit()
    assert times.calendar()


def test_the_calendar_is_short_where_it_can_be() -> None:
    assert CronTimes("5 4 * * *").calendar() == ["*-*-* 04:05:00"]
    assert CronTimes("5 4 * * 7").calendar() == ["Sun *-*-* 04:05:00"]
    assert CronTimes("5 4 1 * 1").calendar() == ["*-*-01 04:05:00", "Mon *-*-* 04:05:00"]
