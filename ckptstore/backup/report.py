"""What came of a run of a job: for people a line, for programs a status."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptstore.backup.metrics import Labels, Metric
from ckptstore.backup.sources import Unfinished
from ckptstore.errors import CkptError, printable


@dataclass
class Problem:
    """Something that was not done.

    Attributes:
        text: What, as a sentence.
        code: The exit code that fits it.
        hint: What to do about it.
    """

    text: str
    code: int
    hint: str | None = None

    @classmethod
    def of(cls, error: CkptError, what: str = "") -> Problem:
        """The problem that an error is; ``what`` stands before it."""
        return cls(f"{what}: {error}" if what else str(error), error.exit_code, error.hint)


@dataclass
class PlaceReport:
    """What was done in one store.

    Attributes:
        uri: The store.
        store: Its id, when it was reached.
        copied: REFs of what was copied (in a dry run: would be).
        sent_bytes: Bytes that went there.
        deleted: REFs of what retention removed.
        verified: How many checkpoints were read and found whole.
        problems: What was not done.
        notes: What is worth knowing, and no failure.
        warnings: What has to be said aloud, and no failure.
    """

    uri: str
    store: str | None = None
    copied: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    deleted: list[str] = field(default_factory=list)
    verified: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all was done."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """As in the status."""
        return {
            "store": self.uri,
            "id": self.store,
            "ok": self.ok,
            "copied": self.copied,
            "sent_bytes": self.sent_bytes,
            "deleted": self.deleted,
            "verified": self.verified,
            "problems": [{"text": p.text, "hint": p.hint} for p in self.problems],
            "notes": self.notes,
            "warnings": self.warnings,
        }


@dataclass
class Report:
    """What came of a run.

    Attributes:
        job: The job.
        source: What was copied, as it may be shown.
        began: When, in UTC.
        seconds: How long it took.
        places: A report for each destination.
        at_source: What was done in a source store.
        left: Checkpoints of a source directory that are not finished.
        failure: Why nothing could be begun, or what ended it.
        warnings: What went wrong beside the job: pings, notifications, metrics.
        dry_run: Nothing was changed.
    """

    job: str
    source: str
    began: str
    seconds: float = 0.0
    places: list[PlaceReport] = field(default_factory=list)
    at_source: PlaceReport | None = None
    left: Sequence[Unfinished] = ()
    failure: Problem | None = None
    warnings: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def everywhere(self) -> list[PlaceReport]:
        """All stores that something was done in."""
        return [*self.places, *([self.at_source] if self.at_source is not None else [])]

    @property
    def ok(self) -> bool:
        """Whether all was done."""
        return self.failure is None and all(place.ok for place in self.everywhere)

    @property
    def exit_code(self) -> int:
        """0; the code of the failure; 3 when something was done and something was not."""
        if self.failure is not None:
            return self.failure.code
        bad = [place for place in self.everywhere if not place.ok]
        if not bad:
            return 0
        codes = {problem.code for place in bad for problem in place.problems}
        if 5 in codes:
            return 5  # damage is worth more than what else there is
        return codes.pop() if len(bad) == len(self.everywhere) and len(codes) == 1 else 3

    @property
    def hint(self) -> str | None:
        """What to do about the first problem."""
        if self.failure is not None:
            return self.failure.hint
        problems = [problem for place in self.everywhere for problem in place.problems]
        return next((problem.hint for problem in problems if problem.hint), None)

    @property
    def line(self) -> str:
        """The run in one line."""
        if self.failure is not None:
            return _one_line(f"{self.job}: {self.failure.text}")
        if not self.ok:
            said = "; ".join(_said(place) for place in self.everywhere if not place.ok)
            return _one_line(f"{self.job}: {said}")
        return _one_line(f"{self.job}: {self._done()}")

    def _done(self) -> str:
        from rich.filesize import decimal

        copied = [ref for place in self.places for ref in place.copied]
        would = "would be " if self.dry_run else ""
        stores = _plural(len(self.places), "store")
        if copied:
            sent = decimal(sum(place.sent_bytes for place in self.places))
            size = "" if self.dry_run else f", {sent} sent"
            parts = [f"{_plural(len(copied), 'checkpoint')} {would}copied to {stores}{size}"]
        else:
            parts = [f"nothing new for {stores}"]
        deleted = sum(len(place.deleted) for place in self.everywhere)
        verified = sum(place.verified for place in self.places)
        if deleted:
            parts.append(f"{deleted} {would}removed by retention")
        if verified:
            parts.append(f"{verified} verified")
        if self.left:
            newest = self.left[-1]
            parts.append(f"{len(self.left)} left ({newest.name}: {newest.reason})")
        parts += [note for place in self.everywhere for note in place.notes]
        return f"{', '.join(parts)} ({self.seconds:.1f} s)"

    def as_json(self, before: dict[str, Any]) -> dict[str, Any]:
        """The status.

        Args:
            before: The status of the run before.
        """
        last = before.get("last_success")
        return {
            "job": self.job,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "line": self.line,
            "hint": self.hint,
            "source": self.source,
            "began": self.began,
            "seconds": round(self.seconds, 3),
            "host": socket.gethostname(),
            "last_success": self.began if self.ok else last if isinstance(last, str) else None,
            "left": [{"step": u.step, "name": u.name, "reason": u.reason} for u in self.left],
            "destinations": [place.as_json() for place in self.places],
            "at_source": self.at_source.as_json() if self.at_source is not None else None,
            "warnings": self.warnings,
        }


def _said(place: PlaceReport) -> str:
    more = f" (and {len(place.problems) - 1} more)" if len(place.problems) > 1 else ""
    text = place.problems[0].text
    return f"{text}{more}" if place.uri in text else f"{place.uri}: {text}{more}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def metrics_of(report: Report, status: dict[str, Any]) -> list[Metric]:
    """The numbers of a run for Prometheus."""
    from datetime import datetime

    def moment(text: str) -> float:
        return datetime.fromisoformat(text).timestamp()

    job = (("job", report.job),)
    last = status["last_success"]
    found = [
        ("backup_last_run_timestamp_seconds", "When the last run began", moment(report.began)),
        ("backup_exit_code", "The exit code of the last run; 0 is success", report.exit_code),
        ("backup_duration_seconds", "How long the last run took", report.seconds),
        (
            "backup_sent_bytes",
            "Bytes that the last run sent",
            sum(place.sent_bytes for place in report.places),
        ),
        (
            "backup_copied_checkpoints",
            "Checkpoints that the last run copied",
            sum(len(place.copied) for place in report.places),
        ),
        (
            "backup_left_checkpoints",
            "Checkpoints of the source that are not finished",
            len(report.left),
        ),
    ]
    if last is not None:
        name = "backup_last_success_timestamp_seconds"
        found.append((name, "When the last run that did all began", moment(last)))
    metrics = [Metric(name, about, {job: value}) for name, about, value in found]
    stores: dict[Labels, float] = {
        (*job, ("store", place.uri)): float(place.ok) for place in report.places
    }
    about = "Whether the last run did all in a destination"
    return [*metrics, *([Metric("backup_destination_ok", about, stores)] if stores else [])]
