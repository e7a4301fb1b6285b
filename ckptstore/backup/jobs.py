"""What a backup job is: a table ``[jobs.NAME]`` of ckpt.toml, read and checked.

# ckpt.toml
[jobs.nightly]
source = "checkpoints/ppo"            # a directory that a trainer writes to, or a store
run = "gsm8k"                         # for a directory: the run that it is pushed to
to = ["/mnt/nas/ckpts", "s3://bucket/ckpts"]
retention = { keep_last = 5, keep_best = 1 }
verify = "5%"
ping_env = "CKPT_PING_URL"

Paths are relative to the file that the job stands in.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ckptstore.backup.fields import read_fields
from ckptstore.backup.secretfile import (
    add_to_environment,
    check_no_secret,
    default_env_file,
    read_env_file,
)
from ckptstore.backup.sources import SETTLE_SECONDS, Layout
from ckptstore.config import Section, load_sections
from ckptstore.errors import NotFoundError, UsageError, printable
from ckptstore.layout import MARKER
from ckptstore.maintenance import Policy
from ckptstore.uri import StoreURI, redact

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PATTERN = re.compile(r"[A-Za-z0-9._*?\[\]!-]{1,200}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Job:
    """A backup job.

    Attributes:
        name: ``NAME`` in ``[jobs.NAME]``.
        file: The file that it stands in, absolute.
        source: A directory or a store: an absolute path or a URI.
        to: The stores that it copies to: absolute paths or URIs.
        run: The run that a directory is pushed to.
        runs: Patterns of the runs of a source store; none is all.
        layout: How a source directory is laid out; ``None`` finds out.
        settle: Seconds; see :func:`ckptstore.backup.sources.find`.
        retention: What is kept in each destination; ``None`` removes nothing.
        source_retention: The same for a source store.
        max_delete: More deletions than this in one run of a store are refused.
        verify: The share of the bytes of each destination that is read after copying.
        verify_time: Seconds after which the verification stops.
        limit: Bytes a second, from a store to a store.
        newest_first: Whether the newest checkpoint of a store is copied first.
        env_file: The file of secrets; ``None`` is the user's, if there is one.
        ping_env: The variable that holds the URL to ping.
        notify_env: The variables that hold the URLs to notify.
        notify_on: When to notify.
        prometheus: The file of metrics.
        status_file: A copy of the status, for others to read.
    """

    name: str
    file: Path
    source: str
    to: tuple[str, ...]
    run: str | None = None
    runs: tuple[str, ...] = ()
    layout: Layout | None = None
    settle: float = SETTLE_SECONDS
    retention: Policy | None = None
    source_retention: Policy | None = None
    max_delete: int | None = None
    verify: float | None = None
    verify_time: float | None = None
    limit: int | None = None
    newest_first: bool = False
    env_file: Path | None = None
    ping_env: str | None = None
    notify_env: tuple[str, ...] = field(default=())
    notify_on: str = "failure"
    prometheus: Path | None = None
    status_file: Path | None = None

    @property
    def directory(self) -> Path:
        """Where it is run: the directory of its file."""
        return self.file.parent

    @property
    def reads_a_store(self) -> bool:
        """Whether the source is a store."""
        return _is_uri(self.source) or (Path(self.source) / MARKER).exists()

    def load_environment(self) -> None:
        """Set what stands in the file of secrets and is not set.

        Raises:
            CkptError: the file cannot be used (see :func:`read_env_file`).
        """
        file = self.env_file or default_env_file()
        add_to_environment(read_env_file(file, missing_ok=self.env_file is None))


def load_jobs() -> dict[str, Section]:
    """The tables of all jobs, by name; they are not checked yet."""
    return load_sections("jobs")


def load_job(name: str) -> Job:
    """The job of this name.

    Raises:
        NotFoundError: there is none.
        UsageError: what stands in its table cannot be; the message names the key.
    """
    tables = load_jobs()
    if name not in tables:
        near = difflib.get_close_matches(name, tables, n=1)
        known = f"jobs here: {', '.join(map(printable, tables))}" if tables else None
        raise NotFoundError(
            f"there is no job {printable(name)!r} in ckpt.toml",
            hint=f"did you mean {near[0]!r}?" if near else known or f"write [jobs.{name}]",
        )
    return parse_job(tables[name])


def parse_job(table: Section) -> Job:
    """The job that a table says.

    Raises:
        UsageError: it cannot be one; the message names the file, the job and the key.
    """
    where = f"{table.origin}: [jobs.{printable(table.name)}]"
    if not _NAME.fullmatch(table.name):
        raise UsageError(
            f"{where}: this cannot be the name of a job",
            hint="a job is one word of letters, digits, '_' and '-'",
        )
    check_no_secret(table.values, where)
    values = read_fields(table.values, where)
    file = Path(table.origin).absolute()
    for key in ("source", "to"):
        if key not in values:
            raise UsageError(f"{where}: {key} is missing", hint=_MISSING[key])
    source = _place(values["source"], file.parent, f"{where}: source")
    to = tuple(_place(one, file.parent, f"{where}: to", store=True) for one in values["to"])
    for key in ("env_file", "prometheus", "status_file"):
        if key in values:
            values[key] = file.parent / os.path.expanduser(values[key])
    for key in ("retention", "source_retention"):
        if key in values:
            values[key] = Policy.of(values[key], f"{where}: {key}")
    if values.get("layout") == "auto":
        del values["layout"]
    job = Job(**values | {"name": table.name, "file": file, "source": source, "to": to})
    _check_parts(job, where)
    return job


_MISSING = {
    "source": "the directory or the store that is copied",
    "to": "the stores that it is copied to, for example: to = ['/mnt/nas/ckpts']",
}


def _is_uri(text: str) -> bool:
    return _SCHEME.match(text) is not None


def _place(text: str, directory: Path, where: str, *, store: bool = False) -> str:
    """A path made absolute, or a URI that can be one."""
    try:
        if _is_uri(text):
            return str(StoreURI.parse(text))
    except UsageError as error:
        raise UsageError(f"{where}: {error}", hint=error.hint) from error
    path = directory / os.path.expanduser(text)
    if store and "/" not in text and text not in (".", "..") and not path.exists():
        raise UsageError(
            f"{where}: {printable(text)!r} is no store: neither a URI nor a path that exists",
            hint=f"a URI (s3://bucket/ckpts), or a path (/mnt/{printable(text)}, ./{text})",
        )
    return os.path.normpath(path)


def _check_parts(job: Job, where: str) -> None:
    """What does not fit together."""
    if len(set(job.to)) < len(job.to):
        raise UsageError(f"{where}: to names a store twice")
    if job.source in job.to:
        raise UsageError(f"{where}: the source {redact(job.source)} is also a destination")
    _check_kind(job, where)
    for pattern in job.runs:
        if not _PATTERN.fullmatch(pattern):
            raise UsageError(f"{where}: runs: {printable(pattern)!r} fits the name of no run")


def _check_kind(job: Job, where: str) -> None:
    """Keys that are for the other kind of source; nothing is said of one that is not there."""
    if job.reads_a_store:
        for key in ("run", "layout"):
            if getattr(job, key) is not None:
                hint = "for a store: runs = ['PATTERN', …]" if key == "run" else None
                raise UsageError(f"{where}: {key} is for a source that is a directory", hint=hint)
    elif Path(job.source).is_dir():
        if job.run is None:
            raise UsageError(
                f"{where}: run is missing", hint="the run that the directory is pushed to"
            )
        for key in ("runs", "source_retention", "limit", "newest_first"):
            if getattr(job, key):
                raise UsageError(f"{where}: {key} is for a source that is a store")
