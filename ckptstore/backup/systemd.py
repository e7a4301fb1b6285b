"""Jobs as systemd timers, of the user or of the system.

``ckpt-backup-NAME.service`` runs the job once, ``ckpt-backup-NAME.timer`` says when. A run that
was missed while the machine was off is made up for (``Persistent``), and machines with the same
timer do not all start at once (``RandomizedDelaySec``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptstore.backup.command import JobCommand
from ckptstore.errors import (
    CkptError,
    ConflictError,
    TemporaryError,
    printable,
    translate_os_errors,
)

_MARK = re.compile(r"# ckptstore: ([A-Za-z0-9][A-Za-z0-9_-]*) in (/.*)")
_PREFIX = "ckpt-backup-"
_SECONDS = 60
_DELAY_LIMIT = 15 * 60


@dataclass(frozen=True)
class TimerTimes:
    """When a timer fires.

    Attributes:
        calendar: Values of ``OnCalendar``.
        every: Seconds from one start to the next, where the calendar has no expression for it.
        delay: The longest random delay, in seconds.
    """

    calendar: tuple[str, ...] = ()
    every: int | None = None
    delay: int = 60


@dataclass(frozen=True)
class TimerEntry:
    """A job that has a timer.

    Attributes:
        job: Its name.
        directory: Where its ckpt.toml is.
        times: What stands after ``OnCalendar`` or ``OnUnitActiveSec``.
        timer: The unit's file.
        system: Whether it is the system's.
    """

    job: str
    directory: str
    times: str
    timer: Path
    system: bool


def delay_for(seconds: int) -> int:
    """A random delay that suits a period: a tenth of it, a quarter of an hour at most."""
    return max(1, min(_DELAY_LIMIT, seconds // 10))


def folder_of(system: bool) -> Path:
    """Where the units are."""
    if system:
        return Path("/etc/systemd/system")
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "systemd" / "user"


def units_for(command: JobCommand, times: TimerTimes, *, system: bool) -> dict[str, str]:
    """The unit files, by name."""
    job = command.arguments[1]
    name = f"{_PREFIX}{job}"
    mark = f"# ckptstore: {job} in {command.directory}"
    variables = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in command.environment.items()
    )
    network = "Wants=network-online.target\nAfter=network-online.target\n" if system else ""
    words = " ".join(_quoted(w, command=True) for w in (command.program, *command.arguments))
    service = (
        f"{mark}\n"
        "[Unit]\n"
        f"Description=ckpt backup {job}\n"
        f"{network}"
        "\n[Service]\n"
        "Type=oneshot\n"
        f"WorkingDirectory={_escaped(command.directory)}\n"
        f"{variables}"
        f"ExecStart={words}\n"
        "Nice=10\n"
        "IOSchedulingClass=idle\n"
        "TimeoutStartSec=infinity\n"
    )
    if times.every is None:
        when = "".join(f"OnCalendar={one}\n" for one in times.calendar) + "Persistent=true\n"
    else:  # Persistent is for calendars; after a boot the first one comes soon
        when = f"OnActiveSec=1min\nOnBootSec=2min\nOnUnitActiveSec={times.every}s\n"
    timer = (
        f"{mark}\n"
        "[Unit]\n"
        f"Description=When ckpt backup {job} is run\n"
        "\n[Timer]\n"
        f"{when}"
        f"RandomizedDelaySec={times.delay}s\n"
        "AccuracySec=1min\n"
        "\n[Install]\n"
        "WantedBy=timers.target\n"
    )
    return {f"{name}.service": service, f"{name}.timer": timer}


def install(command: JobCommand, times: TimerTimes, *, system: bool) -> bool:
    """Write the units, and start the timer where a systemd is running.

    Returns:
        Whether anything changed.

    Raises:
        ConflictError: a job of another directory has the name.
        CkptError: the units cannot be written, or systemd does not take them.
    """
    job, folder = command.arguments[1], folder_of(system)
    for entry in entries(system):
        if entry.job == job and entry.directory != command.directory:
            raise ConflictError(
                f"the job {job!r} of {printable(entry.directory)} has that timer",
                hint="give one of them another name, or use cron",
            )
    changed = False
    for name, text in units_for(command, times, system=system).items():
        changed |= _replace(folder / name, text)
    if is_running(system):
        if changed:
            _systemctl(system, "daemon-reload")
        _systemctl(system, "enable", f"{_PREFIX}{job}.timer")
        _systemctl(system, "restart" if changed else "start", f"{_PREFIX}{job}.timer")
    return changed


def remove(job: str, directory: str, *, system: bool) -> bool:
    """Stop the timer and remove the units. Returns whether there were any.

    Raises:
        CkptError: they cannot be removed.
    """
    mine = [e for e in entries(system) if (e.job, e.directory) == (job, directory)]
    for entry in mine:
        if is_running(system):
            _systemctl(system, "disable", "--now", entry.timer.name)
        for unit in (entry.timer, entry.timer.with_suffix(".service")):
            with translate_os_errors(str(unit)):
                unit.unlink(missing_ok=True)
        if is_running(system):
            _systemctl(system, "daemon-reload")
    return bool(mine)


def entries(system: bool) -> list[TimerEntry]:
    """The jobs that have a timer.

    Raises:
        CkptError: the units cannot be read.
    """
    folder, found = folder_of(system), []
    with translate_os_errors(str(folder)):
        for path in sorted(folder.glob(f"{_PREFIX}*.timer")):
            text = path.read_text("utf-8", "surrogateescape")
            match = _MARK.fullmatch(text.partition("\n")[0])
            if match is not None:
                times = re.findall(r"^On(?:Calendar|UnitActiveSec)=(.*)$", text, re.MULTILINE)
                found.append(TimerEntry(match[1], match[2], "; ".join(times), path, system))
    return found


def is_running(system: bool) -> bool:
    """Whether there is a systemd that takes orders: the system's, or the user's own."""
    if shutil.which("systemctl") is None:
        return False
    if system:
        return os.path.isdir("/run/systemd/system")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return bool(runtime) and os.path.exists(os.path.join(runtime, "systemd", "private"))


def commands_to_start(job: str, *, system: bool) -> str:
    """What to type where no systemd could be told."""
    scope = "" if system else " --user"
    return f"systemctl{scope} daemon-reload && systemctl{scope} enable --now {_PREFIX}{job}.timer"


def _replace(path: Path, text: str) -> bool:
    with translate_os_errors(str(path)):
        with suppress(FileNotFoundError):
            if path.read_bytes() == os.fsencode(text):
                return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(os.fsencode(text))
            temporary.chmod(0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return True


def _systemctl(system: bool, *words: str) -> None:
    command = ["systemctl", *([] if system else ["--user"]), *words]
    try:
        with translate_os_errors("systemctl"):
            done = subprocess.run(  # noqa: S603 - the words are ours
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
    except subprocess.TimeoutExpired:
        raise TemporaryError(f"{' '.join(command)} does not end") from None
    if done.returncode != 0:
        said = printable("; ".join(done.stderr.strip().splitlines())[:300])
        raise CkptError(f"{' '.join(command)} failed: {said}")


def _escaped(text: str) -> str:
    """A value in which % means nothing."""
    return text.replace("%", "%%")


def _quoted(text: str, *, command: bool = False) -> str:
    """A word for ``Environment`` or ``ExecStart``, where $ is a variable too."""
    text = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text.replace("$", "$$") if command else text}"'
