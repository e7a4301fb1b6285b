"""What a file system is, and what it can do: for ``ckpt doctor``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from statistics import median
from typing import NamedTuple

from ckptstore.backends.findings import Finding, attempt
from ckptstore.backends.localfile import CREATE, NO_LINKS, sync_directory
from ckptstore.durations import spell_moment
from ckptstore.errors import printable, translate_os_errors

_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs",
    "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
_NFS = {"nfs", "nfs4"}
_MOUNTS = "/proc/self/mountinfo"

_LEAST_BYTES = 10 * 10**9
_LEAST_NAMES = 10_000
_FEW = 0.05
_FSYNCS = 5


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        point: Where it is mounted.
        kind: Its type: ``ext4``, ``nfs4``, …
        source: The device or the server's export.
        options: Of the mount and of the file system.
    """

    point: str
    kind: str
    source: str
    options: frozenset[str]


def mount_of(path: str, table: str) -> Mount | None:
    """The mount that ``path``, which is absolute and without symbolic links, lies in.

    Args:
        path: The path.
        table: The lines of ``/proc/self/mountinfo``; a later mount hides an earlier one.
    """
    best: Mount | None = None
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 6 or len(right) < 2:
            continue
        point = _unescape(left[4])
        below = path == point or path.startswith(point.rstrip("/") + "/")
        if below and (best is None or len(point) >= len(best.point)):
            options = frozenset((*left[5].split(","), *(right[2].split(",") if right[2:] else ())))
            best = Mount(point, right[0], _unescape(right[1]), options)
    return best


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def describe(root: str) -> Iterator[Finding]:
    """The place, and the room in it."""
    existing = root
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    yield _place(root, existing)
    yield attempt("space", lambda: _space(existing))


def _place(root: str, existing: str) -> Finding:
    mount = None
    with suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as table:
        mount = mount_of(os.path.realpath(existing), table.read())
    if mount is None:
        where = "a file system of unknown type"
    else:
        where = f"{mount.kind} at {printable(mount.point)}, from {printable(mount.source)}"
    if mount is not None and (mount.kind in _NETWORK or mount.kind.startswith("fuse.")):
        where += ", a network mount" if mount.kind in _NETWORK else ", in user space"
    if mount is not None and mount.kind in _MEMORY:
        hint = "what is kept here is gone when the machine or the container stops"
        return Finding.warning("place", f"{where}: it is memory", hint)
    if mount is not None and mount.kind in ("overlay", "aufs"):
        hint = "if it is a container's own layer it goes with the container: mount a volume"
        return Finding.warning("place", where, hint)
    if mount is not None and mount.kind in _NFS and mount.options & {"soft", "softerr"}:
        hint = "mount it hard: otherwise a server that is away for a while is an I/O error"
        return Finding.warning("place", f"{where}, mounted soft", hint)
    if existing != root and existing != os.path.dirname(root):
        return Finding.warning(
            "place",
            f"{printable(os.path.dirname(root))} does not exist yet; it would be made in {where}",
            "is something not mounted, or is the path misspelt?",
        )
    if existing != root:
        where += "; the directory is yet to be made"
    return Finding.ok("place", where)


def free_space(path: str) -> int | None:
    """Bytes that a user may still store; ``None`` where the file system does not say."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _space(path: str) -> Finding:
    with translate_os_errors(path):
        status = os.statvfs(path)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    names, free_names = status.f_files, status.f_favail
    detail = f"{free / 1e9:.0f} GB of {size / 1e9:.0f} GB are free"
    numbers = {"bytes": size, "free_bytes": free}
    few_names = False
    if names:
        detail += f", and {free_names:,} of {names:,} inodes"
        numbers |= {"inodes": names, "free_inodes": free_names}
        few_names = free_names < _LEAST_NAMES
    if free < max(_LEAST_BYTES, min(_FEW * size, 10 * _LEAST_BYTES)):
        hint = "a checkpoint with its optimizer may be larger: free some, or keep fewer"
        return Finding.warning("space", detail, hint, **numbers)
    if few_names:
        return Finding.warning("space", detail, "each stored file takes an inode", **numbers)
    return Finding.ok("space", detail, **numbers)


def examine(scratch: str) -> Iterator[Finding]:
    """Links, renames and syncs, tried out in a directory."""
    yield attempt("links", lambda: _links(scratch))
    yield attempt("rename", lambda: _rename(scratch))
    yield attempt("fsync", lambda: _fsync(scratch))


def _links(scratch: str) -> Finding:
    one, two, link = (f"{scratch}/link-{name}" for name in ("one", "two", "itself"))
    with translate_os_errors(scratch):
        _create(one, b"one")
        _create(two, b"two")
        try:
            os.link(one, link)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return Finding.warning(
                "links",
                f"there are no hard links here: {os.strerror(error.errno)}",
                "each checkpoint is stored whole; a record that a power cut has torn is found by "
                "its digest, and that checkpoint is lost",
            )
        try:
            os.link(two, link)
        except FileExistsError:
            pass
        else:
            return Finding.failed("links", "a link replaced a file", "do not keep any here")
        if _content(link) != b"one" or os.lstat(one).st_nlink != 2:
            return Finding.failed("links", "a linked file is not the one it was linked to")
    return Finding.ok("links", "hard links work, and never replace")


def _rename(scratch: str) -> Finding:
    old, new = f"{scratch}/renamed", f"{scratch}/renamed-from"
    with translate_os_errors(scratch):
        _create(old, b"old")
        _create(new, b"new")
        os.rename(new, old)
        if _content(old) != b"new" or os.path.lexists(new):
            return Finding.failed("rename", "a rename over a file did not replace it")
    return Finding.ok("rename", "a rename over a file replaces it")


def _fsync(scratch: str) -> Finding:
    times = []
    with translate_os_errors(scratch):
        for turn in range(_FSYNCS):
            fd = os.open(f"{scratch}/synced-{turn}", CREATE, 0o600)
            try:
                os.write(fd, b"x" * 4096)
                start = time.monotonic()
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_directory(scratch)
            times.append(time.monotonic() - start)
    took = median(times)
    detail = f"files and directories can be synced, in {spell_moment(took)} (median)"
    return Finding.ok("fsync", detail, sync_seconds=round(took, 6))


def _create(path: str, data: bytes) -> None:
    fd = os.open(path, CREATE, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _content(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()
