"""``ckpt list``"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import JsonOption, QuietOption, StoreOption, command, store_and_run

if TYPE_CHECKING:
    from ckptstore.listing import Row


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


def _table(out: Any, rows: Sequence[Row]) -> None:
    from cli.output import numbers, size, when

    header = ["REF", "STATE", "SIZE", "FILES", "CREATED (UTC)", "TAGS", "METRICS", "NOTE"]
    cells = []
    for row in rows:
        tags = ["pinned"] if row.pinned else []
        cells.append(
            [
                row.ref,
                row.state,
                size(row.size),
                str(row.files),
                when(row.created),
                " ".join([*tags, *row.tags]),
                numbers(dict(row.metrics or {})),
                row.note or "",
            ]
        )
    out.table(header, cells, right=("SIZE", "FILES"))
