"""What the unit tests share: stores on memory and disk, trees, a clock, and dead savers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings

from ckptstore import document
from ckptstore.backends.local import Dedupe, LocalBackend
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.layout import MARKER, Name, RunKeys
from ckptstore.reading import Checkpoint
from ckptstore.records import Features, Lease
from ckptstore.saving import Save
from ckptstore.store import Store

RUN = "run"

ABC = {"a.txt": b"alpha", "sub/b.bin": b"beta" * 100, "sub/deep/c": b""}


def examples(count: int) -> settings:
    """Settings for a property test: the same examples in every run, however slow the machine."""
    return settings(
        derandomize=True,
        deadline=None,
        max_examples=count,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class Clock:
    """A storage clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def memory_store(clock: Callable[[], float] = time.time) -> Store:
    """A store in a space of its own."""
    return Store(MemoryBackend(Space(), clock=clock))


def file_store(root: Path, dedupe: Dedupe = "link") -> Store:
    """A store on the disk."""
    return Store(LocalBackend(str(root), dedupe=dedupe))


def objects(store: Store) -> dict[str, bytes]:
    """All that a store holds, by key."""
    backend = store.backend
    listed = backend.list("", recursive=True)
    return {e.key: backend.read(e.key, 2**40) for e in listed if e.size >= 0}


def save(
    store: Store,
    step: int = 1,
    files: Mapping[str, bytes] | None = None,
    *,
    run: str = RUN,
    **how: Any,
) -> Checkpoint:
    """Save ``files`` and give back the checkpoint."""
    with store.save(run, step, **how) as one:
        for path, data in (ABC if files is None else files).items():
            one.add_bytes(path, data)
    return store.get(run, name=str(one.name))


def attempt(one: Save, *steps: Callable[[Save], object]) -> None:
    """Take steps within the block of a save."""
    with one:
        for step in steps:
            step(one)


def raising(error: BaseException) -> Callable[[object], None]:
    """A step that raises."""

    def step(_: object) -> None:
        raise error

    return step


def failed_save(store: Store, step: int = 1) -> Name:
    """A save that ends by an exception."""
    one = store.save(RUN, step)
    one.add_bytes("half.bin", b"half")
    one.abort(RuntimeError("died"))
    return one.name


def stop(one: Save) -> None:
    """End a save's life in this process without any of the cleaning that an exception causes."""
    one._lease.stop()
    one._ended = True


def killed_save(store: Store, step: int = 1, files: Mapping[str, bytes] | None = None) -> Name:
    """A save whose process was killed: its lease names a process that does not run."""
    one = store.save(RUN, step)
    for path, data in (ABC if files is None else files).items():
        one.add_bytes(path, data)
    stop(one)
    lease_key = RunKeys(RUN).lease(one.name, one.writer.id)
    lease = document.Decoder[Lease](Lease).decode(store.backend.read(lease_key, 2**30), "lease")
    gone = msgspec.structs.replace(lease.process, started=1)
    body = msgspec.structs.replace(lease, process=gone)
    store.backend.put(lease_key, document.encode(body))
    return one.name


def write_tree(
    root: Path,
    files: Mapping[str, bytes],
    *,
    executable: Iterable[str] = (),
    empty: Iterable[str] = (),
) -> Path:
    """Make a directory that holds these files."""
    root.mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    for path in executable:
        (root / path).chmod(0o755)
    for path in empty:
        (root / path).mkdir(parents=True)
    return root


def read_tree(root: Path) -> dict[str, bytes]:
    """The files below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def content(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The verified content of a checkpoint."""
    return {e.path: checkpoint.read_bytes(e.path) for e in checkpoint.files}


def stored_path(checkpoint: Checkpoint, path: str) -> Path:
    """Where a file of a checkpoint lies on the disk."""
    found = checkpoint.catalog.backend.local_path(checkpoint.key(path))
    assert found is not None
    return Path(found)


def flip(path: Path, offset: int = 0) -> None:
    """Flip a bit of a stored file in place, as a failing disk would."""
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 1]))


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit flipped."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def age(store: Store, key: str, seconds: float) -> None:
    """Make a key of a file store look as if it was written ``seconds`` ago."""
    path = store.backend.local_path(key)
    assert path is not None
    then = time.time() - seconds
    os.utime(path, (then, then))


def rewrite_marker(store: Store, **changes: Any) -> None:
    """Change the marker of a store, as another version of the program would write it."""
    body = msgspec.structs.replace(store.catalog.marker(), **changes)
    store.backend.put(MARKER, document.encode(body))


def requiring(**features: tuple[str, ...]) -> Features:
    """Features for a marker."""
    return Features(**features)


def again(store: Store) -> Store:
    """The same store opened anew, as another process would."""
    return Store(store.backend)


def rewrite_record(checkpoint: Checkpoint, **changes: Any) -> None:
    """Replace a record by one with other fields and a right digest."""
    key = RunKeys(checkpoint.run).record(checkpoint.name)
    body = msgspec.structs.replace(checkpoint.commit, **changes)
    checkpoint.catalog.backend.put(key, document.encode(body))


def reasons(actions: Iterable[Any]) -> dict[str, str]:
    """Why gc kept or removed each key."""
    return {a.key: a.reason for a in actions}
