"""``ckpt schedule install``, ``list``, ``remove``"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import JsonOption, QuietOption, command

if TYPE_CHECKING:
    from ckptstore.backup.command import JobCommand
    from ckptstore.backup.jobs import Job
    from ckptstore.backup.systemd import TimerTimes
    from ckptstore.backup.times import CronTimes

app = typer.Typer(
    name="schedule",
    help="Have backup jobs run by cron or systemd.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Job = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job of ckpt.toml ([jobs.JOB]).", show_default=False),
]


@app.command("install", epilog="Example: ckpt schedule install nightly --every 6h")
@command
def install(
    name: _Job,
    every: Annotated[
        str | None, typer.Option("--every", metavar="TIME", help="For example 15min, 6h, 1d.")
    ] = None,
    cron: Annotated[
        str | None,
        typer.Option("--cron", metavar="EXPRESSION", help="For example '30 2 * * 1-5', @daily."),
    ] = None,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="A systemd timer of the user, instead of cron.")
    ] = False,
    system: Annotated[
        bool, typer.Option("--system", help="A systemd timer of the system (as root).")
    ] = False,
    delay: Annotated[
        str | None,
        typer.Option(
            "--random-delay",
            metavar="TIME",
            help="systemd: start up to this much later. A tenth of the period by default.",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print what would be installed, and do nothing.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Have a job run again and again; a job that is installed already is replaced.

    PATH and the settings that are in force here go along. Secrets do not: the job reads them from
    its env_file.
    """
    from ckptstore.backup import crontab
    from ckptstore.backup.command import command_for
    from ckptstore.backup.jobs import load_job
    from cli.output import Output

    out = Output(json, quiet)
    job = load_job(name)
    times, timer = _times(job, every, cron, systemd or system, delay)
    line = command_for(job)
    if show:
        _print(out, line, times, timer, system)
        return
    if timer is not None:
        changed, where = _install_timer(out, line, timer, system)
        spelled = "; ".join(timer.calendar) or f"every {timer.every} s"
    else:
        assert times is not None
        changed, where = crontab.install(line, times), "the crontab"
        spelled = times.expression
    coming = [t.isoformat(timespec="minutes") for t in times.next(3)] if times is not None else []
    soon = f", next at {coming[0][:16].replace('T', ' ')}" if coming else ""
    out.line(f"{name} is {'now' if changed else 'already'} in {where}: {spelled}{soon}")
    for text in _secrets(job, line):
        out.note(text)
    if json:
        out.document(
            {
                "job": name,
                "where": where,
                "times": spelled,
                "changed": changed,
                "next": coming,
                "directory": line.directory,
            }
        )


def _times(
    job: Job, every: str | None, cron: str | None, systemd: bool, delay: str | None
) -> tuple[CronTimes | None, TimerTimes | None]:
    from ckptstore.backup.systemd import TimerTimes, delay_for
    from ckptstore.backup.times import cron_every, is_cron_period, parse_cron, parse_every
    from ckptstore.durations import parse_duration
    from ckptstore.errors import UsageError

    if (every is None) == (cron is None):
        raise UsageError("say when: --every TIME or --cron EXPRESSION, one of them")
    if delay is not None and not systemd:
        raise UsageError("--random-delay is for systemd", hint="use it with --systemd")
    spread = int(parse_duration(delay)) if delay is not None else None
    if cron is not None:
        times = parse_cron(cron)
        period = _period(times)
    else:
        period = parse_every(every or "")
        if systemd and not is_cron_period(period):
            return None, TimerTimes(every=period, delay=_or(spread, delay_for(period)))
        times = cron_every(period, f"{job.name}\n{job.directory}")
    if not systemd:
        return times, None
    return times, TimerTimes(tuple(times.calendar()), delay=_or(spread, delay_for(period)))


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _period(times: CronTimes) -> int:
    """The shortest time from one run to the next, of the next few."""
    from itertools import pairwise

    gaps = [int((b - a).total_seconds()) for a, b in pairwise(times.next(12))]
    return min(gaps, default=60)


def _print(
    out: Any, line: JobCommand, times: CronTimes | None, timer: TimerTimes | None, system: bool
) -> None:
    from ckptstore.backup import crontab
    from ckptstore.backup.systemd import folder_of, units_for

    if timer is not None:
        folder = folder_of(system)
        files = {str(folder / n): t for n, t in units_for(line, timer, system=system).items()}
    else:
        assert times is not None
        files = {"crontab": "".join(f"{text}\n" for text in crontab.block_for(line, times))}
    if out.json:
        out.document([{"file": name, "text": text} for name, text in files.items()])
        return
    for name, text in files.items():
        if timer is not None:
            print(f"# {name}")
        print(text, end="" if timer is None else "\n")


def _install_timer(out: Any, line: JobCommand, timer: TimerTimes, system: bool) -> tuple[bool, str]:
    from ckptstore.backup import systemd

    changed = systemd.install(line, timer, system=system)
    where = f"the {'system' if system else 'user'}'s systemd timers"
    if not systemd.is_running(system):
        job = line.arguments[1]
        out.note(
            "no systemd could be told; where it runs: "
            + systemd.commands_to_start(job, system=system)
        )
    elif not system:
        out.note("timers of a user run while they are logged in; always: loginctl enable-linger")
    return changed, where


def _secrets(job: Job, line: JobCommand) -> list[str]:
    """What the job will not find when it is run without this environment."""
    from ckptstore.backup.secretfile import default_env_file, read_env_file
    from ckptstore.errors import CkptError

    file = job.env_file or default_env_file()
    try:
        there = read_env_file(file, missing_ok=True)
    except CkptError as error:
        return [f"{error}; {error.hint}" if error.hint else str(error)]
    needed = dict.fromkeys((*filter(None, (job.ping_env,)), *job.notify_env, *line.left_out))
    missing = [name for name in needed if name not in there]
    if not missing:
        return []
    return [f"a secret is not written into a schedule: put {', '.join(missing)} into {file}"]


@app.command("list", epilog="Example: ckpt schedule list")
@command
def list_jobs(json: JsonOption = False, quiet: QuietOption = False) -> None:
    """The jobs that are scheduled: in the crontab, and as timers of the user and the system."""
    from cli.output import Output

    out = Output(json, quiet)
    rows = _scheduled()
    if json:
        out.document(rows)
        return
    if quiet:
        return
    if not rows:
        out.note("no job is scheduled")
        return
    header = ("JOB", "WHEN", "NEXT", "WHERE", "PATH")
    keys = ("job", "times", "next", "where", "directory")
    out.table(header, [[str(row[key] or "") for key in keys] for row in rows])


def _scheduled() -> list[dict[str, Any]]:
    from ckptstore.backup import crontab, systemd
    from ckptstore.backup.times import parse_cron
    from ckptstore.errors import UsageError

    rows: list[dict[str, Any]] = []
    for one in crontab.entries() if crontab.is_available() else ():
        try:
            coming = parse_cron(one.expression).next(1)[0].isoformat(timespec="minutes")[:16]
        except UsageError:  # someone has changed it
            coming = None
        rows.append(_row(one.job, one.directory, "crontab", one.expression, coming))
    for system in (False, True):
        where = "system timer" if system else "user timer"
        rows += [
            _row(timer.job, timer.directory, where, timer.times, None)
            for timer in systemd.entries(system)
        ]
    return rows


def _row(job: str, directory: str, where: str, times: str, coming: str | None) -> dict[str, Any]:
    return {
        "job": job,
        "times": times,
        "next": coming.replace("T", " ") if coming else None,
        "where": where,
        "directory": directory,
    }


@app.command("remove", epilog="Example: ckpt schedule remove nightly")
@command
def remove(name: _Job, json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Have a job run no more: out of the crontab, and its timers away."""
    from ckptstore.backup import crontab, systemd
    from ckptstore.errors import NotFoundError, printable
    from cli.output import Output

    out = Output(json, quiet)
    directory = _directory(name)
    removed = []
    if crontab.is_available() and crontab.remove(name, directory):
        removed.append("crontab")
    removed += [
        "system timer" if system else "user timer"
        for system in (False, True)
        if systemd.remove(name, directory, system=system)
    ]
    if not removed:
        others = [row["directory"] for row in _scheduled() if row["job"] == name]
        raise NotFoundError(
            f"the job {printable(name)!r} of {printable(directory)} is not scheduled",
            hint=f"one of that name is, of {others[0]}: run this there" if others else None,
        )
    out.line(f"{name} is not run any more: removed from {', '.join(removed)}")
    if json:
        out.document({"job": name, "removed": removed})


def _directory(name: str) -> str:
    """Where the job's file is; here, when the job is not in it any more."""
    from pathlib import Path

    from ckptstore.backup.jobs import load_jobs

    tables = load_jobs()
    return str(Path(tables[name].origin).absolute().parent) if name in tables else os.getcwd()
