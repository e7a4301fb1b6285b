"""Jobs in the user's crontab.

Each has two lines of its own, the first of which says so; all other lines are left as they are:

    # ckptstore: nightly in /data/project
    17 2-23/6 * * * cd /data/project && /usr/bin/env PATH=… /opt/bin/ckpt backup nightly --quiet
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import platformdirs

from ckptstore.backup.command import JobCommand
from ckptstore.backup.times import CronTimes
from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    TemporaryError,
    UsageError,
    printable,
    translate_os_errors,
)

_MARK = re.compile(r"# ckptstore: ([A-Za-z0-9][A-Za-z0-9_-]*) in (/.*)")
_FIELDS = re.compile(r"(\S+\s+\S+\s+\S+\s+\S+\s+\S+)\s+(\S.*)")
_LONGEST = 990
"""Debian's cron takes commands of up to 998 bytes."""

_SECONDS = 30


@dataclass(frozen=True)
class CronEntry:
    """A job in the crontab.

    Attributes:
        job: Its name.
        directory: Where its ckpt.toml is.
        expression: When.
        command: What cron runs.
    """

    job: str
    directory: str
    expression: str
    command: str


def line_for(command: JobCommand, times: CronTimes) -> str:
    """The line of a crontab that runs a command.

    Raises:
        UsageError: it is longer than cron takes.
    """
    for path in (command.environment["PATH"], command.short_path):
        variables = {**command.environment, "PATH": path}
        words = [
            "/usr/bin/env",
            *(f"{name}={value}" for name, value in variables.items()),
            command.program,
            *command.arguments,
        ]
        text = f"cd {shlex.quote(command.directory)} && {' '.join(map(shlex.quote, words))}"
        text = text.replace("%", "\\%")  # cron makes a bare one a line break
        if len(os.fsencode(text)) <= _LONGEST:
            return f"{times.expression} {text}"
    raise UsageError(
        "the line would be longer than cron takes (998 bytes)",
        hint="move variables (CKPT_…, HADOOP_…) into env_file, or use --systemd",
    )


def block_for(command: JobCommand, times: CronTimes) -> list[str]:
    """Both lines of a job."""
    mark = f"# ckptstore: {command.arguments[1]} in {command.directory}"
    return [mark, line_for(command, times)]


def install(command: JobCommand, times: CronTimes) -> bool:
    """Put a job into the crontab, instead of what it had there. Returns whether that changed it.

    Raises:
        CkptError: there is no cron here, or it may not be used, or it does not take the line.
    """
    block = block_for(command, times)
    with _locked():
        before = _read()
        lines, found = [], False
        for part in _parts(before):
            if _is_of(part, command.arguments[1], command.directory):
                lines += [] if found else block
                found = True
            else:
                lines += part
        if not found:
            lines += block
        return _write(before, lines)


def remove(job: str, directory: str) -> bool:
    """Take a job out of the crontab. Returns whether it was there.

    Raises:
        CkptError: the crontab cannot be read or written.
    """
    with _locked():
        before = _read()
        parts = [part for part in _parts(before) if not _is_of(part, job, directory)]
        return _write(before, [line for part in parts for line in part])


def entries() -> list[CronEntry]:
    """The jobs in the crontab.

    Raises:
        CkptError: it cannot be read.
    """
    found = []
    for part in _parts(_read()):
        match = _MARK.fullmatch(part[0])
        if match is None:
            continue
        fields = _FIELDS.fullmatch(part[1]) if len(part) > 1 else None
        expression, command = fields.groups() if fields is not None else ("", "")
        found.append(CronEntry(match[1], match[2], expression, command))
    return found


def is_available() -> bool:
    """Whether there is a ``crontab`` command."""
    return shutil.which("crontab") is not None


def _parts(lines: list[str]) -> Iterator[list[str]]:
    """The lines, each of ours together with the mark above it."""
    marked = False
    for number, line in enumerate(lines):
        if marked:
            marked = False
            continue
        follower = lines[number + 1] if number + 1 < len(lines) else ""
        marked = _MARK.fullmatch(line) is not None and " backup " in follower
        yield [line, follower] if marked else [line]


def _is_of(part: list[str], job: str, directory: str) -> bool:
    match = _MARK.fullmatch(part[0])
    return match is not None and (match[1], match[2]) == (job, directory)


def _read() -> list[str]:
    done = _run(["crontab", "-l"])
    if done.returncode == 0:
        lines = done.stdout.split("\n")
        return lines[:-1] if lines[-1] == "" else lines
    if "no crontab for" in done.stderr:
        return []
    raise _refused(done.stderr, "read")


def _write(before: list[str], lines: list[str]) -> bool:
    if lines == before:
        return False
    done = _run(["crontab", "-"], "".join(f"{line}\n" for line in lines))
    if done.returncode != 0:
        raise _refused(done.stderr, "changed")
    return True


def _refused(said: str, what: str) -> CkptError:
    text = printable("; ".join(filter(None, said.strip().splitlines()))[:300]) or "no reason given"
    message = f"the crontab could not be {what}: {text}"
    if "not allowed" in said or "ermission" in said:
        return AccessDeniedError(message)
    return CkptError(message)


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    if not is_available():
        raise UsageError(
            "there is no cron here (no command crontab)",
            hint="install it (Debian: apt install cron), use --systemd, or look with --print",
        )
    try:
        with translate_os_errors(command[0]):
            return subprocess.run(  # noqa: S603 - the words are fixed
                command,
                input=text,
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",
                timeout=_SECONDS,
                env={**os.environ, "LC_ALL": "C"},
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise TemporaryError(f"{' '.join(command)} does not end") from None


@contextmanager
def _locked() -> Iterator[None]:
    """One of us at a time: a crontab is read, changed and written whole."""
    folder = platformdirs.user_state_path("ckptstore")
    with translate_os_errors(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "crontab.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
