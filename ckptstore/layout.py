"""Names and keys: what lies where in a store.

A key is a relative POSIX path below the store's root. Names that come from outside (directory
listings, manifests, command lines) are untrusted and go through the checks here before they are
used in a key.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

from ckptstore.errors import IntegrityError, UsageError, printable

MARKER = "CKPTSTORE.json"
MANIFEST = "MANIFEST.json"
MIRRORS = "mirrors"
TEMPORARY_PREFIX = ".ckpt-tmp-"
"""Every file of ours that is not complete yet has a name that starts with this."""

REPAIR_PREFIX = f"{TEMPORARY_PREFIX}repair-"
"""Among a checkpoint's marks: a repair is at work, and its temporary files lie in the directory."""

STAGING_PREFIX = ".ckpt-pull-"
"""A pull collects its files in a directory of the destination whose name starts with this."""

STEP_LIMIT = 10**15
SEQ_LIMIT = 10**12
LIFE_LIMIT = 10**9

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_TAG = re.compile(r"[a-z][a-z0-9._-]{0,99}")
_NAME = re.compile(
    r"([0-9]{5}|[1-9][0-9]{5,11})-step-([0-9]{8}|[1-9][0-9]{8,14})-([a-z]{8})", re.ASCII
)
_LIFE = re.compile(r"([0-9]{5}|[1-9][0-9]{5,8})\.json", re.ASCII)
_SILLY = re.compile(r"\.nfs[0-9a-f]{24}")
_RESERVED_RUNS = {MIRRORS, MARKER.lower()}


def check_run(run: str) -> str:
    """``run`` if it can be a run's name.

    Raises:
        UsageError: it is not one path segment of ``[A-Za-z0-9][A-Za-z0-9._-]*``, or is reserved.
    """
    if not _RUN.fullmatch(run):
        raise UsageError(
            f"{printable(run)!r} cannot be the name of a run",
            hint="a run is one word of letters, digits, '.', '_' and '-', and starts with a letter "
            "or digit",
        )
    if run.lower() in _RESERVED_RUNS:
        raise UsageError(f"{run!r} is reserved and cannot be the name of a run")
    return run


def is_run(name: str) -> bool:
    """Whether a directory of this name below the root can be a run."""
    return _RUN.fullmatch(name) is not None and name.lower() not in _RESERVED_RUNS


def check_step(step: int) -> int:
    """``step`` if it can be a training step: 0 ≤ step < 10^15.

    Raises:
        UsageError: it cannot.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < STEP_LIMIT:
        raise UsageError(f"{step!r} cannot be a step: a step is a whole number from 0 on")
    return step


def check_life(life: int) -> int:
    """``life`` if it can be the number of a run's life: 0 < life < 10^9.

    Raises:
        UsageError: it cannot.
    """
    if isinstance(life, bool) or not isinstance(life, int) or not 0 < life < LIFE_LIMIT:
        raise UsageError(
            f"{life!r} cannot be the number of a life", hint="Store.begin_life gives the number"
        )
    return life


def check_tag(tag: str) -> str:
    """``tag`` if it can be a tag: ``[a-z][a-z0-9._-]*``, not ``latest``, ``best``, ``step-…``.

    Raises:
        UsageError: it cannot.
    """
    if not _TAG.fullmatch(tag) or tag in ("latest", "best") or tag.startswith("step-"):
        raise UsageError(
            f"{printable(tag)!r} cannot be a tag",
            hint="a tag is lower-case letters, digits, '.', '_' and '-', starts with a letter, and "
            "is not 'latest', 'best' or 'step-…'",
        )
    return tag


class Name(NamedTuple):
    """A checkpoint's name, ``<seq>-step-<step>-<id>``; names order by ``(seq, id)``.

    The sequence number counts saves in a run, so the order of names is the order of saving even
    when training went back to an earlier step. (A tuple in the order of comparison, because ten
    thousand of them are sorted and hashed for a listing.)
    """

    seq: int
    id: str
    step: int

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name that ``text`` spells, or ``None`` when it spells none."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[3], int(match[2]))

    def __str__(self) -> str:
        return f"{self.seq:05d}-step-{self.step:08d}-{self.id}"


@dataclass(frozen=True)
class RunKeys:
    """The keys of one run."""

    run: str

    @property
    def commits(self) -> str:
        """Directory of the records."""
        return f"{self.run}/commits"

    @property
    def trash(self) -> str:
        """Directory of the trash records."""
        return f"{self.run}/trash"

    @property
    def leases(self) -> str:
        """Directory of the leases."""
        return f"{self.run}/leases"

    @property
    def lives(self) -> str:
        """Directory of the lives."""
        return f"{self.run}/lives"

    @property
    def marks(self) -> str:
        """Directory with a directory of marks for each marked checkpoint."""
        return f"{self.run}/marks"

    @property
    def latest(self) -> str:
        """The hint for people."""
        return f"{self.run}/latest"

    def directory(self, name: Name) -> str:
        """The checkpoint's directory."""
        return f"{self.run}/{name}"

    def file(self, name: Name, path: str) -> str:
        """A file of the checkpoint; ``path`` has been checked."""
        return f"{self.run}/{name}/{path}"

    def manifest(self, name: Name) -> str:
        """The checkpoint's manifest."""
        return f"{self.run}/{name}/{MANIFEST}"

    def record(self, name: Name) -> str:
        """The commit key: where a commit or a void is created exclusively."""
        return f"{self.run}/commits/{name}.json"

    def trash_record(self, name: Name) -> str:
        """Where a deleted checkpoint's record waits for its grace period to end."""
        return f"{self.run}/trash/{name}.json"

    def lease(self, name: Name, writer: str) -> str:
        """An unfinished save's heartbeat and journal."""
        return f"{self.run}/leases/{name}.{writer}.json"

    def life(self, number: int) -> str:
        """Where a life of the run is created exclusively."""
        return f"{self.run}/lives/{number:05d}.json"

    def marks_of(self, name: Name) -> str:
        """Directory of one checkpoint's marks."""
        return f"{self.run}/marks/{name}"


def is_temporary(key: str) -> bool:
    """Whether the key's last segment is that of a file of ours that was not completed."""
    return key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def is_silly(key: str) -> bool:
    """Whether an NFS client named this file: it was removed while a process had it open.

    (The kernel calls it a silly rename.) It goes when it is closed, so it is not part of anything.
    """
    return _SILLY.fullmatch(key.rpartition("/")[2]) is not None


def record_name(file_name: str) -> Name | None:
    """The checkpoint that ``commits/<file_name>`` or ``trash/<file_name>`` is about."""
    return Name.parse(file_name[:-5]) if file_name.endswith(".json") else None


def lease_name(file_name: str) -> Name | None:
    """The checkpoint that ``leases/<file_name>`` is about."""
    return Name.parse(file_name.partition(".")[0]) if file_name.endswith(".json") else None


def life_number(file_name: str) -> int | None:
    """The number of the life that ``lives/<file_name>`` is about."""
    match = _LIFE.fullmatch(file_name)
    return None if match is None else int(match[1])


def path_problem(path: str) -> str | None:
    """Why ``path`` must not be followed inside a directory, or ``None`` when it may.

    A path from a manifest must be relative, normalised and below the directory it is used in.
    """
    if not path:
        return "is empty"
    if "\0" in path:
        return "holds a NUL byte"
    if path.startswith("/"):
        return "is absolute"
    if len(path.encode("utf-8", "surrogatepass")) > 4000:
        return "is longer than 4000 bytes"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}"
        if len(part.encode("utf-8", "surrogatepass")) > 255:
            return "has a part longer than 255 bytes"
    if path.partition("/")[0].casefold() == MANIFEST.casefold():
        return f"is reserved for the manifest ({MANIFEST})"
    return None


def check_stored_path(path: str, what: str) -> None:
    """Refuse a path read from a manifest that points outside, or is not normalised.

    Raises:
        IntegrityError: the manifest is not to be trusted.
    """
    problem = path_problem(path)
    if problem is not None:
        raise IntegrityError(f"{what} names a path that {problem}: {printable(path)!r}")


def check_new_path(path: str) -> None:
    """Refuse a path that shall not be stored.

    Raises:
        UsageError: it is not relative and normalised, is reserved, is not UTF-8, or holds control
            characters.
    """
    problem = path_problem(path)
    if problem is None:
        try:
            path.encode("utf-8")
        except UnicodeEncodeError:
            problem = "is not valid UTF-8"
    if problem is None and any(unicodedata.category(c) == "Cc" for c in path):
        problem = "holds a control character"
    reserved = (TEMPORARY_PREFIX, STAGING_PREFIX)
    if problem is None and any(p.startswith(reserved) for p in path.split("/")):
        problem = f"has a part that starts with one of {', '.join(reserved)}, which are ours"
    if problem is None and is_silly(path):
        problem = "has a name that NFS gives to a file that was removed while it was open"
    if problem is not None:
        raise UsageError(
            f"{printable(path)!r} {problem} and cannot be stored", hint="rename it, or leave it out"
        )
