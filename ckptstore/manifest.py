"""The manifest: which files a checkpoint has, and the digest of every block of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec

from ckptstore.errors import IntegrityError, UsageError, printable
from ckptstore.hashing import BLOCK_SIZE, block_count, block_digest, content_digest, file_digest
from ckptstore.layout import Name, check_stored_path

FORMAT = 1
"""The format that this version writes, and the newest that it reads."""

_DIGEST = re.compile("[0-9a-f]{64}")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file.

    Attributes:
        path: Relative, normalised path inside the checkpoint.
        size: Bytes.
        digest: The file's digest (:func:`ckptstore.hashing.file_digest`).
        blocks: BLAKE3 of each 16 MiB block, in order.
        exec: Whether the owner may execute it.
        codec: How the bytes are stored; only ``none`` in format 1.
        crc64nvme: CRC-64/NVME of the whole file as 16 hexadecimal digits, where it is known.
    """

    path: str
    size: int
    digest: str
    blocks: tuple[str, ...] = ()
    exec: bool = False
    codec: str = "none"
    crc64nvme: str | None = None

    @classmethod
    def build(
        cls,
        path: str,
        size: int,
        blocks: Iterable[str],
        *,
        executable: bool = False,
        crc64nvme: str | None = None,
    ) -> FileEntry:
        """The entry of a file with these block digests."""
        blocks = tuple(blocks)
        return cls(
            path=path,
            size=size,
            digest=file_digest(size, blocks),
            blocks=blocks,
            exec=executable,
            crc64nvme=crc64nvme,
        )


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint must be.

    Attributes:
        format: The format's number.
        run, name, step: Which checkpoint this is.
        block_size: Bytes in a block; 16 MiB in format 1.
        files: Sorted by the UTF-8 bytes of their paths.
        empty_directories: Directories that hold nothing, sorted likewise.
        metadata: What the writer wanted to keep with it: any JSON object.
    """

    format: int
    run: str
    name: str
    step: int
    block_size: int
    files: tuple[FileEntry, ...]
    empty_directories: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}

    @classmethod
    def build(
        cls,
        run: str,
        name: Name,
        files: Iterable[FileEntry],
        empty_directories: Iterable[str] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Manifest:
        """A sorted, checked manifest.

        Raises:
            UsageError: two files have one path, or a file's path is another's directory.
        """
        manifest = cls(
            format=FORMAT,
            run=run,
            name=str(name),
            step=name.step,
            block_size=BLOCK_SIZE,
            files=tuple(sorted(files, key=lambda entry: entry.path.encode())),
            empty_directories=tuple(sorted(empty_directories, key=str.encode)),
            metadata=metadata or {},
        )
        problem = _tree_problem(manifest)
        if problem is not None:
            raise UsageError(f"the checkpoint cannot be stored: {problem}")
        return manifest

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(entry.size for entry in self.files)

    @property
    def content(self) -> str:
        """The content digest."""
        return content_of(self.files, self.empty_directories)

    def encode(self) -> bytes:
        """The bytes of ``MANIFEST.json``: one line of JSON."""
        return msgspec.json.encode(self) + b"\n"


def content_of(files: Iterable[FileEntry], empty_directories: Iterable[str]) -> str:
    """The content digest of these files (in the manifest's order)."""
    return content_digest(((e.path, e.size, e.digest, e.exec) for e in files), empty_directories)


class _Owner(msgspec.Struct):
    run: str
    name: str


def owner_of(data: bytes) -> tuple[str, str] | None:
    """Run and name that a manifest says it belongs to, unchecked; ``None`` when it says nothing."""
    try:
        owner = msgspec.json.decode(data, type=_Owner)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return owner.run, owner.name


_decoder = msgspec.json.Decoder(Manifest)


def decode_manifest(data: bytes, digest: str, what: str) -> Manifest:
    """The manifest in ``data``, checked against the digest that the record pins and in itself.

    Args:
        data: The bytes of ``MANIFEST.json``.
        digest: BLAKE3 of these bytes, from the record.
        what: Which manifest, for messages.

    Raises:
        IntegrityError: the bytes differ from what was committed, or name paths outside the
            checkpoint, a path twice, or blocks that do not fit a size.
    """
    if block_digest(data) != digest:
        raise IntegrityError(f"{what} is damaged: its digest is not the one in the record")
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{what} cannot be understood: {error}") from error
    if manifest.format != FORMAT or manifest.block_size != BLOCK_SIZE:
        raise IntegrityError(
            f"{what} has format {manifest.format} with blocks of {manifest.block_size} bytes; "
            f"this version reads format {FORMAT} with blocks of {BLOCK_SIZE}"
        )
    for entry in manifest.files:
        check_stored_path(entry.path, what)
        problem = entry_problem(entry)
        if problem is not None:
            raise IntegrityError(f"{what}: {printable(entry.path)}: {problem}")
    for path in manifest.empty_directories:
        check_stored_path(path, what)
    problem = _order_problem(manifest) or _tree_problem(manifest)
    if problem is not None:
        raise IntegrityError(f"{what}: {problem}")
    return manifest


def is_digest(text: str) -> bool:
    """Whether ``text`` is 64 lowercase hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def entry_problem(entry: FileEntry) -> str | None:
    """Why an entry cannot be true in itself, or ``None``."""
    if entry.size < 0:
        return f"a size of {entry.size} bytes"
    if entry.codec != "none":
        return f"the codec {printable(entry.codec)!r} is not known"
    if len(entry.blocks) != block_count(entry.size):
        return f"{len(entry.blocks)} block digests for {entry.size} bytes"
    if not all(map(is_digest, entry.blocks)):
        return "a block digest is not 64 hexadecimal digits"
    if entry.digest != file_digest(entry.size, entry.blocks):
        return "the file's digest does not follow from its blocks"
    return None


def _order_problem(manifest: Manifest) -> str | None:
    for paths in ([e.path for e in manifest.files], list(manifest.empty_directories)):
        keys = [path.encode() for path in paths]
        if any(a > b for a, b in pairwise(keys)):
            return "the paths are not sorted"
    return None


def _tree_problem(manifest: Manifest) -> str | None:
    """Why these paths cannot all lie in one directory."""
    files: set[str] = set()
    for entry in manifest.files:
        if entry.path in files:
            return f"{printable(entry.path)!r} is named twice"
        files.add(entry.path)
    directories: set[str] = set()
    for path in [*files, *manifest.empty_directories]:
        parent = path.rpartition("/")[0]
        while parent and parent not in directories:
            directories.add(parent)
            parent = parent.rpartition("/")[0]
    for path in directories:
        if path in files:
            return f"{printable(path)!r} is a file and a directory"
    seen: set[str] = set()
    for path in manifest.empty_directories:
        if path in files or path in directories or path in seen:
            return f"the empty directory {printable(path)!r} is not empty or is named twice"
        seen.add(path)
    return None
