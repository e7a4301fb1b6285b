"""What the field reports share: small stores, and storage that goes wrong in a chosen way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ckptstore.backends.local import LocalBackend
from ckptstore.layout import Name, RunKeys
from ckptstore.reading import Checkpoint
from ckptstore.store import Store, open_store

CKPT = Path(sys.executable).parent / "ckpt"

RUN = "gsm8k"


def save(store: Store, step: int, files: Mapping[str, bytes], run: str = RUN) -> Checkpoint:
    """Save files of one's own as a checkpoint."""
    with store.save(run, step) as under_way:
        for path, data in files.items():
            under_way.add_bytes(path, data)
    return store.get(run, step=step)


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
        if p.is_file() and not p.is_symlink()
    }


def place_of(checkpoint: Checkpoint) -> Path:
    """A checkpoint's directory."""
    assert checkpoint.path is not None
    return Path(checkpoint.path)


def stored(path: Path, data: bytes) -> None:
    """Replace a stored file behind the store's back, this one only."""
    path.unlink()
    path.write_bytes(data)


def record_path(root: Path, name: Name, run: str = RUN) -> Path:
    """Where a record is."""
    return root / RunKeys(run).record(name)


def steps(root: Path, run: str = RUN) -> list[int]:
    """The steps that have a commit, in order of saving; seen by a store that is opened anew."""
    store = open_store(str(root))
    if not store.exists or run not in store.runs():
        return []
    return [row.step for row in store.rows(run)]


def start(*args: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the installed command."""
    return subprocess.Popen(
        [str(CKPT), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def ckpt(*args: str | Path) -> tuple[int, str, str]:
    """Run the installed command: exit code, stdout, stderr."""
    process = start(*args)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


class Faulty(LocalBackend):
    """A disk; tests replace one of its operations by one that goes wrong."""

    def store(self) -> Store:
        """A store on it."""
        return Store(self)
