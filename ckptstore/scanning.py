"""Scanning a directory that is to be pushed."""

from __future__ import annotations

import errno
import json
import os
import re
import stat as stat_module
from dataclasses import dataclass, field

from ckptstore.backends.localfile import is_on_nfs
from ckptstore.errors import (
    ConflictError,
    NotFoundError,
    UsageError,
    printable,
    translate_os_errors,
)
from ckptstore.layout import check_new_path, is_silly
from ckptstore.transfer import SourceIdentity


@dataclass(frozen=True)
class ScannedFile:
    """A file of the source.

    Attributes:
        path: Its path in the checkpoint.
        real: Where its bytes are, all symbolic links resolved.
        identity: What it was when it was scanned.
        executable: Whether its owner may execute it.
    """

    path: str
    real: str
    identity: SourceIdentity
    executable: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return self.identity.size

    def check_unchanged(self) -> None:
        """Raise :class:`SourceChangedError` when it is not what was scanned."""
        self.identity.check(self.real)


@dataclass
class Scan:
    """What a directory holds.

    Attributes:
        root: The directory.
        files: Its files, sorted by path.
        empty_directories: Directories in it that hold nothing, sorted.
    """

    root: str
    files: list[ScannedFile] = field(default_factory=list)
    empty_directories: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(f.size for f in self.files)


def scan(directory: str | os.PathLike[str]) -> Scan:
    """Everything in ``directory`` that a push stores.

    A symbolic link inside the directory stands for what it points to, if that is inside too. What
    NFS keeps of a file that was removed while it was open (``.nfs…``) is left out.

    Raises:
        NotFoundError: there is no such directory.
        ConflictError: symbolic links lead outside, nowhere or in circles; the message names them.
        UsageError: a name cannot be stored, or something is neither file nor directory.
    """
    if not os.fspath(directory):
        raise UsageError("the source directory is an empty text")
    root = os.path.realpath(directory)
    if not os.path.isdir(root):
        what = "is not a directory" if os.path.exists(root) else "does not exist"
        raise NotFoundError(f"the source {printable(os.fspath(directory))} {what}")
    found = Scan(root)
    bad_links: list[str] = []
    _Walk(root, found, bad_links).directory(root, "", (root,))
    if bad_links:
        shown = "; ".join(bad_links[:10]) + ("; …" if len(bad_links) > 10 else "")
        raise ConflictError(
            f"symbolic links that cannot be stored: {shown}",
            hint="replace them by what they point to, or push another directory",
        )
    found.files.sort(key=lambda f: f.path.encode())
    found.empty_directories.sort(key=str.encode)
    return found


_STEP_NAME = re.compile(r"(?:.*[_-])?(?:global_step|step|checkpoint|iter)[_-]?(\d{1,15})")


def step_of(source: Scan) -> int:
    """The step that a directory says it is, for a push without one.

    Read from ``global_step`` or ``step`` in ``trainer_state.json``, or from a directory name such
    as ``global_step_500``, ``checkpoint-500`` or ``step-500``.

    Raises:
        UsageError: it does not say, or says two things.
    """
    said = said_step(source)
    if said is None:
        raise _unknown_step(source, "does not say")
    return said


def said_step(source: Scan) -> int | None:
    """The same, and ``None`` when the directory does not say.

    Raises:
        UsageError: it says two things.
    """
    said = {step for step in (_step_in_state(source), _step_in_name(source)) if step is not None}
    if len(said) > 1:
        raise _unknown_step(source, f"says both {' and '.join(map(str, sorted(said)))}")
    return said.pop() if said else None


def _unknown_step(source: Scan, problem: str) -> UsageError:
    return UsageError(
        f"{printable(source.root)} {problem} which step it is", hint="give the step: RUN@STEP"
    )


def _step_in_state(source: Scan) -> int | None:
    state = next((f for f in source.files if f.path == "trainer_state.json"), None)
    if state is None or state.size > 64 * 1024 * 1024:
        return None
    try:
        with open(state.real, "rb") as f:
            content = json.load(f)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    step = content.get("global_step", content.get("step"))
    return step if type(step) is int and step >= 0 else None


def _step_in_name(source: Scan) -> int | None:
    match = _STEP_NAME.fullmatch(os.path.basename(source.root))
    return int(match[1]) if match is not None else None


class _Walk:
    def __init__(self, root: str, found: Scan, bad_links: list[str]) -> None:
        self._root = root
        self._found = found
        self._bad_links = bad_links
        self._on_nfs = is_on_nfs(root)

    def directory(self, real: str, prefix: str, ancestors: tuple[str, ...]) -> None:
        with translate_os_errors(real), os.scandir(real) as entries:
            listed = sorted((e for e in entries if not is_silly(e.name)), key=lambda e: e.name)
        if not listed and prefix:
            self._found.empty_directories.append(prefix.rstrip("/"))
        for entry in listed:
            path = prefix + entry.name
            check_new_path(path)
            if entry.is_symlink():
                self._link(path, entry.path, ancestors)
            elif entry.is_dir(follow_symlinks=False):
                self.directory(entry.path, f"{path}/", (*ancestors, entry.path))
            else:
                with translate_os_errors(entry.path):
                    self._file(path, entry.path, entry.stat(follow_symlinks=False))

    def _link(self, path: str, place: str, ancestors: tuple[str, ...]) -> None:
        target = os.readlink(place)
        shown = f"{printable(path)} -> {printable(target)}"
        try:
            real = os.path.realpath(place, strict=True)
        except OSError as error:
            circular = error.errno == errno.ELOOP
            self._bad_links.append(f"{shown} ({'circular' if circular else 'dangling'})")
            return
        if real != self._root and not real.startswith(f"{self._root}/"):
            self._bad_links.append(f"{shown} (outside)")
        elif real in ancestors:
            self._bad_links.append(f"{shown} (circular)")
        elif os.path.isdir(real):
            self.directory(real, f"{path}/", (*ancestors, real))
        else:
            with translate_os_errors(place):
                self._file(path, real, os.stat(real))

    def _file(self, path: str, real: str, status: os.stat_result) -> None:
        if not stat_module.S_ISREG(status.st_mode):
            raise UsageError(
                f"{printable(path)} is neither a file nor a directory and cannot be stored"
            )
        executable = bool(status.st_mode & 0o100)
        identity = SourceIdentity.now(real) if self._on_nfs else SourceIdentity.of(status)
        self._found.files.append(ScannedFile(path, real, identity, executable))
