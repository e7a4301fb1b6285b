"""The examination: all checks in their order, and nothing left behind."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, suppress

from ckptstore.backends.base import Backend
from ckptstore.backends.findings import Finding, attempt
from ckptstore.catalog import Catalog
from ckptstore.errors import AccessDeniedError, CkptError, ConflictError, TemporaryError, printable
from ckptstore.ids import default_ids, random_letters
from ckptstore.layout import TEMPORARY_PREFIX
from ckptstore.maintenance.doctor import data, keys, names, times
from ckptstore.maintenance.doctor.bench import Bench

SCRATCH_PREFIX = f"{TEMPORARY_PREFIX}doctor-"
"""What the directory of the trials is called; gc collects what a killed examination left of it."""

DEFAULT_SIZE = 64 * 1024**2
PATIENCE = 5.0

Progress = Callable[[str], None]

_TRIALS: tuple[tuple[str, Callable[[Bench], Finding]], ...] = (
    ("write", keys.write),
    ("list", keys.listing),
    ("exclusive-create", keys.exclusive_create),
    ("remove-if", keys.remove_if),
    ("two-parts", data.two_parts),
    ("abort", data.abort),
    ("copy", data.copy),
    ("names", names.names),
    ("clock", times.clock),
    ("latency", times.latency),
    ("upload", times.upload),
    ("download", times.download),
)


def examine(
    make: Callable[[], Backend],
    *,
    size: int = DEFAULT_SIZE,
    patience: float = PATIENCE,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Generator[Finding, None, None]:
    """Try out a place, and tell of each check when it is done.

    Everything is written below one directory with a name of its own, which is removed at the end,
    as are directories above it that did not exist. What a store there holds is neither listed nor
    touched. An error of the storage is a finding; when nothing can be reached or written any more
    the findings end there.

    Args:
        make: Makes a client of the place, another one each time it is called.
        size: Bytes of the speed test.
        patience: Seconds to wait for what a listing must show.
        dry_run: Only look, and write nothing.
        progress: Called with the name of the check that begins.

    Raises:
        UsageError: the client cannot be made so.
    """
    tell = progress or (lambda _: None)
    with ExitStack() as open_clients:
        here = make()
        open_clients.callback(here.close)
        tell("place")
        found = _reach(here)
        if found is not None:
            yield found
            return
        described = list(_guarded("place", here.describe()))
        if not any(finding.check == "place" for finding in described):
            yield Finding.ok("place", here.uri)
        yield from described
        tell("store")
        yield attempt("store", lambda: _store(here))
        if dry_run:
            yield from (Finding.skipped(check, "a dry run writes nothing") for check, _ in _TRIALS)
            return
        other = make()
        open_clients.callback(other.close)
        scratch = SCRATCH_PREFIX + random_letters()
        yield from _tried(Bench(make, here, other, scratch, size, patience), tell)


def _reach(backend: Backend) -> Finding | None:
    """What keeps the place from being reached; ``None`` when nothing does."""
    try:
        found = backend.stat("")
        if found is not None and not found.is_directory:
            raise ConflictError(f"{backend.uri} is a file", hint="name a directory")
    except CkptError as error:
        return Finding("place", "failed", str(error), error.hint, exit_code=error.exit_code)
    return None


def _guarded(check: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    try:
        yield from findings
    except CkptError as error:
        yield Finding.of_error(check, error)


def _store(backend: Backend) -> Finding:
    catalog = Catalog(backend, default_ids())
    marker = catalog.find_marker()
    if marker is not None:
        catalog.require_writable()
        detail = f"a store of format {marker.format}, with the id {printable(marker.store)}"
        return Finding.ok("store", detail)
    if _holds_something(backend):
        return Finding.warning(
            "store",
            "there is no store here, and the place is not empty",
            f"take another place, or make it a store: ckpt init {shlex.quote(backend.uri)} --force",
        )
    return Finding.ok("store", "none yet: the first save makes one")


def _holds_something(backend: Backend) -> bool:
    """Whether anything lies there, found out without listing all of it."""
    path = backend.local_path("")
    if path is None:
        return backend.stat("") is not None
    with suppress(OSError), os.scandir(path) as entries:
        return any(not e.name.startswith(".") and e.name != "lost+found" for e in entries)
    return False


def _tried(bench: Bench, tell: Progress) -> Iterator[Finding]:
    """All that must be tried out, and the removal of what that made."""
    missing = _missing_directories(bench.here.local_path(""))
    removed = False
    try:
        yield from _trials(bench, tell)
        tell("clean-up")
        removed = True
        yield attempt("clean-up", lambda: _clean_up(bench))
    finally:
        if not removed:
            with suppress(CkptError):
                bench.here.remove_tree(bench.scratch)
        for path in missing:
            with suppress(OSError):  # it is in use, or was never made
                os.rmdir(path)


def _trials(bench: Bench, tell: Progress) -> Iterator[Finding]:
    for check, trial in _TRIALS:
        tell(check)
        try:
            yield trial(bench)
        except CkptError as error:
            yield Finding.of_error(check, error)
            if isinstance(error, TemporaryError) or check == "write":
                return  # each of the others would wait as long, for the same answer
    tell("this kind of storage")
    yield from _guarded("examination", bench.here.examine(bench.scratch))


def _clean_up(bench: Bench) -> Finding:
    check = "clean-up"
    try:
        removed = bench.within_patience(lambda: _removed(bench))
    except AccessDeniedError as error:
        detail = f"{bench.scratch} could not be removed: {error}"
        hint = "who saves here must be allowed to delete, or nothing is ever freed"
        return Finding(check, "failed", detail, hint, exit_code=error.exit_code)
    except TemporaryError:  # some servers stumble over what is just being removed
        time.sleep(bench.patience)
        removed = 0.0 if _removed(bench) else None
    if removed is None:
        return Finding.failed(check, f"{bench.scratch} is still there after its removal")
    return Finding.ok(check, "all that was written for this is removed")


def _removed(bench: Bench) -> bool:
    """Remove all that was made; whether nothing of it is left, by the second client's eyes."""
    bench.here.remove_tree(bench.scratch)
    return (
        bench.other.stat(bench.scratch) is None
        and not bench.other.list(bench.scratch, recursive=True)
        and not bench.other.unfinished(bench.scratch)
    )


def _missing_directories(path: str | None) -> list[str]:
    """The directories from ``path`` upwards that do not exist, the deepest first."""
    found: list[str] = []
    while path and not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def verdict_code(findings: Iterable[Finding]) -> int:
    """The exit code that findings lead to: 0 when none failed, else that of the first failure."""
    return next((f.exit_code or 1 for f in findings if f.verdict == "failed"), 0)
