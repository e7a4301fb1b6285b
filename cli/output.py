"""What the commands print: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from ckptstore.durations import spell_duration
from ckptstore.errors import printable
from ckptstore.transfer.mover import ProgressCallback


@dataclass(frozen=True)
class Output:
    """How a command was asked to talk.

    Attributes:
        json: One JSON document on stdout instead of text.
        quiet: Nothing but data that was asked for, and errors.
        progress: A progress bar, when stderr is a terminal.
    """

    json: bool = False
    quiet: bool = False
    progress: bool = True

    def document(self, value: Any) -> None:
        """The JSON document of the command."""
        print(json.dumps(value, indent=2 if is_terminal(sys.stdout) else None))

    def line(self, text: str) -> None:
        """A line that tells what was done; it is not data. It is shown at once."""
        if not self.quiet and not self.json:
            _clear_bar()
            print(printable(text), flush=True)

    def note(self, text: str) -> None:
        """A remark beside the data."""
        if not self.quiet:
            print(printable(text), file=sys.stderr)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[ProgressCallback | None]:
        """A progress bar of ``total`` bytes with rate and time left; ``None`` shows nothing."""
        if self.quiet or not self.progress or not is_terminal(sys.stderr) or total == 0:
            yield None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
        )
        # Each stream stays what it is: a line for stdout must not be sent to the bar's stream.
        shown = Progress(
            *columns,
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with shown as progress:
            short = what if len(what) <= 30 else f"…{what[-29:]}"
            task = progress.add_task(printable(short), total=total)
            _bars.append(True)
            try:
                yield lambda count: progress.advance(task, count)
            finally:
                _bars.pop()

    @contextmanager
    def busy(self, what: str) -> Iterator[Callable[[str], None] | None]:
        """A sign of life with a word of what is being done; ``None`` shows nothing."""
        if self.quiet or not self.progress or not is_terminal(sys.stderr):
            yield None
            return
        from rich.console import Console

        with Console(stderr=True).status(printable(what)) as status:
            yield lambda word: status.update(printable(f"{what}: {word}"))

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """A table.

        On a terminal aligned, without the columns that are empty in every row; in a pipe all
        columns, tab-separated, without a header.
        """
        if not is_terminal(sys.stdout):
            print("".join("\t".join(map(printable, row)) + "\n" for row in rows), end="")
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        shown = [i for i in range(len(header)) if any(row[i] for row in rows)]
        for name in (header[i] for i in shown):
            table.add_column(
                name,
                justify="right" if name in right else "left",
                no_wrap=name not in _FOLDED,
                min_width=20 if name in ("DETAILS", "WHY") else None,
                overflow="fold",
            )
        for row in rows:
            cells = [row[i] for i in shown]
            table.add_row(*(Text(printable(cell), _STYLES.get(cell, "")) for cell in cells))
        Console().print(table)


_FOLDED = ("REF", "MIRROR", "RUN", "DETAILS", "NOTE", "PATH", "VALUE", "WHY")
"""Columns whose cells may take several lines; the others are shown whole."""

_STYLES = {
    "ok": "green",
    "kept": "green",
    "deleted": "red",
    "to delete": "red",
    "would go": "red",
    "damaged": "bold red",
    "unfinished": "yellow",
    "trashed": "dim",
    "slow": "yellow",
    "warning": "yellow",
    "failed": "bold red",
    "skipped": "dim",
}


_bars: list[bool] = []


def _clear_bar() -> None:
    """Take the progress bar off its line, which is written to next; it comes back by itself."""
    if _bars and sys.stderr is not None:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether it is a terminal; a closed stream is ``None`` in Python."""
    return stream is not None and stream.isatty()


def show_error(message: str, hint: str | None = None) -> None:
    """The error on stderr, and after a blank line what to do about it."""
    _clear_bar()
    print(f"error: {printable(message)}", file=sys.stderr)
    if hint:
        show_hint(hint)


def show_hint(hint: str) -> None:
    """What to do, on stderr after a blank line."""
    print(f"\nhint: {printable(hint)}", file=sys.stderr)


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    from rich.filesize import decimal

    return decimal(count)


def when(created: str | None) -> str:
    """A record's time for people: UTC, to the minute."""
    return created[:16].replace("T", " ") if created else "-"


def ago(created: str | None) -> str:
    """A record's time for people: how long ago, by this host's clock and the writer's."""
    if created is None:
        return "-"
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return created
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return f"{spell_duration((datetime.now(UTC) - then).total_seconds())} ago"


def plural(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def numbers(metrics: Mapping[str, float] | None) -> str:
    """Metrics for people."""
    return " ".join(f"{k}={v:g}" for k, v in sorted((metrics or {}).items()))
