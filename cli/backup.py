"""``ckpt backup``"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import DryRunOption, JsonOption, NoProgressOption, QuietOption, command

if TYPE_CHECKING:
    from ckptstore.backup.report import Report
    from cli.output import Output


@command
def backup(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="A job of ckpt.toml ([jobs.JOB]); without one the jobs are listed.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Run a backup job once: copy, retention, verification, and tell who shall know.

    One line when all is well, nothing with --quiet; one line on stderr and an exit code when not.
    What a run leaves undone, the next one does.
    """
    from ckptstore.backup.jobs import load_job
    from ckptstore.backup.run import run_job
    from cli.output import Output

    out = Output(json, quiet, not no_progress)
    if name is None:
        _list(out)
        return
    job = load_job(name)
    with out.busy(f"backup {name}") as say:
        report = run_job(job, dry_run=dry_run, say=say)
    _show(out, report)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _show(out: Output, report: Report) -> None:
    from ckptstore.errors import printable
    from cli.output import is_terminal, show_error

    if out.json:
        out.document(report.as_json({}))
    if report.ok:
        out.line(report.line)
    else:  # a mail from cron has one line
        show_error(report.line, report.hint if is_terminal(sys.stderr) else None)
    said = [f"{place.uri}: {text}" for place in report.everywhere for text in place.warnings]
    for warning in (*said, *report.warnings):
        print(f"warning: {printable(warning)}", file=sys.stderr)


def _list(out: Output) -> None:
    """The jobs of the files, and how each went last."""
    from ckptstore.backup.jobs import load_jobs, parse_job
    from ckptstore.backup.state import JobState
    from ckptstore.errors import UsageError, printable
    from ckptstore.uri import redact
    from cli.output import ago

    rows: list[dict[str, Any]] = []
    for name, table in load_jobs().items():
        row: dict[str, Any] = {"job": printable(name), "source": None, "to": [], "problem": None}
        row |= {"last": None, "ok": None, "line": None}
        try:
            job = parse_job(table)
        except UsageError as error:
            row["problem"] = str(error)
        else:
            status = JobState(job).status()
            row |= {"source": redact(job.source), "to": [redact(uri) for uri in job.to]}
            row |= {"last": status.get("began"), "ok": status.get("ok"), "line": status.get("line")}
        rows.append(row)
    if out.json:
        out.document(rows)
        return
    if not rows:
        out.note("there are no jobs in ckpt.toml: write [jobs.NAME]")
    if out.quiet or not rows:
        return
    cells = []
    for row in rows:
        last = ago(row["last"]) if isinstance(row["last"], str) else "never"
        state = {True: "ok", False: "failed"}.get(row["ok"], "")
        note = row["problem"] or row["line"] or ""
        cells.append([row["job"], last, "failed" if row["problem"] else state, str(note)])
    out.table(("JOB", "LAST RUN", "STATE", "NOTE"), cells)
