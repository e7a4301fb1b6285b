"""One run of a backup job.

    held on this host → source opened, leases taken in the destinations → ping: start
    → for each destination: copy, collect, retention, a share is read
    → retention of the source → status and history → metrics → ping, notifications

From a directory each checkpoint is pushed to each destination by itself, so one that is down holds
nothing up, and a trainer's own clean-up finds the others served. From a store each destination is
a mirror. A destination that fails does not stop the others.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.backup import notify, upkeep
from ckptstore.backup.directory import Pushing, next_number
from ckptstore.backup.jobs import Job
from ckptstore.backup.lease import HeldJob
from ckptstore.backup.metrics import write_metrics
from ckptstore.backup.report import PlaceReport, Problem, Report, metrics_of
from ckptstore.backup.sources import Found, find
from ckptstore.backup.state import JobState
from ckptstore.errors import CkptError, ConflictError, NotFoundError, UsageError
from ckptstore.maintenance import Policy
from ckptstore.records import timestamp
from ckptstore.store import Store, open_store
from ckptstore.uri import redact


class JobRunningError(ConflictError):
    """Another process runs the job, here or on another host."""

    kind = "job-running"


@dataclass
class _Place:
    """A destination: its report, and the store once it is open."""

    uri: str
    report: PlaceReport
    store: Store | None = None


@dataclass
class _Work:
    """What a run has opened."""

    source: Store | None = None
    found: Found | None = None
    places: list[_Place] = field(default_factory=list)


def run_job(
    job: Job,
    *,
    dry_run: bool = False,
    cancel: threading.Event | None = None,
    say: Callable[[str], None] | None = None,
    state: JobState | None = None,
) -> Report:
    """Run a job once.

    Args:
        job: The job.
        dry_run: Only say what would be done; nobody is told.
        cancel: Set it to end the work; what was begun goes on in the next run.
        say: Told what is being done.
        state: What this host remembers; by default in the user's state directory.

    Returns:
        What came of it; whatever failed is in there.

    Raises:
        JobRunningError: the job is running already.
        CkptError: this host's state directory or the file of secrets cannot be used.
    """
    job.load_environment()
    return _Run(job, dry_run, cancel or threading.Event(), say, state or JobState(job)).run()


class _Run:
    def __init__(
        self,
        job: Job,
        dry_run: bool,
        cancel: threading.Event,
        say: Callable[[str], None] | None,
        state: JobState,
    ) -> None:
        self.job = job
        self.dry_run = dry_run
        self.cancel = cancel
        self.say = say or (lambda _: None)
        self.state = state
        self.report = Report(job.name, redact(job.source), timestamp(), dry_run=dry_run)
        self.began = time.monotonic()
        self.scratch = Path()

    def run(self) -> Report:
        with ExitStack() as held:
            if self.dry_run:
                self.before: dict[str, Any] = self.state.status()
                self._guarded(held)
                return self.report
            self._hold(held)
            self.before = self.state.status()
            try:
                self._guarded(held)
            except BaseException as error:
                self._interrupted(error)
                raise
            self._finish()
        return self.report

    def _hold(self, held: ExitStack) -> None:
        try:
            held.enter_context(self.state.locked())
        except ConflictError as error:
            message = f"the job {self.job.name!r}: {error}"
            raise JobRunningError(message, hint=error.hint) from error

    def _guarded(self, held: ExitStack) -> None:
        """The work; its errors become the report's, but for a job that runs already."""
        started = False
        try:
            self.scratch = Path(held.enter_context(tempfile.TemporaryDirectory("-ckpt-backup")))
            self.scratch = Path(self.scratch).resolve()
            work = self._open(held)
            self._ping("start")
            started = True
            self._copy(work)
        except JobRunningError:
            raise
        except CkptError as error:
            if not started:
                self._ping("start")
            self.report.failure = Problem.of(error)
        finally:
            self.report.seconds = time.monotonic() - self.began

    # Opening

    def _open(self, held: ExitStack) -> _Work:
        work = _Work()
        self.say("looking at the source")
        if self.job.reads_a_store:
            work.source = open_store(self.job.source)
            subject = work.source.id
        else:
            work.found = find(self.job.source, self.job.layout, settle=self.job.settle)
            self.report.left = work.found.unfinished
            if self.job.run is None:
                raise UsageError(f"the job {self.job.name!r} does not say which run to push to")
            subject = self.job.run
        for uri in self.job.to:
            place = _Place(uri, PlaceReport(redact(uri)))
            work.places.append(place)
            self.report.places.append(place.report)
            self.say(f"opening {place.report.uri}")
            with self._reported(place.report):
                store = open_store(uri)
                self._check_known(uri, store)
                if not self.dry_run:
                    store.create()
                    held.callback(self._lease(store, subject).release)
                place.report.store = store.id if store.exists else None
                place.store = store
        return work

    def _check_known(self, uri: str, store: Store) -> None:
        """A store that was there before is expected there: an unmounted disk looks empty."""
        known = self.before.get("stores")
        expected = known.get(redact(uri)) if isinstance(known, dict) else None
        if not isinstance(expected, str):
            return
        if not store.exists:
            raise NotFoundError(
                f"the store {store.uri}, which was there before, is gone",
                hint=f"is it mounted? To begin a new one: ckpt init {store.uri}",
            )

    def _lease(self, store: Store, subject: str) -> HeldJob:
        try:
            return HeldJob(store, self.job.name, subject)
        except ConflictError as error:
            raise JobRunningError(str(error), hint=error.hint) from error

    @contextmanager
    def _reported(self, report: PlaceReport) -> Iterator[None]:
        """An error in a destination is its own; the others go on."""
        try:
            yield
        except JobRunningError:
            raise
        except CkptError as error:
            if self.cancel.is_set():
                raise
            report.problems.append(Problem.of(error))

    # The work

    def _copy(self, work: _Work) -> None:
        number = 0
        stores = [place.store for place in work.places if place.store is not None]
        if work.found is not None and work.found.layout == "plain":
            assert self.job.run is not None
            number = next_number(stores, self.job.run)
        for place in work.places:
            if place.store is None:
                continue
            with self._reported(place.report):
                self.say(f"copying to {place.report.uri}")
                self._copy_to(work, place.store, place.report, number)
            if place.report.ok:
                with self._reported(place.report):
                    self._look_after(place.store, place.report)
        if work.source is not None and self.job.source_retention is not None:
            report = self.report.at_source = PlaceReport(redact(self.job.source), work.source.id)
            with self._reported(report):
                self.say("retention in the source")
                runs = upkeep.runs_of(work.source, self.job)
                self._prune(work.source, runs, self.job.source_retention, report)

    def _copy_to(self, work: _Work, store: Store, report: PlaceReport, number: int) -> None:
        if work.source is not None:
            upkeep.mirror_to(work.source, store, self.job, report, self.cancel, self.dry_run)
            return
        assert work.found is not None
        pushing = Pushing(self.job, work.found, self.state, self.scratch, self.cancel, self.dry_run)
        pushing.push_to(store, report, number)

    def _look_after(self, store: Store, report: PlaceReport) -> None:
        if not store.exists:
            return
        runs = upkeep.runs_of(store, self.job)
        self.say(f"retention in {report.uri}")
        if self.job.retention is not None:
            self._prune(store, runs, self.job.retention, report)
        elif not self.dry_run:
            upkeep.collect(store, runs)
        if self.job.verify is not None and not self.dry_run and runs:
            self.say(f"verifying in {report.uri}")
            upkeep.verify_share(store, runs, self.job, report, self.cancel)

    def _prune(self, store: Store, runs: list[str], policy: Policy, report: PlaceReport) -> None:
        for run in runs:
            upkeep.prune_run(store, run, policy, self.job.max_delete, report, self.dry_run)

    # Telling

    def _ping(self, suffix: str, body: str = "") -> None:
        if self.job.ping_env is not None and not self.dry_run:
            problem = notify.ping(self.job.ping_env, suffix, body)
            if problem is not None and problem not in self.report.warnings:
                self.report.warnings.append(problem)

    def _finish(self) -> None:
        report = self.report
        code = report.exit_code
        self._ping(str(code) if code else "", report.line)
        was_ok = self.before.get("ok", True)
        wanted = {"always": True, "failure": not report.ok, "change": report.ok != was_ok}
        if self.job.notify_env and wanted[self.job.notify_on]:
            title = f"ckpt backup {self.job.name}: {'ok' if report.ok else 'failed'}"
            report.warnings += notify.notify(
                self.job.notify_env, title, report.line, failed=not report.ok
            )
        status = self._status()
        if self.job.prometheus is not None:
            try:
                write_metrics(self.job.prometheus, metrics_of(report, status))
            except CkptError as error:
                report.warnings.append(f"the metrics were not written: {error}")
                status = self._status()
        try:
            self.state.record(status, self.job.status_file)
        except CkptError as error:
            report.warnings.append(f"the status was not written: {error}")

    def _status(self) -> dict[str, Any]:
        known = self.before.get("stores")
        stores = dict(known) if isinstance(known, dict) else {}
        stores |= {place.uri: place.store for place in self.report.places if place.store}
        return {**self.report.as_json(self.before), "stores": stores}

    def _interrupted(self, error: BaseException) -> None:
        """Ended by a signal, or by an error of the program: say so before it goes on."""
        if isinstance(error, JobRunningError):
            return  # the run that goes on will tell
        code = error.code if isinstance(error, SystemExit) else None
        code = code if isinstance(code, int) else 130 if isinstance(error, KeyboardInterrupt) else 1
        self.report.failure = Problem(f"ended by {type(error).__name__}", code)
        self._finish()
