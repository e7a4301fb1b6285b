"""``ckpt delete``, ``ckpt undelete``, ``ckpt gc``"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli.completion import complete_ref
from cli.options import (
    DryRunOption,
    JsonOption,
    QuietOption,
    RefArgument,
    StoreOption,
    YesOption,
    command,
    open_ref,
    store_and_run,
)
from cli.options import grace as grace_or_setting

_Grace = Annotated[
    str | None,
    typer.Option("--grace", metavar="TIME", help="For example 0, 30min, 24h (the default), 7d."),
]


@command
def delete(
    refs: Annotated[
        list[str],
        typer.Argument(
            metavar="REF...",
            help="Checkpoints.",
            autocompletion=complete_ref,
            show_default=False,
        ),
    ],
    grace: _Grace = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also what is guarded, but for pins."),
    ] = False,
    store: StoreOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Move checkpoints to the trash, where they stay until their grace period has ended.

    The newest, the best and the last verified checkpoint of a run, and what a mirror lacks, are
    kept unless --force says otherwise; a pinned one is always kept. `ckpt undelete` brings one
    back, `ckpt gc` removes what has been in the trash for long enough.
    """
    from ckptstore.deleting import check_guards
    from ckptstore.durations import spell_duration
    from cli.output import Output, size

    out = Output(json, quiet)
    seconds = grace_or_setting(grace)
    done = []
    named = [(opened, opened.resolve(ref)) for opened, ref in (open_ref(r, store) for r in refs)]
    found = list({(opened.uri, c.run, c.name): (opened, c) for opened, c in named}.values())
    if (force or seconds == 0) and not yes and not dry_run and _interactive():
        names = ", ".join(checkpoint.ref for _, checkpoint in found)
        typer.confirm(f"delete {names}?", abort=True, err=True)
    for opened, checkpoint in found:  # all or nothing, as far as can be told beforehand
        check_guards(opened.catalog, checkpoint, force)
    for opened, checkpoint in found:
        if dry_run:
            out.line(f"would delete {checkpoint.ref} ({checkpoint.name}, {size(checkpoint.size)})")
        else:
            opened.delete(checkpoint, grace=seconds, force=force)
            kept = f"for {spell_duration(seconds)}" if seconds else "until the next ckpt gc"
            out.line(
                f"deleted {checkpoint.ref} ({checkpoint.name}, {size(checkpoint.size)}): "
                f"in the trash {kept}"
            )
        done.append({"ref": checkpoint.ref, "name": str(checkpoint.name), "bytes": checkpoint.size})
    if json:
        out.document(done)


def _interactive() -> bool:
    from cli.output import is_terminal

    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


@command
def undelete(
    ref: RefArgument,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Bring a deleted checkpoint back from the trash."""
    from cli.output import Output

    out = Output(json, quiet)
    opened, parsed = open_ref(ref, store)
    checkpoint = opened.undelete(parsed)
    out.line(f"brought back {checkpoint.ref} ({checkpoint.name})")
    if json:
        out.document({"ref": checkpoint.ref, "name": str(checkpoint.name)})


@command
def gc(
    first: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="The store.", show_default=False)
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Only this run.", show_default=False)
    ] = None,
    grace: _Grace = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also where a run has directories and no record at all."),
    ] = False,
    store: StoreOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Remove what nothing needs any more: expired trash, dead saves, stray temporaries.

    What a running save writes, and what is within its grace period, is left alone. --grace is for
    dead saves; each checkpoint in the trash has a grace period of its own.
    """
    from ckptstore.maintenance import gc as collect
    from cli.output import Output, plural, size

    out = Output(json, quiet)
    opened, run = store_and_run(first, second, store)
    result = collect(opened, run, grace=grace_or_setting(grace), force=force, dry_run=dry_run)
    if json:
        out.document(
            [
                {"key": a.key, "removed": a.removed, "reason": a.reason, "bytes": a.size}
                for a in result.actions
            ]
        )
        return
    verb = ("would remove" if dry_run else "removed", "keeps")
    for action in result.actions:
        out.line(f"{verb[0] if action.removed else verb[1]} {action.key}: {action.reason}")
    if result.removed:
        out.line(f"{verb[0]} {plural(len(result.removed), 'thing')}, {size(result.freed)}")
    else:
        out.line("there is nothing to remove")
