"""``ckpt init``, ``ckpt config``"""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import JsonOption, QuietOption, command, open_store


@command
def init(
    store: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="Where.", show_default=False)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also in a place that is not empty.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make a store. (The first push does so too.)"""
    from cli.output import Output

    out = Output(json, quiet)
    opened = open_store(store)
    made = opened.create(into_nonempty=force)
    out.line(f"{opened.uri} is {'now' if made else 'already'} a store, with the id {opened.id}")
    if json:
        out.document({"store": opened.uri, "id": opened.id, "created": made})


@command
def config(json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Show the settings, and where each comes from.

    An option of a command wins over CKPT_* in the environment, that over ./ckpt.toml, and that over
    the user's own file.
    """
    from ckptstore.config import PROJECT_FILE, describe, load_settings, user_file
    from cli.output import Output

    out = Output(json, quiet)
    settings = load_settings().values()
    if json:
        out.document({s.key: {"value": s.value, "origin": s.origin} for s in settings})
        return
    if quiet:
        return
    rows = [[s.key, _shown(s.key, s.value), s.origin, describe(s.key)] for s in settings]
    out.table(["KEY", "VALUE", "FROM", "NOTE"], rows)
    out.note(f"files: {PROJECT_FILE}, {user_file()}")


def _shown(key: str, value: object) -> str:
    from ckptstore.durations import spell_duration

    if value is None:
        return "-"
    return spell_duration(value) if key == "grace" and isinstance(value, float) else str(value)
