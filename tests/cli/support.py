"""What the tests of the command line share: running it, and making stores of every kind."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from typer.testing import CliRunner

from ckptstore import document
from ckptstore.hashing import block_digest
from ckptstore.layout import Name
from ckptstore.manifest import FORMAT, FileEntry, Manifest, content_of
from ckptstore.records import Commit, ManifestPin, Marker, Writer
from cli.main import app

CKPT = Path(sys.executable).parent / "ckpt"
"""The installed command."""

HAZARDS = ("\x1b", "\x9b", "\x07", "\u202e")
"""What may never reach a terminal raw: escapes, in seven bits and in eight, and hidden order."""

STRICT = {"PYTHONIOENCODING": "utf-8:strict"}
"""Streams as in a UTF-8 locale; in the C locale Python prints even what is no text."""


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on stdout."""
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Both outputs, without the line breaks and frames that a terminal's width puts in."""
        return " ".join((self.out + self.err).replace("│", " ").split())

    def ok(self) -> Ran:
        """Itself, when the command succeeded."""
        assert self.code == 0, self
        return self

    def failed(self, code: int, *says: str) -> Ran:
        """Itself, when it failed with ``code``, in a sentence that says all of ``says``."""
        assert "Traceback" not in self.err, self.err
        assert self.code == code, self
        assert self.err.strip(), "an error must say what is wrong"
        for text in says:
            assert text in self.err, self.err
        return self


def ckpt(*args: str | Path, env: Mapping[str, str] | None = None) -> Ran:
    """Run a command in this process."""
    result = CliRunner().invoke(app, [str(a) for a in args], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def ckpt_process(*args: str | Path, env: Mapping[str, str] | None = None, **how: Any) -> Ran:
    """Run the installed command as a process of its own."""
    done = subprocess.run(
        [str(CKPT), *map(str, args)],
        capture_output="stdout" not in how,
        stderr=subprocess.PIPE if "stdout" in how else None,
        text=True,
        errors="surrogateescape",
        timeout=60,
        env={**os.environ, **(env or {})},
        check=False,
        **how,
    )
    return Ran(done.returncode, done.stdout or "", done.stderr)


def start(*args: str | Path, **how: Any) -> subprocess.Popen[str]:
    """Start the installed command."""
    return subprocess.Popen(
        [str(CKPT), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


@dataclass(frozen=True)
class OnTerminal:
    """What a command showed on a terminal."""

    code: int
    out: str
    err: str


def ckpt_on_terminal(
    *args: str | Path,
    answer: str = "",
    program: Sequence[str] = (str(CKPT),),
    env: Mapping[str, str] | None = None,
) -> OnTerminal:
    """Run the installed command with stdin and stdout on one pseudo-terminal, stderr on another."""
    ends = [pty.openpty(), pty.openpty()]
    process = subprocess.Popen(
        [*program, *map(str, args)],
        stdin=ends[0][1],
        stdout=ends[0][1],
        stderr=ends[1][1],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", **(env or {})},
        start_new_session=True,
    )
    for _, slave in ends:
        os.close(slave)
    if answer:
        os.write(ends[0][0], answer.encode())
    shown = [bytearray(), bytearray()]
    readers = [
        threading.Thread(target=_drain, args=(master, into))
        for (master, _), into in zip(ends, shown, strict=True)
    ]
    for reader in readers:
        reader.start()
    code = process.wait(60)
    for reader in readers:
        reader.join(20)
    for master, _ in ends:
        os.close(master)
    out, err = (bytes(s).decode("utf-8", "replace").replace("\r\n", "\n") for s in shown)
    return OnTerminal(code, out, err)


def _drain(fd: int, into: bytearray) -> None:
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:  # EIO: the other end is closed
            return
        if not data:
            return
        into.extend(data)


def read_terminal(fd: int, until: Callable[[str], bool], seconds: float = 10.0) -> str:
    """What comes from a pseudo-terminal until it is enough, or nothing came for a while."""
    shown = b""
    while not until(shown.decode("utf-8", "replace")):
        if not select.select([fd], [], [], seconds)[0]:
            break
        try:
            shown += os.read(fd, 65536)
        except OSError:
            break
    return shown.decode("utf-8", "replace")


def fill(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write files into a directory."""
    for path, data in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def names_of(store: Path, run: str = "gsm8k") -> list[str]:
    """The names that have a record, in order of saving."""
    commits = store / run / "commits"
    return sorted(p.name[:-5] for p in commits.iterdir()) if commits.is_dir() else []


def record_of(store: Path, run: str = "gsm8k", index: int = -1) -> Path:
    """A record's file."""
    return store / run / "commits" / f"{names_of(store, run)[index]}.json"


def directory_of(store: Path, run: str = "gsm8k", index: int = -1) -> Path:
    """A checkpoint's directory."""
    return store / run / names_of(store, run)[index]


def overwrite(path: Path, data: bytes) -> None:
    """Replace a stored file behind the store's back, this one only: it may be a link to others."""
    path.unlink()
    path.write_bytes(data)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a stored file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    overwrite(path, bytes(data))


WRITER = Writer(id="abcdefgh", host="elsewhere", pid=1, version="0")


def craft(
    root: Path,
    paths: Iterable[str] = ("weights.bin",),
    *,
    run: str = "gsm8k",
    name: Name | None = None,
    data: bytes = b"some bytes\n",
    manifest_bytes: bytes | None = None,
    metadata: dict[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Name:
    """A store by another hand: one checkpoint, whose digests all match whatever it claims.

    Args:
        root: The store; its marker is made when it is missing.
        paths: What the manifest names, in this order, each with ``data``.
        run, name: Which checkpoint.
        data: The bytes of each file; those whose path stays inside are written.
        manifest_bytes: The manifest, when it shall be something else.
        metadata: The manifest's.
        record: Fields of the record that shall differ.
    """
    name = name or Name(1, "hostilex", 500)
    root.mkdir(parents=True, exist_ok=True)
    marker = root / "CKPTSTORE.json"
    if not marker.exists():
        body = Marker(format=FORMAT, store="abcdefghijklmnop", created="2026-01-01T00:00:00Z")
        marker.write_bytes(document.encode(body))
    blocks = (block_digest(data),) if data else ()
    files = tuple(FileEntry.build(path, len(data), blocks) for path in paths)
    manifest = Manifest(
        format=FORMAT,
        run=run,
        name=str(name),
        step=name.step,
        block_size=16 * 1024 * 1024,
        files=files,
        metadata=metadata or {},
    )
    encoded = manifest.encode() if manifest_bytes is None else manifest_bytes
    directory = root / run / str(name)
    directory.mkdir(parents=True)
    (directory / "MANIFEST.json").write_bytes(encoded)
    for path in paths:
        if not path.startswith("/") and ".." not in path.split("/"):
            fill(directory, {path: data})
    commit = Commit(
        format=FORMAT,
        name=str(name),
        run=run,
        step=name.step,
        seq=name.seq,
        store="abcdefghijklmnop",
        manifest=ManifestPin(size=len(encoded), digest=block_digest(encoded)),
        content=content_of(files, ()),
        size=sum(f.size for f in files),
        files=len(files),
        created="2026-01-01T00:00:00.000Z",
        writer=WRITER,
    )
    commit = msgspec.structs.replace(commit, **(record or {}))
    commits = root / run / "commits"
    commits.mkdir(exist_ok=True)
    (commits / f"{name}.json").write_bytes(document.encode(commit))
    return name
