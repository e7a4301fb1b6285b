"""``ckpt repair``"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_ref
from cli.options import (
    DryRunOption,
    JsonOption,
    NoProgressOption,
    QuietOption,
    StoreOption,
    ThreadsOption,
    command,
    store_uri,
    uri_and_run,
)
from cli.options import threads as threads_or_setting

if TYPE_CHECKING:
    from ckptstore.maintenance import RepairResult
    from ckptstore.store import Store
    from ckptstore.uri import Ref
    from cli.output import Output


@command
def repair(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="[REF | STORE]",
            help="A checkpoint, or a store.",
            autocompletion=complete_ref,
            show_default=False,
        ),
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Only this run.", show_default=False)
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="STORE",
            help="A mirror, or any store that may hold the same files; may be repeated. "
            "By default the mirrors that the store knows.",
        ),
    ] = None,
    drop_marks: Annotated[
        bool,
        typer.Option(
            "--drop-marks",
            help="Remove marks that cannot be read and that no source has; one may be a pin.",
        ),
    ] = False,
    store_id: Annotated[
        str | None,
        typer.Option("--store-id", metavar="ID", help="The id of a store that lost its marker."),
    ] = None,
    store: StoreOption = None,
    threads: ThreadsOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Replace what is damaged by what it must be, from a mirror or another copy in the store.

    Every byte is read. Only damaged blocks (16 MiB) are fetched; a good copy of the file is made
    and swapped in, also for the checkpoints that share it. Lost manifests and records come back
    too. The exit code is 3 when something is left, and 5 when nothing could be repaired.
    """
    from ckptstore.maintenance import restore_marker
    from cli.output import Output

    out = Output(json, quiet, not no_progress)
    uri, ref, run = _what(first, second, store)
    sources = [_source(text, uri) for text in source or ()]
    told = _Told(out, dry_run)
    marker = restore_marker(_backend(uri), sources, store_id=store_id, dry_run=dry_run)
    if marker is not None:
        told.tell(marker)
    if marker is None or (marker.ok and not dry_run):
        from ckptstore.store import open_store

        opened = open_store(uri)
        if source is None:
            sources = list(_known(opened, out))
        options = {"dry_run": dry_run, "drop_marks": drop_marks}
        results = _results(
            opened, ref, run, sources, out, threads=threads_or_setting(threads), **options
        )
        for result in results:
            told.tell(result)
    told.end()


def _what(
    first: str | None, second: str | None, given: str | None
) -> tuple[str, Ref | None, str | None]:
    """The store (which may be too damaged to be opened), and what of it."""
    from ckptstore.errors import UsageError
    from ckptstore.uri import is_ref, parse_ref

    if first is None or not is_ref(first):
        uri, run = uri_and_run(first, second, given)
        return uri, None, run
    if second is not None:
        raise UsageError("a REF names one checkpoint already", hint="leave out the RUN")
    ref = parse_ref(first)
    return store_uri(ref.store, given), ref, None


def _backend(uri: str) -> Any:
    from ckptstore.backends import open_backend
    from ckptstore.uri import StoreURI

    return open_backend(StoreURI.parse(uri))


def _source(text: str, uri: str) -> Store:
    """A store that was named as a source; it must be there."""
    from ckptstore.errors import UsageError
    from ckptstore.store import open_store

    opened = open_store(text)
    opened.catalog.marker()
    if opened.uri == _backend(uri).uri:
        raise UsageError("a store cannot be repaired from itself")
    return opened


def _known(opened: Store, out: Output) -> Iterator[Store]:
    """The mirrors that the store knows of and that can be reached."""
    from ckptstore.errors import CkptError
    from ckptstore.mirrors import known_mirrors
    from ckptstore.store import open_store

    opened.catalog.marker()
    for mirror in known_mirrors(opened.catalog):
        try:
            source = open_store(mirror.uri) if mirror.note is not None else None
            if source is not None and source.exists and source.uri != opened.uri:
                yield source
        except CkptError as error:
            out.note(f"the mirror {mirror.uri} is left out: {error}")


def _results(
    opened: Store, ref: Ref | None, run: str | None, sources: list[Store], out: Output, **how: Any
) -> Iterator[RepairResult]:
    from ckptstore.maintenance import repair_name, repair_run

    if ref is not None:
        name = _name(opened, ref)
        with out.bar("reading", _size(opened, ref.run, name)) as progress:
            yield repair_name(opened, ref.run, name, sources, progress=progress, **how)
        return
    total = sum(row.size for row in opened.rows(run))
    with out.bar("reading", total) as progress:
        for one in [run] if run is not None else opened.runs():
            yield from repair_run(opened, one, sources, progress=progress, **how)


def _size(opened: Store, run: str, name: Any) -> int:
    found = opened.catalog.find(run, name)
    return found.commit.size if found is not None and found.commit is not None else 0


def _name(opened: Store, ref: Ref) -> Any:
    """The checkpoint that a REF names, also when its record is damaged or lost."""
    from ckptstore.errors import NotFoundError
    from ckptstore.maintenance.recording import find_name

    if ref.name is not None:
        opened.catalog.require_run(ref.run)
        return ref.name
    if ref.step is None and ref.selector not in (None, "latest"):
        return opened.resolve(ref).name
    opened.catalog.require_run(ref.run)
    name = find_name(opened, ref.run, ref.step)
    if name is None:
        raise NotFoundError(f"there is no checkpoint {ref} in {opened.uri}")
    return name


class _Told:
    """Says what was done, checkpoint by checkpoint."""

    def __init__(self, out: Output, dry_run: bool) -> None:
        self._out = out
        self._dry_run = dry_run
        self._results: list[RepairResult] = []

    def tell(self, result: RepairResult) -> None:
        """A line for each thing that was repaired, or is left."""
        from cli.output import show_error, size

        self._results.append(result)
        verb = "would repair" if self._dry_run else "repaired"
        for fixed in result.fixed:
            self._out.line(f"{verb} {result.ref}: {fixed.path}: {fixed.how}")
        for ref in result.shared:
            self._out.line(f"{verb} {ref} too: it shares a file with {result.ref}")
        if result.fetched_bytes:
            self._out.line(f"{size(result.fetched_bytes)} fetched for {result.ref}")
        for place in result.left[:20]:
            show_error(f"{result.ref} is still damaged: {place}")
        if len(result.left) > 20:
            show_error(f"{result.ref}: and {len(result.left) - 20} more places")

    def end(self) -> None:
        """The document, and the exit code."""
        fixed = any(r.fixed for r in self._results)
        left = any(r.left for r in self._results)
        if self._out.json:
            self._out.document(
                {"ok": not left, "checkpoints": [_as_json(r) for r in self._results]}
            )
        elif not fixed and not left:
            self._out.line("there is nothing to repair")
        if left:
            raise typer.Exit(3 if fixed else 5)


def _as_json(result: RepairResult) -> dict[str, Any]:
    return {
        "ref": result.ref,
        "name": result.name,
        "ok": result.ok,
        "fixed": [{"path": f.path, "how": f.how} for f in result.fixed],
        "left": [
            {"path": d.path, "offset": d.offset, "length": d.length, "reason": d.reason}
            for d in result.left
        ],
        "fetched_bytes": result.fetched_bytes,
        "shared": list(result.shared),
    }
