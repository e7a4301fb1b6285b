"""The command as a process: exit codes, signals, pipes and terminals."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.support import (
    CKPT,
    Ran,
    ckpt,
    ckpt_on_terminal,
    ckpt_process,
    contents,
    fill,
    names_of,
    overwrite,
    record_of,
    start,
)

# Exit codes (the codes for access and space have files of their own)


def test_exit_codes(place: Path, store: Path, source: Path) -> None:
    ckpt_process("list", store).ok()
    different = ckpt_process("diff", f"{store}/gsm8k@400", f"{store}/gsm8k@500")
    assert (different.code, different.err) == (1, "")
    ckpt_process("list").failed(2, "no store given")
    ckpt_process("list", "--no-such-option").failed(2)
    ckpt_process("no-such-command").failed(2)
    ckpt_process("list", place / "nope").failed(4)
    ckpt_process("list", store, "nope").failed(4)
    ckpt_process("show", f"{store}/gsm8k@450").failed(4)
    ckpt_process("push", place / "nope", f"{store}/gsm8k@1").failed(4)
    ckpt_process("pull", f"{store}/gsm8k@500", source).failed(6)
    overwrite(record_of(store), b"")
    ckpt_process("show", f"{store}/gsm8k@500").failed(5)


def test_version_and_bare_command() -> None:
    assert re.fullmatch(r"ckpt \d+\.\d+\.\d+\S*\n", ckpt_process("--version").ok().out)
    bare = ckpt_process()
    assert "Traceback" not in bare.err
    assert "Usage: ckpt" in bare.out + bare.err


def test_errors_are_one_sentence_and_a_hint_after_a_blank_line(store: Path) -> None:
    ran = ckpt_process("show", f"{store}/gsm8k@450").failed(4)
    error, blank, hint = ran.err.splitlines()
    assert error.startswith("error: ")
    assert blank == ""
    assert hint.startswith("hint: ")
    assert ran.out == ""


# Signals


def _long_source(place: Path, count: int) -> Path:
    """Files enough that a push (or pull) of them is still under way when a signal comes."""
    return fill(place / "long", {f"part-{i:04}.bin": os.urandom(64 * 1024) for i in range(count)})


def _complete(run: Path) -> int:
    directories = [p for p in run.glob("*-step-*") if p.is_dir()] if run.is_dir() else []
    return sum(1 for d in directories for p in d.iterdir() if not p.name.startswith("."))


@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_in_the_middle_of_a_push(
    place: Path, number: signal.Signals, code: int, says: str, threads: str
) -> None:
    source = _long_source(place, 600)
    store = place / "store"
    ref = f"{store}/gsm8k@500"
    process = start("push", source, ref, "--threads", threads)
    while process.poll() is None and _complete(store / "gsm8k") < 20:
        time.sleep(0.001)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, (process.returncode, out, err)
    assert (out, "Traceback" in err) == ("", False)
    assert says in err
    assert ckpt("list", store, "--json").json == []
    complete = _complete(store / "gsm8k")
    assert 20 <= complete < 600
    again = ckpt("push", source, ref, "--json").ok().json
    assert again["sent_bytes"] == (600 - complete) * 64 * 1024  # no complete file is sent again
    ckpt("verify", store, "--deep").ok()
    assert len([p for p in (store / "gsm8k").glob("*-step-*") if p.is_dir()]) == 1
    assert list((store / "gsm8k" / "leases").iterdir()) == []


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.15])
def test_an_interrupt_at_the_very_start_shows_no_traceback(place: Path, delay: float) -> None:
    process = start("list", place / "nowhere")
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    # Before our first line Python itself may say something, and end with 1.
    assert process.returncode in (-signal.SIGINT, 130, 4, 1)
    assert "/cli/" not in err, err


def test_signals_in_the_middle_of_a_pull(place: Path) -> None:
    source = _long_source(place, 1200)
    ref = f"{place}/store/gsm8k@500"
    ckpt("push", source, ref).ok()
    for number in (signal.SIGINT, signal.SIGTERM):
        dest = place / f"restored-{number}"
        process = start("pull", ref, dest)
        while process.poll() is None and len(list(dest.glob(".ckpt-pull-*/files/*"))) < 20:
            time.sleep(0.001)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 128 + number, err
        assert "Traceback" not in err
        assert [p.name for p in dest.iterdir() if not p.name.startswith(".ckpt-pull-")] == []
        again = ckpt("pull", ref, dest, "--json").ok().json
        assert again["sent_bytes"] < again["bytes"]
        assert contents(dest) == contents(source)


# Pipes


def _many_rows(place: Path) -> Path:
    store, source = place / "store", fill(place / "tiny", {"a": b"a"})
    for step in range(3):
        ckpt("push", source, f"{store}/gsm8k@{step}", "-q").ok()
    return store


def test_a_reader_that_stops_reading_is_no_error(place: Path) -> None:
    store = _many_rows(place)
    script = f'"{CKPT}" list "{store}" | head -1'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gsm8k@0\tok\t")


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["show"], ["verify"]])
def test_a_reader_that_is_gone_from_the_start(place: Path, command: list[str]) -> None:
    store = _many_rows(place)
    reader, writer = os.pipe()
    os.close(reader)
    target = f"{store}/gsm8k@1" if command == ["show"] else store
    try:
        ran = ckpt_process(*command, target, stdout=writer)
    finally:
        os.close(writer)
    assert (ran.code, ran.err) == (141, "")


def test_data_goes_to_stdout_and_everything_else_to_stderr(place: Path, store: Path) -> None:
    ran = ckpt_process("list", store).ok()
    assert len(ran.out.splitlines()) == 2
    assert ran.err == ""
    for command in (["list", place / "nope"], ["show", f"{store}/gsm8k@1", "--json"]):
        ran = ckpt_process(*command).failed(4)
        assert ran.out == ""


def test_output_in_a_pipe_has_tabs_no_colour_and_no_header(store: Path) -> None:
    ckpt("tag", f"{store}/gsm8k@400", "release").ok()
    for env in ({}, {"TERM": "xterm-256color", "COLUMNS": "20"}, {"FORCE_COLOR": "1"}):
        ran = ckpt_process("list", store, env=env).ok()
        assert "\x1b" not in ran.out + ran.err
        rows = [line.split("\t") for line in ran.out.splitlines()]
        assert [len(row) for row in rows] == [8, 8]
        assert rows[0][:2] == ["gsm8k@400", "ok"]
        assert rows[0][3] == "5"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", rows[0][4])
        assert rows[0][5] == "release"


def test_a_push_in_a_pipe_shows_no_progress_bar(place: Path, source: Path) -> None:
    ran = ckpt_process("push", source, f"{place}/store/gsm8k@1").ok()
    assert ran.err == ""
    assert len(ran.out.splitlines()) == 1


def test_json_in_a_pipe_is_one_line(store: Path) -> None:
    ran = ckpt_process("list", store, "--json").ok()
    assert ran.out.count("\n") == 1
    json.loads(ran.out)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["verify"]])
def test_stdout_on_a_full_disk_is_an_error_and_no_traceback(
    store: Path, command: list[str]
) -> None:
    with open("/dev/full", "wb") as full:
        ran = ckpt_process(*command, store, stdout=full)
    ran.failed(8, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"], ids=["out", "err", "in", "all"]
)
def test_closed_streams_are_no_crash(place: Path, store: Path, redirection: str) -> None:
    """As a daemon or a careless cron line starts things."""
    script = (
        f'{{ "{CKPT}" list "{store}" && "{CKPT}" list "{store}" --json '
        f'&& "{CKPT}" show "{store}/gsm8k@500" && "{CKPT}" verify "{store}" '
        f'&& "{CKPT}" delete --force "{store}/gsm8k@400"; }} {redirection}; echo $? >result'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    assert (place / "result").read_text() == "0\n"


# Terminals


def test_a_table_with_a_header_on_a_terminal(store: Path) -> None:
    ckpt("tag", f"{store}/gsm8k@400", "release").ok()
    shown = ckpt_on_terminal("list", store)
    assert (shown.code, shown.err) == (0, "")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.out).splitlines()
    assert plain[0].split() == ["REF", "STATE", "SIZE", "SAVED", "DETAILS"]
    assert plain[1].split()[:2] == ["gsm8k@400", "ok"]
    assert "\t" not in shown.out
    assert "\x1b[" in shown.out  # in colour
    assert len({len(line.split("release")[0]) for line in plain if "release" in line}) == 1


def test_no_color_is_respected(store: Path) -> None:
    shown = ckpt_on_terminal("list", store, env={"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", shown.out)


def test_a_narrow_terminal_keeps_refs_and_states_whole(store: Path) -> None:
    shown = ckpt_on_terminal("list", store, env={"COLUMNS": "60", "NO_COLOR": "1"})
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.out)
    for text in ("gsm8k@400", "gsm8k@500", "ok"):
        assert text in plain


@pytest.mark.parametrize("command", ["push", "pull", "verify"])
def test_a_progress_bar_on_stderr_of_a_terminal(place: Path, command: str) -> None:
    source = fill(place / "big", {"big.bin": os.urandom(48 * 1024 * 1024)})
    ref = f"{place}/store/gsm8k@500"
    if command != "push":
        ckpt("push", source, ref).ok()
    args: dict[str, list[str | Path]] = {
        "push": ["push", source, ref],
        "pull": ["pull", ref, place / "restored"],
        "verify": ["verify", ref, "--deep"],
    }
    shown = ckpt_on_terminal(*args[command])
    assert shown.code == 0
    assert "━" in shown.err
    assert "MB" in shown.err
    assert "━" not in shown.out
    assert "gsm8k@500" in shown.out
    if command == "verify":
        for option in ("--no-progress", "--quiet"):
            assert ckpt_on_terminal(*args[command], option).err == ""


def test_json_on_a_terminal_is_indented(store: Path) -> None:
    shown = ckpt_on_terminal("list", store, "--json")
    assert shown.out.startswith("[\n  {\n")
    assert len(json.loads(shown.out)) == 2


def test_a_dangerous_delete_asks_on_a_terminal(store: Path) -> None:
    delete = ("delete", f"{store}/gsm8k@500", "--force")
    shown = ckpt_on_terminal(*delete, answer="n\n")
    assert shown.code == 1
    assert "delete gsm8k@500?" in shown.err
    assert len(names_of(store)) == 2
    assert ckpt_on_terminal(*delete, answer="y\n").code == 0
    assert len(names_of(store)) == 1
    shown = ckpt_on_terminal("delete", f"{store}/gsm8k@400", "--force", "--yes")
    assert (shown.code, "?" in shown.err) == (0, False)


def test_nothing_asks_without_a_terminal(store: Path) -> None:
    ran = ckpt_process("delete", f"{store}/gsm8k@500", "--force", stdin=subprocess.DEVNULL)
    assert "?" not in ran.ok().err


# What is loaded

HEAVY = ("numpy", "torch", "ray", "boto3", "botocore", "pyarrow", "s3fs", "fsspec", "pydantic")


@pytest.mark.parametrize("command", [["--help"], ["list"], ["list", "--json"], ["push", "--help"]])
def test_nothing_heavy_is_imported(store: Path, command: list[str]) -> None:
    args = [*command, str(store)] if command[0] == "list" else command
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(CKPT), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    loaded = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert "ckptstore" in loaded or command[-1] == "--help"
    assert loaded.isdisjoint(HEAVY)


def test_quiet_and_json_print_only_the_document(store: Path) -> None:
    ran = ckpt_process("list", store, "--json", "--quiet").ok()
    assert len(ran.json) == 2
    assert isinstance(ran, Ran)
