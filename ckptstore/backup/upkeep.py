"""What a job does with the other parts of ckptstore: mirror, retention, collecting, verifying."""

from __future__ import annotations

import logging
import threading
from fnmatch import fnmatchcase

from ckptstore.backup.jobs import Job
from ckptstore.backup.report import PlaceReport, Problem
from ckptstore.errors import ConflictError, NotFoundError
from ckptstore.maintenance import Policy, gc, prune, verify_plan
from ckptstore.maintenance.mirror import How, mirror
from ckptstore.store import Store
from ckptstore.transfer.throttle import Throttle
from ckptstore.uri import redact

log = logging.getLogger(__name__)


def runs_of(store: Store, job: Job) -> list[str]:
    """The runs of a store that the job is about; those that are not there yet are left out."""
    there = store.runs()
    if job.run is not None:
        return [run for run in there if run == job.run]
    return [r for r in there if not job.runs or any(fnmatchcase(r, p) for p in job.runs)]


def mirror_to(
    source: Store,
    target: Store,
    job: Job,
    report: PlaceReport,
    cancel: threading.Event,
    dry_run: bool,
) -> None:
    """Copy what a destination lacks of a source store.

    Raises:
        CkptError: one of them failed.
    """
    how = How(
        runs=job.runs,
        newest_first=job.newest_first,
        throttle=Throttle(job.limit, cancel) if job.limit is not None else None,
        dry_run=dry_run,
        cancel=cancel,
    )
    result = mirror(source, target, how)
    report.copied += result.copied
    report.sent_bytes += result.sent_bytes
    report.problems += [Problem(f"{s.ref}: {s.reason}", 3, s.hint) for s in result.skipped]
    if result.failure is not None:
        raise result.failure


def prune_run(
    store: Store,
    run: str,
    policy: Policy,
    max_delete: int | None,
    report: PlaceReport,
    dry_run: bool,
) -> None:
    """Apply a policy to a run, and collect what nothing needs any more.

    Raises:
        ConflictError: more than ``max_delete`` would be deleted; nothing was.
        CkptError: the store failed.
    """
    result = prune(store, run, policy, dry_run=dry_run, max_delete=max_delete)
    report.deleted += [result.refs[decision.name] for decision in result.deleted]
    report.warnings += result.warnings


def collect(store: Store, runs: list[str]) -> None:
    """Remove what dead saves left; where that is not safe nothing is done."""
    for run in runs:
        try:
            gc(store, run)
        except (ConflictError, NotFoundError) as error:
            log.info("nothing was collected in %s of %s: %s", run, store.uri, error)


def verify_share(
    store: Store, runs: list[str], job: Job, report: PlaceReport, cancel: threading.Event
) -> None:
    """Read a share of the runs, the least recently verified first; damage is a problem.

    Raises:
        CkptError: the store failed.
    """
    plan = verify_plan(store, runs, sample=job.verify, max_duration=job.verify_time, cancel=cancel)
    for result in plan:
        if result.ok:
            report.verified += 1
            continue
        others = [uri for uri in (job.source, *job.to) if redact(uri) != report.uri]
        other = next((uri for uri in others if uri != job.source or job.reads_a_store), "STORE")
        hint = f"ckpt repair {result.ref} --store {report.uri} --from {redact(other)}"
        report.problems.append(Problem(f"{result.ref} is damaged: {result.damage[0]}", 5, hint))
