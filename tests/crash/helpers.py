"""Trees to push, and what must hold of a store at any time."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import ckptstore
from ckptstore.layout import TEMPORARY_PREFIX, Name, is_temporary
from ckptstore.leases import STALE_SECONDS
from ckptstore.maintenance import gc, verify
from ckptstore.pulling import pull
from ckptstore.scanning import scan
from ckptstore.store import Store


def make_tree(root: Path, seed: int, sizes: dict[str, int] | None = None) -> Path:
    """A directory with a few files of random bytes."""
    rng = random.Random(seed)
    for path, size in (sizes or {"actor/w.bin": 300_000, "cfg.json": 40, "empty": 0}).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(rng.randbytes(size))
    (root / "nothing").mkdir(exist_ok=True)
    return root


def check_store(uri: Path | str) -> list[str]:
    """Every commit is whole, to the last byte. Returns their refs."""
    store = ckptstore.open_store(str(uri))
    if not store.exists:
        return []
    rows = [row for row in store.rows() if row.state != "unfinished"]
    assert all(row.state == "ok" for row in rows), rows
    for row in rows:
        result = verify(store.get(row.run, name=row.name), deep=True)
        assert result.ok, result
    return [row.ref for row in rows]


def arrived_whole(uri: Path, run: str, tree: Path) -> set[str]:
    """The paths of the tree that lie complete under their names in any directory of the run."""
    wanted = {f.path: f for f in scan(tree).files}
    found = set()
    for directory in (uri / run).iterdir() if (uri / run).is_dir() else ():
        if Name.parse(directory.name) is None:
            continue
        for path, file in wanted.items():
            stored = directory / path
            if stored.is_file() and stored.read_bytes() == Path(file.real).read_bytes():
                found.add(path)
    return found


def collect(uri: Path) -> None:
    """gc with no grace, after the temporaries of killed processes have grown old."""
    then = time.time() - 2 * STALE_SECONDS
    for path in uri.rglob(f"{TEMPORARY_PREFIX}*"):
        os.utime(path, (then, then), follow_symlinks=False)
    gc(ckptstore.open_store(str(uri)), grace=0)


def check_clean(uri: Path) -> None:
    """After gc nothing is left but commits, voids and marks: no directory without a commit, no
    temporary, no lease."""
    store = ckptstore.open_store(str(uri))
    for run in store.runs():
        committed = {row.name for row in store.rows(run)}
        for path in (uri / run).rglob("*"):
            assert not is_temporary(path.name), path
        directories = {d.name for d in (uri / run).iterdir() if Name.parse(d.name)}
        assert directories == committed
        leases = uri / run / "leases"
        assert not leases.exists() or not list(leases.iterdir())
    assert not [p for p in uri.iterdir() if is_temporary(p.name)]


def check_pull(store: Store, run: str, step: int, tree: Path, dest: Path) -> None:
    """What comes back is what was pushed."""
    shutil.rmtree(dest, ignore_errors=True)
    pull(store.get(run, step=step), dest)
    pushed = {f.path: Path(f.real).read_bytes() for f in scan(tree).files}
    pulled = {f.path: Path(f.real).read_bytes() for f in scan(dest).files}
    assert pulled == pushed
    assert scan(dest).empty_directories == scan(tree).empty_directories
