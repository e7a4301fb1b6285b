"""``ckpt list``"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import JsonOption, QuietOption, StoreOption, command, store_and_run

if TYPE_CHECKING:
    from ckptstore.listing import Row
    from cli.output import Output


@command
def list_checkpoints(
    first: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="The store.", show_default=False)
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Only this run.", show_default=False)
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also unfinished saves and the trash.")
    ] = False,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the checkpoints of a store, or of one of its runs, in the order they were saved.

    In a pipe the columns are separated by tabs, without a header.
    """
    from cli.output import Output

    out = Output(json, quiet)
    opened, run = store_and_run(first, second, store)
    rows = opened.rows(run, everything=everything)
    if json:
        out.document([as_json(row) for row in rows])
        return
    if quiet:
        return
    if not rows:
        out.note(f"{opened.uri} holds no checkpoint yet")
        return
    _table(out, rows)


def as_json(row: Row) -> dict[str, Any]:
    """A row as ``--json`` prints it."""
    return {
        "ref": row.ref,
        "run": row.run,
        "step": row.step,
        "seq": row.seq,
        "name": row.name,
        "created": row.created,
        "size": row.size,
        "files": row.files,
        "digest": row.digest,
        "state": row.state,
        "tags": list(row.tags),
        "metrics": dict(row.metrics or {}),
        "pinned": row.pinned,
        "note": row.note,
    }


def _table(out: Output, rows: Sequence[Row]) -> None:
    from cli.output import ago, is_terminal, numbers, size, when

    if not is_terminal(sys.stdout):
        cells = [
            [
                row.ref,
                row.state,
                size(row.size),
                str(row.files),
                when(row.created),
                _tags(row),
                numbers(row.metrics),
                row.note or "",
            ]
            for row in rows
        ]
        out.table((), cells)
        return
    cells = [
        [
            row.ref,
            row.state,
            size(row.size),
            ago(row.created),
            ", ".join(filter(None, (_tags(row), numbers(row.metrics), row.note))),
        ]
        for row in rows
    ]
    out.table(("REF", "STATE", "SIZE", "SAVED", "DETAILS"), cells, right=("SIZE", "SAVED"))


def _tags(row: Row) -> str:
    return " ".join([*(["pinned"] if row.pinned else []), *row.tags])
