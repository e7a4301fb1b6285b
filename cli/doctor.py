"""``ckpt doctor``"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import (
    DryRunOption,
    JsonOption,
    NoProgressOption,
    QuietOption,
    StoreOption,
    command,
    store_uri,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptstore.backends.findings import Finding
    from cli.output import Output


@command
def doctor(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="[STORE]", help="A store, or where one shall be.", show_default=False
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option("--size", metavar="BYTES", help="For the speed test, like 500MB or 4GiB."),
    ] = "64MiB",
    store: StoreOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_progress: NoProgressOption = False,
) -> None:
    """Find out whether a place is safe for checkpoints, and how fast it is.

    It is tried out: racing creators, large objects, odd names, clocks. All of that happens in one
    directory of its own, which is removed; a store that is there is not touched. A store need not
    be there yet.

    The exit code is 0 only if the place is safe.
    """
    from contextlib import closing

    from ckptstore.backends import open_backend
    from ckptstore.maintenance.doctor import examine
    from ckptstore.uri import StoreURI
    from cli.output import Output

    out = Output(json, quiet, not no_progress)
    uri = StoreURI.parse(store_uri(place, store))
    found: list[Finding] = []
    with (
        out.busy("checking") as progress,
        closing(
            examine(
                lambda: open_backend(uri),
                size=_bytes(size),
                dry_run=dry_run,
                progress=progress,
            )
        ) as findings,
    ):
        found.extend(findings)
    if json:
        out.document([as_json(finding) for finding in found])
    elif not quiet:
        _show(out, found)
    _judge(str(uri), found)
    if not json:
        out.note(_summary(str(uri), found, dry_run))


def as_json(finding: Finding) -> dict[str, Any]:
    """A finding as ``--json`` prints it."""
    return {
        "check": finding.check,
        "verdict": finding.verdict,
        "detail": finding.detail,
        "hint": finding.hint,
        "command": finding.command,
        **finding.numbers,
    }


def _show(out: Output, found: Sequence[Finding]) -> None:
    """A table; a command is shown below it in one piece, to be copied."""
    from cli.output import is_terminal

    if not is_terminal(sys.stdout):
        cells = [[f.check, f.verdict, f.detail, f.hint or "", f.command or ""] for f in found]
        out.table((), cells)
        return
    rows: list[list[str]] = []
    for finding in found:
        rows.append([finding.check, finding.verdict, finding.detail])
        if finding.hint:
            rows.append(["", "", f"hint: {finding.hint}"])
    out.table(("CHECK", "VERDICT", "DETAILS"), rows)
    for finding in found:
        if finding.command:
            for line in ("", f"for {finding.check}:", "", finding.command, ""):
                out.note(line)


def _judge(uri: str, found: Sequence[Finding]) -> None:
    """The errors, and the exit code."""
    from ckptstore.maintenance.doctor import verdict_code
    from ckptstore.uri import redact
    from cli.output import show_error

    failed = [finding for finding in found if finding.verdict == "failed"]
    for finding in failed:
        state = "is not safe" if finding.exit_code == 1 else "cannot be used"
        show_error(f"{redact(uri)} {state}: {finding.check}: {finding.detail}", finding.hint)
    if failed:
        raise typer.Exit(verdict_code(found))


def _summary(uri: str, found: Sequence[Finding], dry_run: bool) -> str:
    from ckptstore.uri import redact
    from cli.output import plural

    if dry_run:
        return f"{redact(uri)} was only looked at: nothing was tried out"
    warnings = sum(finding.verdict == "warning" for finding in found)
    noted = f", with {plural(warnings, 'warning')}" if warnings else ""
    return f"{redact(uri)} is safe for checkpoints{noted}"


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
_LEAST, _MOST = 1000**2, 64 * 1024**3


def _bytes(text: str) -> int:
    """Bytes in a text such as ``500MB`` or ``4GiB``.

    Raises:
        UsageError: it is something else, or a size that measures nothing or takes for ever.
    """
    from ckptstore.errors import UsageError, printable

    match = re.fullmatch(r"(\d{1,15})\s*([kmg]?i?)b?", text.strip(), re.ASCII | re.IGNORECASE)
    unit = _UNITS.get(match[2].lower()) if match else None
    count = int(match[1]) * unit if match and unit else 0
    if not _LEAST <= count <= _MOST:
        raise UsageError(
            f"--size {printable(text[:40])!r} is not a size from 1MB to 64GiB",
            hint="for example: 500MB, 4GiB",
        )
    return count
