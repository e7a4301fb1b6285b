"""Listings: every checkpoint of a run, with what there is to say of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ckptstore.catalog import Catalog, Found, HeldLease
from ckptstore.durations import spell_duration
from ckptstore.errors import IntegrityError
from ckptstore.layout import Name, RunKeys, check_run
from ckptstore.leases import is_live, store_time
from ckptstore.records import Commit, decode_record
from ckptstore.runview import RunView

State = Literal["ok", "damaged", "unfinished", "trashed"]


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A line of a listing.

    Attributes:
        ref: ``RUN@STEP``, or ``RUN@NAME`` where the step has a newer commit.
        created: UTC; ``None`` when the record cannot be read.
        size, files: Bytes and files; what is there so far for an unfinished one.
        digest: Content digest; ``None`` when it is not known.
        state: ``ok``, ``damaged``, ``unfinished`` or ``trashed``.
        note: Why it is not ``ok``, for people.
    """

    ref: str
    run: str
    step: int
    seq: int
    name: str
    created: str | None
    size: int
    files: int
    digest: str | None
    state: State
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] | None = None
    pinned: bool = False
    note: str | None = None


def rows(catalog: Catalog, run: str | None = None, *, everything: bool = False) -> list[Row]:
    """The commits of a run, or of all runs, in order of saving; damaged ones are marked.

    Args:
        run: Only this run.
        everything: Also unfinished saves and what is in the trash.

    Raises:
        NotFoundError: there is no such store or run.
    """
    if run is not None:
        catalog.require_run(check_run(run))
    rows: list[Row] = []
    for one in [run] if run is not None else catalog.runs():
        rows += _rows_of(catalog, one, everything)
    return rows


def _rows_of(catalog: Catalog, run: str, everything: bool) -> list[Row]:
    directories = catalog.directories(run)
    leases = catalog.leases(run)
    unfinished = _unfinished(catalog, run, directories, leases) if everything else []
    view = RunView.of(catalog, run)
    lost = catalog.lost_records(run, directories, leases, view.names)
    newest = {f.name.step: f.name for f in view.found}
    rows = [_row(run, f, view, newest) for f in view.found]
    rows += [_unreadable(run, name, "damaged", RECORD_LOST) for name in lost]
    committed = {f.name for f in view.found} | set(lost)
    if everything:
        trashed = _trashed(catalog, run, committed)
        gone = committed | {Name.parse(r.name) for r in trashed}
        rows += trashed + [r for r in unfinished if Name.parse(r.name) not in gone]
    if everything or lost:
        rows.sort(key=lambda r: (r.seq, r.name[-8:]))
    return rows


def _row(run: str, found: Found, view: RunView, newest: dict[int, Name]) -> Row:
    name, commit = found.name, found.commit
    standing = view.standing(name)
    if commit is None:
        return _unreadable(run, name, "damaged", found.problem)
    note = None
    if standing.damaged:
        first = standing.damage[0] if standing.damage else None
        note = f"{first.path}: {first.reason}" if first else "damaged"
    return Row(
        ref=ref_of(run, name, newest),
        run=run,
        step=commit.step,
        seq=commit.seq,
        name=commit.name,
        created=commit.created,
        size=commit.size,
        files=commit.files,
        digest=commit.content,
        state="damaged" if standing.damaged else "ok",
        tags=tuple(standing.tags(commit)),
        metrics=standing.metrics(commit),
        pinned=standing.pinned,
        note=note,
    )


def _unreadable(run: str, name: Name, state: State, problem: IntegrityError | str | None) -> Row:
    """A row for a record that says nothing of itself."""
    return Row(
        ref=f"{run}@{name}",
        run=run,
        step=name.step,
        seq=name.seq,
        name=str(name),
        created=None,
        size=0,
        files=0,
        digest=None,
        state=state,
        note=str(problem),
    )


RECORD_LOST = "its record is missing"


def _unfinished(
    catalog: Catalog, run: str, names: Sequence[Name], all_leases: Sequence[HeldLease]
) -> list[Row]:
    """Directories without a record, looked at before the records are."""
    leases = {held.name: held for held in all_leases}
    now = store_time(catalog) if leases else 0.0
    rows = []
    for name in names:
        found = catalog.find(run, name)
        if found is not None and not found.is_void:
            continue
        listed = catalog.backend.list(RunKeys(run).directory(name), recursive=True)
        held = leases.get(name)
        lease = held.lease if held is not None else None
        note = "its writer is gone"
        if found is not None:
            note = "given up"
        elif held is not None and is_live(held, now):
            writer = f"{lease.writer.host}, process {lease.writer.pid}" if lease else "someone"
            note = f"being written by {writer}"
        rows.append(
            Row(
                ref=f"{run}@{name}",
                run=run,
                step=name.step,
                seq=name.seq,
                name=str(name),
                created=lease.created if lease is not None else None,
                size=sum(max(0, e.size) for e in listed),
                files=len(listed),
                digest=None,
                state="unfinished",
                note=note,
            )
        )
    return rows


def _trashed(catalog: Catalog, run: str, committed: set[Name]) -> list[Row]:
    rows = []
    for name in catalog.trash_names(run):
        if name in committed:
            continue
        try:
            trash, _ = catalog.find_trash(run, name)
            if trash is None:
                continue
            record = decode_record(trash.record.encode(), run, name, "the record in the trash")
            if not isinstance(record, Commit):
                raise IntegrityError(f"the trash of {run}@{name} holds no commit")
        except IntegrityError as error:
            rows.append(_unreadable(run, name, "trashed", error))
            continue
        rows.append(
            Row(
                ref=f"{run}@{name}",
                run=run,
                step=record.step,
                seq=record.seq,
                name=record.name,
                created=record.created,
                size=record.size,
                files=record.files,
                digest=record.content,
                state="trashed",
                tags=record.tags,
                metrics=record.metrics,
                note=f"{trash.reason}; kept for {spell_duration(trash.grace)} "
                f"from {trash.created[:16]}",
            )
        )
    return rows


def ref_of(run: str, name: Name, newest: Mapping[int, Name]) -> str:
    """``RUN@STEP`` for the newest commit of a step, ``RUN@NAME`` for the others."""
    return f"{run}@{name.step}" if newest.get(name.step) == name else f"{run}@{name}"
