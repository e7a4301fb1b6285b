"""``ckpt status``"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import JsonOption, QuietOption, StoreOption, command, store_and_run

if TYPE_CHECKING:
    from ckptstore.maintenance.mirrorstatus import MirrorStatus, RunMirror
    from ckptstore.maintenance.status import Held, RunStatus, StoreStatus
    from cli.output import Output


@command
def status(
    first: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="The store.", show_default=False)
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Only this run.", show_default=False)
    ] = None,
    no_mirrors: Annotated[
        bool, typer.Option("--no-mirrors", help="Ask no mirror: what the store knows of them.")
    ] = False,
    max_lag: Annotated[
        str | None,
        typer.Option(
            "--max-lag",
            metavar="TIME",
            help="Exit 3 if a mirror lacks a checkpoint for longer, or there is no mirror.",
        ),
    ] = None,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            "--prometheus",
            metavar="FILE",
            help="Also write metrics for Prometheus's textfile collector.",
            show_default=False,
        ),
    ] = None,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show how a store stands: what its mirrors lack, what only it holds, how long it lasts.

    Mirrors have 10 seconds to answer; of one that does not, what the store has noted is shown.
    """
    from ckptstore.durations import parse_duration
    from ckptstore.maintenance.status import status as status_of
    from cli.output import Output

    out = Output(json, quiet)
    limit = parse_duration(max_lag) if max_lag is not None else None
    opened, run = store_and_run(first, second, store)
    with out.busy(f"looking at {opened.uri}"):
        found = status_of(opened, run, ask=not no_mirrors)
    if prometheus is not None:
        from ckptstore.backup.metrics import write_metrics
        from ckptstore.backup.statusmetrics import metrics_of

        write_metrics(prometheus, metrics_of(found))
    if json:
        out.document(_document(found))
    elif not quiet:
        from cli.output import is_terminal

        (_show if is_terminal(sys.stdout) else _columns)(out, found)
    if limit is not None:
        _check_lag(found, limit)


def _check_lag(found: StoreStatus, limit: float) -> None:
    """Exit 3, and say why, when a mirror is too far behind."""
    from ckptstore.durations import spell_duration
    from cli.output import plural, show_error

    late = [(r, m) for r in found.runs for m in r.mirrors if m.behind.seconds > limit]
    for run, mirror in late:
        lacks = plural(mirror.behind.checkpoints, "checkpoint")
        oldest = spell_duration(mirror.behind.seconds)
        show_error(f"{mirror.mirror} lacks {lacks} of {run.run}, the oldest for {oldest}")
    unmirrored = not found.mirrors and any(r.checkpoints for r in found.runs)
    if unmirrored:
        show_error(f"{found.uri} has no mirror", f"ckpt mirror {found.uri} DST")
    if late or unmirrored:
        raise typer.Exit(3)


def _columns(out: Output, found: StoreStatus) -> None:
    """For a pipe: a line a run, a line a mirror and run, a line for the store."""
    from ckptstore.durations import spell_duration
    from cli.output import size, when

    rows = [
        [
            "run",
            run.run,
            run.newest.ref if run.newest is not None else "-",
            when(run.newest.created if run.newest is not None else None),
            str(run.checkpoints),
            str(len(run.damaged)),
            size(run.bytes),
            _rate(run.growth) or "-",
            run.verified.ref if run.verified is not None else "-",
            when(run.verified.at if run.verified is not None else None),
            size(run.trash.bytes),
            size(run.unfinished.bytes),
            size(run.orphans.bytes),
            _loss(run) or "-",
        ]
        for run in found.runs
    ]
    mirrors = {m.uri: m for m in found.mirrors}
    for run in found.runs:
        rows += [
            [
                "mirror",
                one.mirror,
                run.run,
                "live" if one.live else "noted",
                str(one.behind.checkpoints),
                size(one.behind.bytes),
                spell_duration(one.behind.seconds),
                f"{run.run}@{one.newest}" if one.newest is not None else "-",
                when(mirrors[one.mirror].reached),
                mirrors[one.mirror].problem or "-",
            ]
            for one in run.mirrors
        ]
    free = size(found.free) if found.free is not None else "-"
    full = spell_duration(found.full_in) if found.full_in is not None else "-"
    rows.append(["store", found.uri, free, _rate(found.growth) or "-", full])
    out.table((), rows)


def _show(out: Output, found: StoreStatus) -> None:
    from cli.output import ago, size

    runs = [
        [
            run.newest.ref if run.newest is not None else run.run,
            ago(run.newest.created) if run.newest is not None else "nothing intact",
            str(run.checkpoints),
            size(run.bytes),
            _rate(run.growth) if run.growth != 0 else "none",
            _details(run),
        ]
        for run in found.runs
    ]
    if not runs:
        out.note(f"{found.uri} holds no run yet")
    right = ("SAVED", "COUNT", "SIZE", "GROWTH")
    if runs:
        out.table(("REF", "SAVED", "COUNT", "SIZE", "GROWTH", "DETAILS"), runs, right=right)
    rows = [
        [
            one.mirror,
            run.run,
            _behind(one),
            f"@{one.newest.step}" if one.newest is not None else "none",
            "" if one.live else "noted",
        ]
        for run in found.runs
        for one in run.mirrors
    ]
    if rows:
        out.line("")
        out.table(("MIRROR", "RUN", "LACKS", "NEWEST", "AS"), rows, right=("NEWEST",))
    out.line("")
    for mirror in found.mirrors:
        _tell_mirror(out, mirror)
    for run in found.runs:
        if loss := _loss(run):
            out.line(f"if {found.uri} died now, {loss} would be lost")
    _tell_space(out, found)


def _details(run: RunStatus) -> str:
    from cli.output import ago, plural

    parts = []
    if run.damaged:
        parts.append(f"{len(run.damaged)} damaged: {', '.join(run.damaged[:3])}")
    if run.verified is not None:
        parts.append(f"verified {run.verified.ref} {ago(run.verified.at)}")
    elif run.checkpoints:
        parts.append("never verified")
    parts += _held(run.trash, "in the trash")
    parts += _held(run.unfinished, "being written")
    if run.orphans.count:
        parts += _held(run.orphans, plural(run.orphans.count, "dead save").partition(" ")[2])
    return ", ".join(parts)


def _held(held: Held, what: str) -> list[str]:
    from cli.output import size

    return [f"{held.count} {what} ({size(held.bytes)})"] if held.count else []


def _behind(one: RunMirror) -> str:
    from ckptstore.durations import spell_duration
    from cli.output import size

    lag = one.behind
    if not lag.checkpoints:
        return "nothing"
    return f"{lag.checkpoints} ({size(lag.bytes)}) for {spell_duration(lag.seconds)}"


def _loss(run: RunStatus) -> str:
    """What would be lost; empty when nothing would."""
    from ckptstore.durations import spell_duration
    from cli.output import plural

    loss = run.loss
    if loss.everything:
        return f"everything of {run.run} ({plural(loss.checkpoints, 'checkpoint')})"
    if not loss.checkpoints:
        return ""
    what = plural(loss.steps, "step") if loss.steps else plural(loss.checkpoints, "checkpoint")
    took = f" ({spell_duration(loss.seconds)})" if loss.seconds is not None else ""
    return f"{what}{took} of {run.run}"


def _tell_mirror(out: Output, mirror: MirrorStatus) -> None:
    from cli.output import ago

    reached = f"all was there {ago(mirror.reached)}" if mirror.reached else "never complete yet"
    problem = f"; {mirror.problem}" if mirror.problem is not None else ""
    out.line(f"{mirror.uri}: {reached}{problem}")


def _tell_space(out: Output, found: StoreStatus) -> None:
    from ckptstore.durations import spell_duration
    from cli.output import size

    if found.free is None:
        return
    text = f"{size(found.free)} free"
    if found.full_in is not None:
        full = spell_duration(found.full_in)
        text += f": full in {full} at {_rate(found.growth)} if nothing is deleted"
    out.line(text)


def _rate(growth: float | None) -> str:
    from cli.output import size

    return f"{size(round(growth * 86400))}/d" if growth is not None else ""


def _document(found: StoreStatus) -> dict[str, Any]:
    return {
        "store": found.uri,
        "id": found.id,
        "free_bytes": found.free,
        "growth_bytes_per_second": found.growth,
        "full_in_seconds": found.full_in,
        "mirrors": [
            {
                "mirror": m.uri,
                "id": m.id,
                "runs": list(m.runs),
                "asked": m.asked,
                "answered": m.answered,
                "tried": m.tried,
                "reached": m.reached,
                "problem": m.problem,
            }
            for m in found.mirrors
        ],
        "runs": [_run_document(run) for run in found.runs],
    }


def _run_document(run: RunStatus) -> dict[str, Any]:
    newest, verified, loss = run.newest, run.verified, run.loss
    return {
        "run": run.run,
        "newest": None
        if newest is None
        else {
            "ref": newest.ref,
            "name": str(newest.name),
            "step": newest.step,
            "created": newest.created,
            "size": newest.size,
            "age_seconds": newest.age,
        },
        "checkpoints": run.checkpoints,
        "bytes": run.bytes,
        "damaged": list(run.damaged),
        "growth_bytes_per_second": run.growth,
        "verified": None if verified is None else {"ref": verified.ref, "at": verified.at},
        "trash": {"checkpoints": run.trash.count, "bytes": run.trash.bytes},
        "unfinished": {"saves": run.unfinished.count, "bytes": run.unfinished.bytes},
        "orphans": {"saves": run.orphans.count, "bytes": run.orphans.bytes},
        "loss": {
            "everything": loss.everything,
            "checkpoints": loss.checkpoints,
            "steps": loss.steps,
            "seconds": loss.seconds,
        },
        "mirrors": [
            {
                "mirror": m.mirror,
                "live": m.live,
                "behind": {
                    "checkpoints": m.behind.checkpoints,
                    "bytes": m.behind.bytes,
                    "seconds": round(m.behind.seconds, 1),
                },
                "newest": str(m.newest) if m.newest is not None else None,
                "newest_step": m.newest.step if m.newest is not None else None,
            }
            for m in run.mirrors
        ],
    }
