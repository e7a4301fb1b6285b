"""What a person sees: a line a step on stdout, remarks on stderr."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.text import Text

from ckptstore.errors import printable

_FIRST = (
    ("reward", "reward/mean"),
    ("kl", "kl/mean"),
    ("loss", "actor/loss"),
    ("val", "val/reward"),
)
_MORE = (
    ("critic", "critic/loss"),
    ("length", "response/length"),
    ("grad", "actor/grad_norm"),
    ("lr", "actor/lr"),
)
"""Shown as far as the line has room."""

_GAP = "  "
_VALUE_WIDTH = 7


class TrainerConsole:
    """Writes for people, and never stops a training because nobody listens.

    Args:
        active: Whether steps and notes are shown; warnings always are.
    """

    def __init__(self, active: bool = True) -> None:
        self._active = active

    def step(self, step: int, total: int | None, metrics: Mapping[str, float | str]) -> None:
        """The line of a step."""
        if self._active:
            _print(sys.stdout, lambda width: step_line(step, total, metrics, width))

    def note(self, text: str) -> None:
        """A remark."""
        if self._active:
            _print(sys.stderr, lambda _: Text(_clean(text)))

    def warn(self, text: str, hint: str | None = None) -> None:
        """Something that a person should look at, and what to do about it."""
        line = Text("warning: ", "bold yellow").append(_clean(text), "not bold default")
        if hint:
            line.append(f"\n  hint: {_clean(hint)}", "not bold default")
        _print(sys.stderr, lambda _: line)


def step_line(step: int, total: int | None, metrics: Mapping[str, float | str], width: int) -> Text:
    """The metrics of a step that a person watches, in one line of at most ``width`` columns.

    What a step did not measure is left out; columns of lines with the same metrics line up.
    """
    line = Text("step ", "dim")
    line.append(f"{step:>{len(str(total))}}/{total}" if total else f"{step:>5}", "bold")
    seconds = metrics.get("time/step")
    end = f"{_GAP}{seconds:.2f} s" if isinstance(seconds, (int, float)) else ""
    full = False
    for label, name in (*_FIRST, *_MORE):
        value = metrics.get(name)
        if not isinstance(value, (int, float)):
            continue
        head, number = f"{_GAP}{label} ", f"{short(value):<{_VALUE_WIDTH}}"
        full = full or len(line) + len(head) + len(number) + len(end) > width
        if not full:
            line.append(head, "dim")
            line.append(number, "" if math.isfinite(value) else "bold red")
    line.append(end, "dim")
    line.rstrip()
    return line


def short(value: float) -> str:
    """A number in at most seven characters: three digits that matter."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if size < 0.001 or size >= 99999.5:
        return f"{value:.0e}" if value < 0 else f"{value:.1e}"
    if size >= 999.5:
        return f"{value:.0f}"
    decimals = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{min(decimals, 4)}f}"


def _clean(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def _print(stream: TextIO | None, make: Callable[[int], Text]) -> None:
    """Print, and pass over a stream that is closed, full or gone.

    The text is drawn apart from the stream: a console of ``rich`` flushes what others left there,
    and ends the process when its pipe is gone.
    """
    if stream is None or stream.closed:
        return
    shown = Console(file=stream)
    drawn = io.StringIO()
    console = Console(
        file=drawn, force_terminal=shown.is_terminal, width=shown.width, highlight=False
    )
    console.print(make(shown.width), soft_wrap=True)
    write(stream, drawn.getvalue())


def write(stream: TextIO, text: str) -> None:
    """Write text as it is, and pass over a stream that is full or gone."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        # What is buffered would be tried again at exit, and would make the exit code 120 then.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
    except (OSError, ValueError):
        pass
