"""The last things that a checkpoint's directory needs before its record may be created."""

from __future__ import annotations

from ckptstore.backends.base import Backend
from ckptstore.catalog import Catalog
from ckptstore.errors import printable
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.layout import Name, RunKeys
from ckptstore.manifest import Manifest


def make_empty_directories(backend: Backend, run: str, name: Name, manifest: Manifest) -> None:
    """Make the directories that hold nothing."""
    for path in manifest.empty_directories:
        backend.make_directory(RunKeys(run).file(name, path))


def write_whole(
    backend: Backend, key: str, data: bytes, *, replace: bool = False, resume: bool = False
) -> None:
    """Write an object, complete and durable, at a key that must be free, or in place of what is.

    Args:
        backend, key, data: What, and where to.
        replace, resume: See :meth:`Backend.open_writer`.

    Raises:
        ConflictError: the key exists.
    """
    writer = backend.open_writer(key, size=len(data), replace=replace, resume=resume)
    try:
        view = memoryview(data)
        for offset in range(0, len(data), BLOCK_SIZE):
            writer.write(offset, view[offset : offset + BLOCK_SIZE])
        writer.finish(len(data))
    finally:
        writer.abort()


def not_arrived(catalog: Catalog, run: str, name: Name, manifest: Manifest) -> str | None:
    """What the storage does not list as the manifest says it must be; ``None`` if all is there."""
    root = RunKeys(run).directory(name)
    listed = {e.key: e.size for e in catalog.backend.list(root, recursive=True)}
    for entry in manifest.files:
        key = f"{root}/{entry.path}"
        size = listed.get(key)
        if size != entry.size:
            size = catalog.size_now(key, size)
        if size != entry.size:
            found = "is not there" if size is None else f"has {size} bytes of {entry.size}"
            return f"{printable(entry.path)} {found}"
    return None


def directories_of(run: str, name: Name, manifest: Manifest) -> list[str]:
    """Every directory whose names the checkpoint depends on, the deepest first."""
    below: set[str] = set()
    for path in [e.path for e in manifest.files] + list(manifest.empty_directories):
        while path := path.rpartition("/")[0]:
            below.add(path)
    root = RunKeys(run).directory(name)
    deepest_first = sorted(below, key=lambda path: (-path.count("/"), path))
    return [*(f"{root}/{path}" for path in deepest_first), root, run, ""]
