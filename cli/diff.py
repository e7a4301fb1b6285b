"""``ckpt diff``"""

from __future__ import annotations

from typing import Annotated

import typer

from cli.completion import complete_ref
from cli.options import (
    JsonOption,
    QuietOption,
    StoreOption,
    command,
    open_ref,
)

_Side = Annotated[
    str,
    typer.Argument(help="A REF, or a directory.", autocompletion=complete_ref, show_default=False),
]


@command
def diff(
    a: _Side,
    b: _Side,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare two checkpoints, or a checkpoint and a directory, file by file.

    The first column says: = same, * changed, - only in A, + only in B, ! damaged. The exit code is
    0 when all files are the same, else 1.
    """
    from ckptstore.errors import printable
    from cli.output import Output, size

    out = Output(json, quiet)
    left, right = _files(a, store), _files(b, store)
    lines = []
    for path in sorted(set(left) | set(right), key=str.encode):
        one, other = left.get(path), right.get(path)
        if (one is not None and one[2]) or (other is not None and other[2]):
            mark = "!"
        elif one is None or other is None:
            mark = "+" if one is None else "-"
        else:
            mark = "=" if one[:2] == other[:2] else "*"
        lines.append((mark, path, one, other))
    same = all(mark == "=" for mark, *_ in lines)
    if json:
        out.document(
            [
                {
                    "mark": mark,
                    "path": path,
                    "size_a": one[1] if one else None,
                    "size_b": other[1] if other else None,
                }
                for mark, path, one, other in lines
            ]
        )
    elif not quiet:
        for mark, path, one, other in lines:
            sizes = [size(side[1]) for side in (one, other) if side is not None]
            print(f"{mark} {printable(path)} ({' -> '.join(dict.fromkeys(sizes))})")
    if not same:
        raise typer.Exit(1)


def _files(text: str, store: str | None) -> dict[str, tuple[str, int, bool]]:
    """Digest, size and whether it is damaged, of each file by path."""
    from ckptstore.scanning import scan
    from ckptstore.transfer import Mover, SourceFile, Transfer
    from ckptstore.uri import is_ref

    if is_ref(text):
        opened, ref = open_ref(text, store)
        checkpoint = opened.resolve(ref)
        damaged = {d.path for d in checkpoint.quick_check()}
        damaged |= {note.path for note in checkpoint.standing.damage}
        return {
            e.path: (f"{e.digest}{e.exec}", e.size, e.path in damaged) for e in checkpoint.files
        }
    source = scan(text)
    transfers = [
        Transfer(
            f.path,
            f.size,
            open_reader=lambda f=f: SourceFile(f.real, f.identity),  # type: ignore[misc]
            executable=f.executable,
        )
        for f in source.files
    ]
    entries = [moved.entry for moved in Mover().run(transfers)]
    return {e.path: (f"{e.digest}{e.exec}", e.size, False) for e in entries if e is not None}
