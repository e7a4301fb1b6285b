"""``ckpt pull``"""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import (
    DryRunOption,
    JsonOption,
    NoProgressOption,
    QuietOption,
    RefArgument,
    StoreOption,
    ThreadsOption,
    command,
    open_ref,
)
from cli.options import threads as threads_or_setting


@command
def pull(
    ref: RefArgument,
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="The directory to fill.", show_default=False)
    ],
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="GLOB", help="Only matching paths. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Not these paths. Repeatable."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also into a DEST that is not empty; files of the same names go."
        ),
    ] = False,
    store: StoreOption = None,
    threads: ThreadsOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Fetch a checkpoint: exactly the pushed files, every byte verified.

    DEST gets its files when all of them are there. A pull that was interrupted goes on where it was
    when it is repeated.
    """
    from ckptstore.pulling import pull as pull_checkpoint
    from ckptstore.pulling import select
    from cli.output import Output, plural, size

    out = Output(json, quiet, not no_progress)
    opened, parsed = open_ref(ref, store)
    checkpoint = opened.resolve(parsed)
    wanted = select(checkpoint.files, include or (), exclude or ())
    total = sum(e.size for e in wanted)
    if dry_run:
        out.line(f"would pull {checkpoint.ref}: {plural(len(wanted), 'file')}, {size(total)}")
        if json:
            out.document({"ref": checkpoint.ref, "files": len(wanted), "bytes": total})
        return
    with out.bar(checkpoint.ref, total) as progress:
        result = pull_checkpoint(
            checkpoint,
            dest,
            include=include or (),
            exclude=exclude or (),
            force=force,
            threads=threads_or_setting(threads),
            progress=progress,
        )
    out.line(
        f"pulled {checkpoint.ref} ({checkpoint.name}) to {dest}: {plural(result.files, 'file')}, "
        f"{size(result.size)} in {result.seconds:.1f} s"
    )
    if json:
        out.document(
            {
                "ref": checkpoint.ref,
                "name": str(checkpoint.name),
                "digest": checkpoint.commit.content,
                "files": result.files,
                "bytes": result.size,
                "sent_bytes": result.fetched,
                "seconds": round(result.seconds, 3),
            }
        )
