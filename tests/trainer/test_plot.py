"""The plot of a metric, as a person at a terminal gets it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import NotFoundError
from trainer.plot import draw, lives_of, main

pytest.importorskip("plotext")


def _records() -> list[dict[str, Any]]:
    spans = ((1, 1, 20), (2, 21, 40), (3, 41, 60))
    return [
        {"step": step, "life": life, "reward/mean": 1 - math.exp(-step / 20)}
        for life, first, last in spans
        for step in range(first, last + 1)
    ]


def _file(tmp_path: Path, records: list[dict[str, Any]]) -> str:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 61, "li')
    return str(path)


def test_lives_are_joined_where_the_run_was_resumed() -> None:
    one, two, three = lives_of(_records(), "reward/mean")
    assert (one.steps[0], one.steps[-1]) == (1, 20)
    assert (two.steps[0], two.steps[-1]) == (20, 40)
    assert two.values[0] == one.values[-1]
    assert three.number == 3


def test_values_that_are_no_numbers_are_left_out() -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "life": 1, "kl": 0.5},
        {"step": 2, "life": 1, "kl": None},
        {"step": 3, "life": 1, "kl": math.nan},
        {"step": 4, "life": 1},
        {"kl": 1.0},
    ]
    assert [life.steps for life in lives_of(records, "kl")] == [[1]]


def test_an_unknown_metric_is_answered_with_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="no line has the metric loss") as caught:
        lives_of(_records(), "loss")
    assert caught.value.hint == "there are: reward/mean"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (30, 10)])
@pytest.mark.parametrize("colours", [True, False])
def test_the_plot_fits_and_names_every_life(width: int, height: int, colours: bool) -> None:
    text = draw(lives_of(_records(), "reward/mean"), "reward/mean", width, height, colours=colours)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = plain.splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[0].strip() == "reward/mean"
    assert lines[-1].strip() == "step"
    assert {"life 1", "life 2", "life 3"} <= set(re.findall(r"life \d", plain))
    assert ("\x1b[" in text) == colours


def test_lives_are_told_apart_without_colours() -> None:
    text = draw(lives_of(_records(), "reward/mean"), "r", 80, 24, colours=False)
    body = "\n".join(text.splitlines()[2:])
    assert "▀" in body  # life 1 in blocks
    assert any("\u2800" < c <= "\u28ff" for c in body)  # life 2 in dots
    assert "*" in body  # life 3


def test_axes_have_round_numbers() -> None:
    lines = draw(lives_of(_records(), "reward/mean"), "r", 80, 24, colours=False).splitlines()
    assert lines[-2].split() == ["10", "20", "30", "40", "50", "60"]
    assert re.findall(r"^(\S+)┤", "\n".join(lines), re.MULTILINE) == ["0.8", "0.6", "0.4", "0.2"]


@pytest.mark.parametrize("value", [0.0, 0.5, -3e-9, 1e12])
def test_one_point_and_constant_metrics_are_drawn(value: float) -> None:
    for count in (1, 5):
        records: list[dict[str, Any]] = [{"step": n, "life": 1, "m": value} for n in range(count)]
        assert "life 1" in draw(lives_of(records, "m"), "m", 80, 24, colours=False)


def test_many_lives_leave_room_for_the_plot() -> None:
    records: list[dict[str, Any]] = [{"step": n, "life": n, "m": n} for n in range(1, 100)]
    lines = draw(lives_of(records, "m"), "m", 80, 24, colours=False).splitlines()
    assert len(lines) <= 24
    assert "… to life 99" in "\n".join(lines[:4])
    assert "┌" in lines[4]


def test_the_command_draws_a_file_with_a_torn_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([_file(tmp_path, _records()), "--width", "80", "--height", "20"]) == 0
    out, err = capsys.readouterr()
    assert "reward/mean" in out
    assert "\x1b" not in out
    assert len(out.splitlines()) <= 20
    assert not err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{file}", "--metric", "x"], 4, "hint: there are: reward/mean"),
        (["{file}", "--width", "5"], 2, "at least --width 30 --height 10"),
        (["{file}.missing"], 4, "No such file"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    file = _file(tmp_path, _records())
    assert main([a.format(file=file) for a in arguments]) == code
    out, err = capsys.readouterr()
    assert says in err
    assert not out
