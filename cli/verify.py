"""``ckpt verify``"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_ref
from cli.options import (
    JsonOption,
    NoProgressOption,
    QuietOption,
    StoreOption,
    ThreadsOption,
    command,
    open_ref,
    store_and_run,
)
from cli.options import threads as threads_or_setting

if TYPE_CHECKING:
    from ckptstore.maintenance import CheckResult


@command
def verify(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STORE | RUN | REF]...",
            help="Stores, runs and checkpoints; the configured store when there is none.",
            autocompletion=complete_ref,
            show_default=False,
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte and compare its digest.")
    ] = False,
    store: StoreOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Verify checkpoints: records, manifests and sizes, and with --deep every byte.

    Damage is named by file and byte range, remembered in the store (list and resume see it), and
    makes the exit code 5.
    """
    from cli.output import Output, plural, size

    out = Output(json, quiet, not no_progress)
    targets = list(_targets(what or [], store))
    total = sum(t.size for t in targets) if deep else 0
    results: list[CheckResult] = []
    damaged_in = ""
    with out.bar("verifying", total) as progress:
        for target in targets:
            found = target.check(deep, threads_or_setting(threads), progress)
            if not damaged_in and any(not r.ok for r in found):
                damaged_in = target.uri
            results += found
    bad = [r for r in results if not r.ok]
    if json:
        out.document({"ok": not bad, "checkpoints": [_as_json(r) for r in results]})
    else:
        for result in results:
            if result.ok:
                extra = f", beside {plural(len(result.extra), 'unknown file')}"
                read = f", {size(result.checked_bytes)} read" if deep else ""
                out.line(f"{result.ref} is intact{read}{extra if result.extra else ''}")
        if not results:
            out.note("nothing to verify")
    if bad:
        _report(bad, damaged_in)
        raise typer.Exit(5)


def _report(bad: list[CheckResult], uri: str) -> None:
    """Every damaged place (the first 20 of a checkpoint) on stderr, and what to do."""
    from ckptstore.errors import printable
    from cli.output import show_error

    lines = [
        f"{result.ref} is damaged: {place}"
        for result in bad
        for place in [
            *map(str, result.damage[:20]),
            *([f"and {len(result.damage) - 20} more places"] if len(result.damage) > 20 else []),
        ]
    ]
    run = printable(bad[0].run)
    hint = f"the newest intact checkpoint: ckpt resume-info {run}@latest --store {uri}"
    for line in lines[:-1]:
        show_error(line)
    show_error(lines[-1], hint)


def _as_json(result: CheckResult) -> dict[str, Any]:
    return {
        "ref": result.ref,
        "name": result.name,
        "ok": result.ok,
        "checked_bytes": result.checked_bytes,
        "damaged": [
            {"path": d.path, "offset": d.offset, "length": d.length, "reason": d.reason}
            for d in result.damage
        ],
        "extra": list(result.extra),
    }


class _Target:
    """A checkpoint, or a run of a store, to verify."""

    def __init__(self, opened: Any, checkpoint: Any, run: str | None) -> None:
        self.uri: str = opened.uri
        self._store = opened
        self._checkpoint = checkpoint
        self._run = run

    @property
    def size(self) -> int:
        """Bytes to read for a deep verification."""
        if self._checkpoint is not None:
            return int(self._checkpoint.size)
        return sum(row.size for row in self._store.rows(self._run))

    def check(self, deep: bool, threads: int | None, progress: Any) -> list[CheckResult]:
        from ckptstore.maintenance import verify as check
        from ckptstore.maintenance import verify_run

        if self._checkpoint is not None:
            return [check(self._checkpoint, deep=deep, threads=threads, progress=progress)]
        assert self._run is not None
        return list(
            verify_run(self._store, self._run, deep=deep, threads=threads, progress=progress)
        )


def _targets(what: list[str], given: str | None) -> Iterator[_Target]:
    from ckptstore.uri import is_ref

    arguments: list[str | None] = [*what] or [None]
    for text in arguments:
        if text is not None and is_ref(text):
            opened, ref = open_ref(text, given)
            yield _Target(opened, opened.resolve(ref), None)
        else:
            opened, run = store_and_run(text, None, given)
            for one in [run] if run is not None else opened.runs():
                opened.catalog.require_run(one)
                yield _Target(opened, None, one)
