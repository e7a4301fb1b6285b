"""Metrics: lines that survive a kill, resumes without steps that never were, loggers that fail."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import NotFoundError, UsageError
from trainer import metricsfile
from trainer.console import short, step_line
from trainer.tracking import Tracker, read_metrics

_ROOT = str(Path(__file__).parents[2])

_STEP: dict[str, float | str] = {
    "reward/mean": 0.412,
    "kl/mean": 0.0031,
    "actor/loss": -0.0123,
    "critic/loss": 0.0412,
    "actor/grad_norm": 1.21,
    "response/length": 7.9,
    "time/step": 1.2,
}


def _tracker(directory: Path, life: int = 1, *loggers: str, **more: Any) -> Tracker:
    return Tracker(directory, "gsm", life, loggers, "team", {"seed": 1}, console=False, **more)


def _log(directory: Path, life: int, resumed_from: int | None, last: int) -> None:
    tracker = _tracker(directory, life)
    tracker.start(resumed_from)
    for step in range((resumed_from or 0) + 1, last + 1):
        tracker.log(step, {"reward/mean": step / 10})
    tracker.close()


def _steps(path: Path) -> list[tuple[int, int]]:
    return [(record["step"], record["life"]) for record in read_metrics(path)]


# -- the file


def test_a_line_is_one_write_and_reads_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    real = os.write

    def write(fd: int, data: bytes) -> int:
        writes.append(data)
        return real(fd, data)

    tracker = _tracker(tmp_path)
    tracker.start(None)
    monkeypatch.setattr(os, "write", write)
    value = math.nextafter(0.1, 1)
    tracker.log(7, {"reward/mean": value, "data/epoch": 2, "digest": "ab"})
    monkeypatch.undo()
    assert len(writes) == 1
    assert read_metrics(tmp_path / "metrics.jsonl") == [  # before any flush
        {"step": 7, "life": 1, "reward/mean": value, "data/epoch": 2, "digest": "ab"}
    ]
    tracker.close()


def test_values_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    tracker = _tracker(tmp_path)
    tracker.start(None)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    tracker.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert [record[k] for k in "abcd"] == [None, None, None, 1.0]
    assert record["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}


def test_reading_passes_over_what_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n\n{"step": 2}\n' + b"[" * 50_000 + b'\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    with pytest.raises(NotFoundError, match="missing"):
        read_metrics(tmp_path / "missing")


def test_a_resume_moves_the_lines_beyond_its_step_aside(tmp_path: Path) -> None:
    _log(tmp_path, 1, None, 13)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 14, "li')  # a kill
    _log(tmp_path, 2, 10, 12)
    assert _steps(tmp_path / "metrics.jsonl") == [
        *((n, 1) for n in range(1, 11)),
        (11, 2),
        (12, 2),
    ]
    discarded = tmp_path / "metrics.discarded-2.jsonl"
    assert _steps(discarded) == [(11, 1), (12, 1), (13, 1)]
    assert discarded.read_bytes().endswith(b'{"step": 14, "li\n')


def test_a_start_from_scratch_moves_every_line_aside(tmp_path: Path) -> None:
    _log(tmp_path, 1, None, 3)
    _log(tmp_path, 2, None, 1)
    assert _steps(tmp_path / "metrics.jsonl") == [(1, 2)]
    assert _steps(tmp_path / "metrics.discarded-2.jsonl") == [(1, 1), (2, 1), (3, 1)]


def test_a_start_with_nothing_beyond_leaves_every_byte(tmp_path: Path) -> None:
    _log(tmp_path, 1, None, 3)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):
        tracker = _tracker(tmp_path, 2)
        tracker.start(3)
        tracker.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_the_same_life_may_start_again(tmp_path: Path) -> None:
    _log(tmp_path, 1, None, 5)
    _log(tmp_path, 2, 3, 4)
    _log(tmp_path, 2, 2, 2)
    assert _steps(tmp_path / "metrics.jsonl") == [(1, 1), (2, 1)]
    assert _steps(tmp_path / "metrics.discarded-2.jsonl") == [(4, 1), (5, 1), (3, 1), (4, 2)]


def test_an_older_process_cannot_write_into_the_file_any_more(tmp_path: Path) -> None:
    old = _tracker(tmp_path, 1)
    old.start(None)
    old.log(1, {"a": 1.0})
    new = _tracker(tmp_path, 2)
    new.start(1)
    old.log(2, {"a": 1.0})
    new.log(2, {"a": 2.0})
    assert _steps(tmp_path / "metrics.jsonl") == [(1, 1), (2, 2)]
    old.close()
    new.close()


class _Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def _kill_at(count: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Kill before the ``count``-th call that changes the disk; returns how many there were."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                raise _Killed
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(metricsfile, "_write", _writing_half(counted))
    return lambda: calls


def _writing_half(counted: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """A kill in the middle of a file leaves a part of it."""
    real = metricsfile._write
    ok = counted(lambda: None)

    def write(path: Path, lines: list[bytes]) -> None:
        try:
            ok()
        except _Killed:
            path.write_bytes(b"".join(line + b"\n" for line in lines)[:7])
            raise
        real(path, lines)

    return write


def _everything(directory: Path) -> Counter[bytes]:
    files = [p for p in directory.iterdir() if p.name.endswith(".jsonl")]
    return Counter(line for p in files for line in p.read_bytes().splitlines())


@pytest.mark.parametrize("then", [(2, 6), (3, 8), (3, None)])
def test_a_kill_anywhere_in_a_start_loses_and_doubles_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: tuple[int, int | None]
) -> None:
    life, resumed_from = then
    for count in range(1, 100):
        directory = tmp_path / str(count)
        _log(directory, 1, None, 9)
        lines = _everything(directory)
        with monkeypatch.context() as patched:
            calls = _kill_at(count, patched)
            try:
                _tracker(directory, 2).start(6)
            except _Killed:
                for again in range(1, 100):  # the next start is killed as well, everywhere
                    patched.undo()
                    calls_again = _kill_at(again, patched)
                    try:
                        _tracker(directory, life).start(resumed_from)
                    except _Killed:
                        continue
                    assert calls_again() < again
                    break
        killed = calls() >= count
        _tracker(directory, life).start(resumed_from)
        assert _everything(directory) == lines
        kept = [step for step, _ in _steps(directory / "metrics.jsonl")]
        assert kept == sorted(kept)
        assert all(step <= (resumed_from or 0) for step in kept)
        assert not list(directory.glob("*.part"))
        if not killed:
            assert count > 6
            return
    raise AssertionError("it was killed each time")


def test_a_full_disk_is_one_warning_and_later_lines_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = _tracker(tmp_path)
    tracker.start(None)
    tracker.log(1, {"a": 1.0})
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
    tracker.log(2, {"a": 2.0})
    tracker.log(3, {"a": 3.0})
    monkeypatch.undo()
    tracker.log(4, {"a": 4.0})
    tracker.close()
    assert _steps(tmp_path / "metrics.jsonl") == [(1, 1), (4, 1)]
    err = capsys.readouterr().err
    assert err.count("training goes on without its metrics on disk: no space left") == 1
    assert "hint: free some space" in err


# -- the console


def _widths(width: int, **more: float) -> str:
    return step_line(12, 60, {**_STEP, **more}, width).plain


def test_a_step_is_a_line_that_fits() -> None:
    assert _widths(80) == (
        "step 12/60  reward 0.412    kl 0.0031   loss -0.0123  critic 0.0412   1.20 s"
    )
    for width in (40, 60, 80, 100, 200):
        assert len(_widths(width, **{"val/reward": 0.5, "actor/lr": 1e-6})) <= width
    assert "grad 1.21" in _widths(200)


def test_lines_line_up_and_leave_out_what_was_not_measured() -> None:
    one = step_line(2, 60, _STEP, 80).plain
    other = step_line(
        12, 60, {**_STEP, "kl/mean": -3.1e-5, "actor/loss": math.nan, "reward/mean": 1234.5}, 80
    ).plain
    assert [one.index(word) for word in ("kl", "loss", "critic", "1.20 s")] == [
        other.index(word) for word in ("kl", "loss", "critic", "1.20 s")
    ]
    assert "loss nan" in other
    assert step_line(3, None, {"val/reward": 0.5}, 80).plain == "step     3  val 0.500"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41234, "0.412"),
        (-0.01234, "-0.0123"),
        (0.00312, "0.0031"),
        (0.000312, "3.1e-04"),
        (-0.000312, "-3e-04"),
        (12.345, "12.3"),
        (123.45, "123"),
        (99999.0, "99999"),
        (1e6, "1.0e+06"),
        (0, "0"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
    assert len(text) <= 7


def test_texts_of_others_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(tmp_path, "gsm", 1, [], "team", {})
    tracker.note("saved [bold]gsm@10[/bold] \x1b[31m")
    tracker.warn("[/] the mirror\nis behind", "see [docs]")
    out, err = capsys.readouterr()
    assert not out
    assert err == (
        "saved [bold]gsm@10[/bold] \\x1b[31m\n"
        "warning: [/] the mirror\nis behind\n  hint: see [docs]\n"
    )


def test_without_a_console_only_warnings_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = _tracker(tmp_path)
    tracker.start(None)
    tracker.log(1, _STEP)
    tracker.note("a note")
    tracker.warn("a warning")
    tracker.close()
    assert capsys.readouterr() == ("", "warning: a warning\n")


def test_a_stream_that_cannot_spell_a_text_shows_it_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii"))
    Tracker(tmp_path, "gsm", 1, [], "team", {}).note("a → b")
    assert raw.getvalue() == b"a \\u2192 b\n"


_LOGGING = """
import sys
from pathlib import Path
from trainer.tracking import Tracker
tracker = Tracker(Path(sys.argv[1]), "gsm", 1, [], "team", {})
tracker.start(None, 3000)
for step in range(1, 3001):
    tracker.log(step, {"reward/mean": 0.5})
tracker.close()
"""


@pytest.mark.parametrize("how", [">&-", "2>&- >&-", "| true", "> /dev/full"])
def test_nobody_listening_does_not_stop_a_training(tmp_path: Path, how: str) -> None:
    script = tmp_path / "log.py"
    script.write_text(_LOGGING)
    command = f'set -o pipefail; "{sys.executable}" "{script}" "{tmp_path}" {how}'
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": _ROOT, "PYTHONUNBUFFERED": ""},
        timeout=60,
    )
    if how == "> /dev/full":  # at its end Python itself complains about what is still unwritten
        assert "log.py" not in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3000


# -- loggers


def test_a_missing_package_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # what Weights & Biases leaves looks like a package
    real = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        if name == "wandb":
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return None if name == "tensorboard" else real(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(UsageError, match=f"needs the package {name}") as caught:
            _tracker(tmp_path, 1, name)
        assert caught.value.hint == f"pip install {name}, or leave it out of trainer.loggers"
    with pytest.raises(UsageError, match="unknown logger 'mlflow'"):
        _tracker(tmp_path, 1, "mlflow")


class _Wandb(types.ModuleType):
    """Takes the place of the client: notes its calls, fails on request."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.fails_at = fails_at
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="here")

    def _call(self, name: str, given: Any) -> None:
        self.calls.append((name, given))
        if name == self.fails_at:
            raise RuntimeError("no route to host")

    def Settings(self, **given: Any) -> dict[str, Any]:  # noqa: N802
        return given

    def init(self, **given: Any) -> _Wandb:
        self._call("init", given)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._call("define_metric", (name, step_metric))

    def log(self, given: Mapping[str, float]) -> None:
        self._call("log", given)

    def finish(self) -> None:
        self._call("finish", None)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> _Wandb:
    fake = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_wandb_run_goes_on_under_its_id(tmp_path: Path, wandb: _Wandb) -> None:
    first = _tracker(tmp_path, 1, "wandb")
    first.start(None)
    first.log(1, {"kl": 0.5, "digest": "ab"})
    first.close()
    second = _tracker(tmp_path, 2, "wandb", run_ids=json.loads(json.dumps(first.run_ids)))
    second.start(1)
    second.close()
    one, two = (given for name, given in wandb.calls if name == "init")
    assert one["id"] == two["id"] == first.run_ids["wandb"] == second.run_ids["wandb"]
    assert (one["project"], one["name"], one["resume"]) == ("team", "gsm", "allow")
    assert one["dir"] == str(tmp_path)
    assert "mode" not in one  # the environment's
    assert ("log", {"kl": 0.5, "step": 1, "life": 1}) in wandb.calls
    # The service's own counter would drop steps that an earlier life had logged.
    assert ("define_metric", ("*", "step")) in wandb.calls


def test_another_run_has_another_id(tmp_path: Path, wandb: _Wandb) -> None:
    ids = {_tracker(tmp_path, 1, "wandb").run_ids["wandb"] for _ in range(5)}
    assert len(ids) == 5


@pytest.mark.parametrize("call", ["init", "define_metric", "log", "finish"])
def test_a_failing_service_is_one_warning(
    tmp_path: Path, wandb: _Wandb, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    wandb.fails_at = call
    tracker = _tracker(tmp_path, 1, "wandb")
    tracker.start(None)
    for step in (1, 2, 3):
        tracker.log(step, {"a": 1.0})
        tracker.flush()
    tracker.close()
    err = capsys.readouterr().err
    assert err.count("warning: wandb failed to ") == 1
    assert "no route to host" in err
    assert [name for name, _ in wandb.calls].count(call) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_tensorboard_shows_a_resumed_run_without_the_steps_that_came_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    one = _tracker(tmp_path, 1, "tensorboard")
    one.start(None)
    for step in range(1, 6):
        one.log(step, {"reward/mean": 1.0, "digest": "ab"})
    one.close()
    two = _tracker(tmp_path, 2, "tensorboard")
    two.start(3)
    two.log(4, {"reward/mean": 2.0})
    two.flush()
    seen = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    two.close()
    assert [(e.step, e.value) for e in seen.Scalars("reward/mean")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
    ]
    assert sorted(seen.Tags()["scalars"]) == ["reward/mean", "trainer/life"]


def test_wandb_keeps_runs_on_disk_when_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    script = tmp_path / "log.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom trainer.tracking import Tracker\n"
        "t = Tracker(Path(sys.argv[1]), 'gsm', 1, ['wandb'], 'team', {'seed': 1}, {'wandb': 'ab1'})"
        "\nt.start(None)\nt.log(1, {'reward/mean': 0.5})\nt.close()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "logs")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": _ROOT, "WANDB_MODE": "offline"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    (file,) = (tmp_path / "logs" / "wandb").glob("offline-run-*/run-ab1.wandb")
    assert b"reward/mean" in file.read_bytes()
