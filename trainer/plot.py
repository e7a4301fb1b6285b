"""``python -m trainer.plot METRICS.jsonl``: a metric over the steps, drawn in the terminal.

Each life of the run (each start of its process) has a colour and a marker of its own, so that one
sees where it was resumed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.errors import CkptError, NotFoundError, UsageError, printable
from trainer.metricsfile import read_metrics

_STYLES = (
    ("blue+", "hd", "▞"),
    ("orange+", "braille", "⡱"),
    ("green+", "*", "*"),
    ("magenta+", "+", "+"),
    ("cyan+", "o", "o"),
    ("red+", "x", "x"),
)
"""Colour, marker, and how the legend shows the marker; used again after the last."""

_LEAST_WIDTH, _LEAST_HEIGHT = 30, 10
_ROWS = 24


@dataclass
class Life:
    """The points of one life.

    Attributes:
        number: Counted from 1.
        steps: The steps that measured the metric, in order.
        values: Its values.
    """

    number: int
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def lives_of(records: Sequence[dict[str, Any]], metric: str) -> list[Life]:
    """The points of a metric by life; values that are missing or not finite are left out.

    The first point of a later life is joined to the last one before it, so that the line has no
    hole where the run was resumed.

    Raises:
        NotFoundError: no record has the metric as a number.
    """
    lives: dict[int, Life] = {}
    for record in records:
        value, step, number = record.get(metric), record.get("step"), record.get("life", 1)
        if not (isinstance(step, int) and isinstance(number, int)):
            continue
        if isinstance(value, (int, float)) and math.isfinite(value):
            life = lives.setdefault(number, Life(number))
            life.steps.append(step)
            life.values.append(float(value))
    if not lives:
        names = sorted({k for r in records for k, v in r.items() if isinstance(v, (int, float))})
        known = ", ".join(name for name in names if name not in ("step", "life"))
        raise NotFoundError(
            f"no line has the metric {printable(metric)}",
            hint=f"there are: {known}" if known else "the file has no metrics yet",
        )
    found = [lives[number] for number in sorted(lives)]
    for before, after in itertools.pairwise(found):
        if before.steps[-1] < after.steps[0]:
            after.steps.insert(0, before.steps[-1])
            after.values.insert(0, before.values[-1])
    return found


def draw(lives: Sequence[Life], title: str, width: int, height: int, *, colours: bool) -> str:
    """The plot as lines of text, at most ``width`` columns and ``height`` rows.

    Raises:
        UsageError: plotext is not installed.
    """
    try:
        plotext: Any = importlib.import_module("plotext")
    except ImportError as error:
        raise UsageError(
            "plots need the package plotext, which is not installed",
            hint="pip install 'plotext>=6.1'",
        ) from error
    legend = _legend(plotext, lives, width, colours)
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height - 1 - len(legend))
    steps = [step for life in lives for step in life.steps]
    values = [value for life in lives for value in life.values]
    _scale(figure.ruler("x", "lower"), min(steps), max(steps), max(2, width // 12), whole=True)
    _scale(figure.ruler("y", "left"), min(values), max(values), max(2, height // 4), whole=False)
    for index, life in enumerate(lives):
        colour, marker, _ = _STYLES[index % len(_STYLES)]
        signal = figure.signal(life.steps, life.values, marker=plotext.marker(marker, colour))
        figure.draw(signal.lines())
    figure.label("step", "x")
    body = figure.build().string(colorless=not colours)
    lines = [title[:width].center(width), *legend, *body.splitlines()]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _legend(plotext: Any, lives: Sequence[Life], width: int, colours: bool) -> list[str]:
    """The lives with their markers, in at most three lines."""
    rows: list[list[str]] = [[]]
    taken = 0
    for index, life in enumerate(lives):
        colour, _, sample = _STYLES[index % len(_STYLES)]
        name = f"life {life.number}"
        needed = len(sample) * 2 + 1 + len(name) + (3 if rows[-1] else 0)
        if taken + needed > width and rows[-1]:
            rows.append([])
            taken = 0
        taken += needed
        mark = str(plotext.colorize(sample * 2, colour)) if colours else sample * 2
        rows[-1].append(f"{mark} {name}")
    if len(rows) > 3:
        rows = [*rows[:2], [f"… to life {lives[-1].number}, in the same order"]]
    return [_centred("   ".join(row), plotext, width) for row in rows]


def _centred(text: str, plotext: Any, width: int) -> str:
    visible = len(plotext.uncolorize(text))
    return " " * ((width - visible) // 2) + text


def _scale(ruler: Any, low: float, high: float, count: int, *, whole: bool) -> None:
    """Round ticks on an axis, a little wider than its data."""
    if low == high:
        margin = 1.0 if whole else (abs(low) / 10 or 1.0)
        low, high = low - margin, high + margin
    apart = _round_up((high - low) / count)
    if whole:
        apart = max(1.0, apart)
    first, last = math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9)
    ticks = [n * apart for n in range(first, last + 1)]
    largest, place = max(abs(low), abs(high)), math.floor(math.log10(apart) + 1e-9)
    if not whole and (place < -4 or largest >= 1e6):
        spelling = f".{max(0, math.floor(math.log10(largest)) - place)}e"
    else:
        spelling = f".{max(0, -place)}f"
    ruler.lim(low, high)
    ruler.ticks(ticks, [f"{tick:{spelling}}" for tick in ticks])


def _round_up(value: float) -> float:
    """The least of 1, 2, 5, 10, … times a power of ten that is not below ``value``."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * nice for nice in (1, 2, 5, 10) if power * nice >= value * (1 - 1e-9))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.plot", description="Draw a metric over the steps of a run."
    )
    parser.add_argument("file", type=Path, metavar="METRICS.jsonl")
    parser.add_argument("--metric", default="reward/mean", help="default: %(default)s")
    parser.add_argument("--width", type=int, help="columns; default: the terminal's, else 80")
    parser.add_argument("--height", type=int, help=f"rows; default: {_ROWS}, or the terminal's")
    given = parser.parse_args(arguments)
    terminal = shutil.get_terminal_size((80, _ROWS + 1))
    width = terminal.columns if given.width is None else given.width
    height = min(_ROWS, terminal.lines - 1) if given.height is None else given.height
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        if given.width is not None or given.height is not None:
            _check_size(width, height)
        width, height = max(width, _LEAST_WIDTH), max(height, _LEAST_HEIGHT)
        lives = lives_of(read_metrics(given.file), given.metric)
        sys.stdout.write(draw(lives, given.metric, width, height, colours=colours))
        sys.stdout.flush()
    except CkptError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {printable(error.hint)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _check_size(width: int, height: int) -> None:
    if width < _LEAST_WIDTH or height < _LEAST_HEIGHT:
        raise UsageError(
            f"{width} columns and {height} rows are too small for a plot",
            hint=f"at least --width {_LEAST_WIDTH} --height {_LEAST_HEIGHT}",
        )


if __name__ == "__main__":
    sys.exit(main())
