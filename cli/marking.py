"""``ckpt pin``, ``ckpt tag``"""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import JsonOption, QuietOption, RefArgument, StoreOption, command, open_ref


@command
def pin(
    ref: RefArgument,
    remove: Annotated[bool, typer.Option("--remove", help="End the pin.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Pin a checkpoint: nothing deletes it until the pin is removed."""
    from cli.output import Output

    out = Output(json, quiet)
    opened, parsed = open_ref(ref, store)
    checkpoint = opened.resolve(parsed)
    changed = opened.unpin(checkpoint) if remove else opened.pin(checkpoint)
    state = "not pinned" if remove else "pinned"
    out.line(f"{checkpoint.ref} is {state}{'' if changed else ' already'}")
    if json:
        out.document({"ref": checkpoint.ref, "pinned": not remove, "changed": changed})


@command
def tag(
    ref: RefArgument,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", show_default=False)],
    remove: Annotated[bool, typer.Option("--remove", help="Take the tags away.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Give a checkpoint tags, or take them away.

    RUN@TAG is the newest checkpoint that has the tag.
    """
    from ckptstore.layout import check_tag
    from cli.output import Output

    out = Output(json, quiet)
    opened, parsed = open_ref(ref, store)
    checkpoint = opened.resolve(parsed)
    for one in tags:
        check_tag(one)
    for one in tags:
        changed = opened.untag(checkpoint, one) if remove else opened.tag(checkpoint, one)
        state = f"{'no longer has' if remove else 'has'} the tag {one}"
        out.line(f"{checkpoint.ref} {state}{'' if changed else ' (it was so before)'}")
    if json:
        now = opened.get(checkpoint.run, name=str(checkpoint.name))
        out.document({"ref": checkpoint.ref, "tags": now.tags})
