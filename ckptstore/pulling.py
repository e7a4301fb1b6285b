"""Pulling: exactly the pushed files, verified, into a directory of this machine.

Files are fetched into a staging directory inside the destination and renamed into place when all
of them are complete, so the destination never holds half a checkpoint under final names. A pull
that was interrupted goes on where it was: whole files and good blocks in the staging directory are
kept, after their digests were checked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat as stat_module
import threading
import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptstore.backends.base import Writer
from ckptstore.backends.localfile import LocalReader, write_all
from ckptstore.errors import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    UsageError,
    printable,
    translate_os_errors,
)
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import STAGING_PREFIX
from ckptstore.manifest import FileEntry
from ckptstore.transfer import Mover, OnMismatch, ProgressCallback, Transfer

if TYPE_CHECKING:
    from ckptstore.reading import Checkpoint


@dataclass(frozen=True)
class PullResult:
    """What a pull did.

    Attributes:
        files, size: How many files and bytes were wanted.
        fetched: Bytes that came from the store; less than ``size`` when a pull was taken up again.
        seconds: How long it took.
    """

    files: int
    size: int
    fetched: int
    seconds: float


def select(
    files: Sequence[FileEntry], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> list[FileEntry]:
    """The files to pull.

    Args:
        files: All files.
        include: Patterns of which a path must match one, if there are any.
        exclude: Patterns of which it must match none.

    In a pattern ``*`` matches any characters, ``/`` too; a path always matches itself.
    """
    return [
        e
        for e in files
        if (not include or any(_matches(e.path, p) for p in include))
        and not any(_matches(e.path, p) for p in exclude)
    ]


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


def pull(
    checkpoint: Checkpoint,
    dest: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> PullResult:
    """Fetch a checkpoint's files into ``dest``.

    Args:
        checkpoint: What to fetch.
        dest: A directory; it is made when it is missing.
        include, exclude: See :func:`select`.
        force: Take a ``dest`` that is not empty: files of the same names are replaced, others stay.
        threads: Blocks in flight.
        progress: Told of every block.
        cancel: Set it to end the pull; what was fetched is kept for the next one.

    Raises:
        NotFoundError: no file matches ``include``.
        ConflictError: ``dest`` is not empty, is not a directory, or another pull works in it.
        IntegrityError: the stored bytes differ from what was committed; ``dest`` has no new file.
    """
    begun = time.monotonic()
    if not os.fspath(dest):
        raise UsageError("the destination is an empty text")
    wanted = select(checkpoint.files, include, exclude)
    if not wanted and (include or exclude):
        raise NotFoundError(f"no file of {checkpoint.ref} matches the patterns")
    empty = checkpoint.manifest.empty_directories if not (include or exclude) else ()
    root = os.path.abspath(dest)
    target = _Target(root, f"{STAGING_PREFIX}{checkpoint.name}", force)
    target.prepare(checkpoint.ref)
    with target.locked():
        target.check(wanted, empty)
        threads = threads or checkpoint.catalog.backend.capabilities.threads
        mover = Mover(threads=threads, progress=progress, cancel=cancel)
        missing = target.still_missing(wanted, mover)
        try:
            moved = mover.run([target.transfer(checkpoint, i, wanted[i]) for i in missing])
        except IntegrityError as error:
            target.remove_staging()
            if error.damage:
                checkpoint.report_damage(error.damage, deep=True)
                raise checkpoint.damaged_error(error.damage) from error
            raise
        target.move_into_place(wanted, empty)
    fetched = sum(m.written for m in moved)
    return PullResult(len(wanted), sum(e.size for e in wanted), fetched, time.monotonic() - begun)


class _Target:
    """The destination, and the staging directory in it."""

    def __init__(self, root: str, staging: str, force: bool) -> None:
        self.root = root
        self.staging = f"{root}/{staging}"
        self.files = f"{self.staging}/files"
        self.parts = f"{self.staging}/parts"
        self.moving = f"{self.staging}/moving"
        self.force = force

    def prepare(self, ref: str) -> None:
        """Make the directories, or refuse a destination that holds something else."""
        if os.path.lexists(self.root) and not os.path.isdir(self.root):
            raise ConflictError(f"{printable(self.root)} is not a directory")
        with translate_os_errors(self.root):
            os.makedirs(self.root, exist_ok=True)
            others = sorted(n for n in os.listdir(self.root) if not n.startswith(STAGING_PREFIX))
            if others and not self.force and not os.path.exists(self.moving):
                raise ConflictError(
                    f"{printable(self.root)} is not empty: it holds {printable(others[0])}",
                    hint=f"pull {ref} into another directory, or replace files of the same names "
                    "with --force",
                )
            for path in (self.staging, self.files, self.parts):
                os.makedirs(path, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second pull of the same checkpoint into the same directory out."""
        with translate_os_errors(self.staging):
            fd = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    f"another pull is at work in {printable(self.root)}", hint="wait for its end"
                ) from None
            yield
        finally:
            os.close(fd)

    def check(self, wanted: Sequence[FileEntry], empty: Sequence[str]) -> None:
        """Refuse, before any byte is fetched, what could not be put in place at the end."""
        self._check_collisions([e.path for e in wanted] + list(empty))
        for path in [*(e.path for e in wanted), *empty]:
            self._check_parents(path)
        for path in empty:
            full = f"{self.root}/{path}"
            if os.path.lexists(full) and (os.path.islink(full) or not os.path.isdir(full)):
                raise ConflictError(f"{printable(full)} is not a directory")
        for entry in wanted:
            full = f"{self.root}/{entry.path}"
            with suppress(FileNotFoundError):
                if stat_module.S_ISDIR(os.lstat(full).st_mode):
                    raise ConflictError(f"{printable(full)} is a directory")

    def _check_parents(self, path: str) -> None:
        """No directory on the way may be a symbolic link: it could lead out of the destination."""
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            parent = "/".join((self.root, *parts[:depth]))
            try:
                mode = os.lstat(parent).st_mode
            except FileNotFoundError:
                return
            if not stat_module.S_ISDIR(mode):
                what = "a symbolic link" if stat_module.S_ISLNK(mode) else "not a directory"
                raise ConflictError(
                    f"{printable(parent)} is {what}, and {printable(path)} must go below it"
                )

    def _check_collisions(self, paths: Sequence[str]) -> None:
        """Refuse names that are one name on this file system (case, Unicode normalisation)."""
        folds = self._folds()
        if not folds:
            return
        seen: dict[str, str] = {}
        for path in paths:
            key = unicodedata.normalize("NFC", path)
            key = key.casefold() if "case" in folds else key
            if key in seen and seen[key] != path:
                raise ConflictError(
                    f"{printable(seen[key])!r} and {printable(path)!r} are one name on the file "
                    f"system of {printable(self.root)}",
                    hint="pull into another file system, or leave one out with --exclude",
                )
            seen[key] = path

    def _folds(self) -> set[str]:
        found = set()
        for kind, made, asked in (("case", "probe", "PROBE"), ("form", "\u00e9", "e\u0301")):
            probe = f"{self.staging}/{made}"
            with translate_os_errors(probe):
                try:
                    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600))
                    if os.path.exists(f"{self.staging}/{asked}"):
                        found.add(kind)
                finally:
                    os.unlink(probe)
        return found

    def _staged(self, entry: FileEntry) -> str:
        return f"{self.files}/{entry.path}"

    def still_missing(self, wanted: Sequence[FileEntry], mover: Mover) -> list[int]:
        """The indices of the files that an earlier, interrupted pull did not complete."""
        found: list[int] = []
        checks: list[Transfer] = []
        moving = os.path.exists(self.moving)
        for index, entry in enumerate(wanted):
            places = [self._staged(entry)] + ([f"{self.root}/{entry.path}"] if moving else [])
            for place in places:
                with suppress(OSError):
                    if os.lstat(place).st_size == entry.size:
                        found.append(index)
                        checks.append(
                            Transfer(
                                str(index),
                                entry.size,
                                open_reader=lambda place=place: LocalReader(place),  # type: ignore[misc]
                                expected=entry,
                            )
                        )
                        break
        complete = {
            int(m.path) for m in mover.run(checks, OnMismatch.STOP) if not m.damage and m.entry
        }
        for index in set(found) - complete:
            with suppress(FileNotFoundError):
                os.unlink(self._staged(wanted[index]))
        return [i for i in range(len(wanted)) if i not in complete]

    def transfer(self, checkpoint: Checkpoint, index: int, entry: FileEntry) -> Transfer:
        """Fetch a file, keeping the good blocks of what an interrupted pull left."""
        part = f"{self.parts}/{index}-{entry.digest[:16]}{'x' if entry.exec else ''}"
        resumable = os.path.exists(part) and os.path.getsize(part) == entry.size
        return checkpoint.transfer(
            entry,
            open_writer=lambda: _StagedFile(part, self._staged(entry), entry),
            partial=(lambda: LocalReader(part)) if resumable else None,
        )

    def move_into_place(self, wanted: Sequence[FileEntry], empty: Sequence[str]) -> None:
        """All files are complete: give them their names and remove the staging directory."""
        with translate_os_errors(self.root):
            with open(self.moving, "w", encoding="ascii"):
                pass
            for path in empty:
                os.makedirs(f"{self.root}/{path}", exist_ok=True)
            for entry in wanted:
                final = f"{self.root}/{entry.path}"
                os.makedirs(os.path.dirname(final), exist_ok=True)
                self._check_parents(entry.path)
                with suppress(FileNotFoundError):  # moved by an earlier pull that was interrupted
                    os.rename(self._staged(entry), final)
        self.remove_staging()

    def remove_staging(self) -> None:
        """Remove the staging directory and what is in it."""
        with translate_os_errors(self.staging):
            shutil.rmtree(self.staging)


class _StagedFile(Writer):
    """A file in the staging directory, of its final size from the start."""

    def __init__(self, part: str, final: str, entry: FileEntry) -> None:
        self._part = part
        self._final = final
        mode = 0o777 if entry.exec else 0o666
        with translate_os_errors(part):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(part, flags, mode)
            os.ftruncate(self._fd, entry.size)

    def write(self, offset: int, data: memoryview) -> None:
        with translate_os_errors(self._part):
            write_all(self._fd, data, offset)

    def skip_zeros(self, offset: int, length: int) -> bool:
        """A hole reads as zeros; what an earlier pull left there is punched out by writing."""
        return length == BLOCK_SIZE and self._is_hole(offset, length)

    def _is_hole(self, offset: int, length: int) -> bool:
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA) >= offset + length
        except OSError:  # ENXIO: nothing but a hole from here on
            return True

    def finish(self, size: int) -> None:
        del size
        with translate_os_errors(self._final):
            os.makedirs(os.path.dirname(self._final), exist_ok=True)
            os.rename(self._part, self._final)
        self.abort()

    def abort(self) -> None:
        """Close it; what is there stays for the next pull."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # first: an interrupt here must not close it twice
            os.close(fd)
