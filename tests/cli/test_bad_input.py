"""Arguments that cannot be: each is a sentence on stderr, an exit code, and never a traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.support import HAZARDS, STRICT, ckpt, ckpt_process, contents, fill, names_of

TAKE_A_REF = (
    ["show"],
    ["pull", "DEST"],
    ["verify"],
    ["delete"],
    ["undelete"],
    ["pin"],
    ["tag", "release"],
    ["resume-info"],
    ["diff", "SOURCE"],
    ["push"],
)
"""Commands that take a REF, with what stands behind it (for push: before it)."""

BAD_REFS = {
    "no run": "{store}/@5",
    "no run, alone": "@5",
    "no selector": "{store}/gsm8k@",
    "only an at": "@",
    "negative step": "{store}/gsm8k@-1",
    "plus sign": "{store}/gsm8k@+5",
    "arabic digits": "{store}/gsm8k@٥٠٠",
    "superscript": "{store}/gsm8k@5²",
    "fullwidth digits": "{store}/gsm8k@５００",
    "fraction": "{store}/gsm8k@1.5",
    "run that goes up": "{store}/..@1",
    "run that stays": "{store}/.@1",
    "run that is hidden": "{store}/.git@1",
    "reserved run": "{store}/mirrors@1",
    "reserved run in capitals": "{store}/MIRRORS@1",
    "run with a space": "{store}/a b@1",
    "run with an escape": "{store}/a\x1b[31m@1",
    "run that is too long": "{store}/" + "r" * 201 + "@1",
    "huge step": "{store}/gsm8k@1000000000000000",
    "step of 5000 digits": "{store}/gsm8k@" + "9" * 5000,
    "tag in capitals": "{store}/gsm8k@Release",
    "tag with an escape": "{store}/gsm8k@a\x1b]0;x\x07",
    "tag like a step": "{store}/gsm8k@step-5",
    "two ats": "{store}/gsm8k@5@6",
    "name with a bad seq": "{store}/gsm8k@1-step-00000500-abcdefgh",
    "unknown scheme": "gopher://host/gsm8k@1",
    "scheme without a place": "memory:///@1",
    "unknown option": "file:///tmp/x/gsm8k@1?color=red",
    "a secret": "file:///tmp/x/gsm8k@1?secret_key=hunter2",
    "a password": "s3://user:hunter2@bucket/gsm8k@1",
    "a host": "file://host/tmp/gsm8k@1",
}


def _arguments(command: list[str], ref: str, place: Path) -> list[str]:
    rest = {"DEST": str(place / "restored"), "SOURCE": str(place / "out")}
    behind = [rest.get(word, word) for word in command[1:]]
    return ["push", str(place / "out"), ref] if command == ["push"] else [command[0], ref, *behind]


@pytest.mark.parametrize("what", BAD_REFS)
def test_a_ref_that_cannot_be(store: Path, place: Path, what: str) -> None:
    before = contents(store)
    ref = BAD_REFS[what].format(store=store)
    for command in TAKE_A_REF:
        ran = ckpt(*_arguments(command, ref, place)).failed(2)
        assert ran.err.startswith("error: ")
        assert len(ran.err.partition("\nhint: ")[0].strip().splitlines()) == 1
        assert "hunter2" not in ran.err
        assert not any(hazard in ran.err for hazard in HAZARDS)
    assert contents(store) == before
    assert not (place / "restored").exists()


@pytest.mark.parametrize("command", TAKE_A_REF, ids=lambda c: c[0])
def test_an_empty_ref(store: Path, place: Path, command: list[str]) -> None:
    env = {"CKPT_STORE": str(store)}
    ran = ckpt(*_arguments(command, "", place), env=env)
    if command == ["verify"]:
        assert ran.code in (0, 2)
    elif command[0] == "diff":  # an empty text is no REF, so it is a directory: there is none
        assert ran.code in (2, 4)
    else:
        ran.failed(2)


@pytest.mark.parametrize("cwd_holds", [{}, {"precious.txt": b"mine"}])
def test_an_empty_directory_argument_is_not_the_working_directory(
    store: Path, place: Path, monkeypatch: pytest.MonkeyPatch, cwd_holds: dict[str, bytes]
) -> None:
    """As it comes from ``"$UNSET"`` in a script."""
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(fill(elsewhere, cwd_holds))
    ran = ckpt("push", "", f"{store}/gsm8k@600")
    assert ran.code in (2, 4)
    assert ran.err.startswith("error: ")
    ran = ckpt("pull", f"{store}/gsm8k@500", "")
    assert ran.code in (2, 4)
    assert ran.err.startswith("error: ")
    ran = ckpt("diff", f"{store}/gsm8k@500", "")
    assert ran.code in (2, 4)
    assert len(names_of(store)) == 2
    assert contents(elsewhere) == cwd_holds


@pytest.mark.parametrize("command", ["list", "gc"])
def test_runs_that_cannot_be(store: Path, command: str) -> None:
    for run in ("..", ".", "a/b", "../gsm8k", "mirrors", "", "a b", "-", "a\x1b[31m", "r" * 300):
        ran = ckpt(command, store, "--", run) if run == "-" else ckpt(command, store, run)
        ran.failed(2)
        assert "\x1b" not in ran.err


@pytest.mark.parametrize("command", ["init", "list", "gc", "verify"])
@pytest.mark.parametrize(
    "uri", ["gopher://x/y", "memory://", "file:///tmp/x?color=red", "s3://u:hunter2@b/p", ""]
)
def test_stores_that_cannot_be(place: Path, command: str, uri: str) -> None:
    ran = ckpt(command, uri).failed(2)
    assert "hunter2" not in ran.err


def test_a_store_given_twice(store: Path) -> None:
    ckpt("show", f"{store}/gsm8k@500", "--store", store).failed(2, "--store")
    ckpt("list", store, "gsm8k", "--store", store).failed(2)


TAGS = ["latest", "best", "step-5", "Release", "5", "", "a b", "-a", "ä", "a\x1b[31m", "t" * 101]


@pytest.mark.parametrize("tag", TAGS)
def test_tags_that_cannot_be(store: Path, source: Path, tag: str) -> None:
    for ref in ("gsm8k@500", "gsm8k@600"):  # content that is there, and a new checkpoint
        ran = ckpt("push", source, f"{store}/{ref}", f"--tag={tag}").failed(2)
        assert "\x1b" not in ran.err
    ran = ckpt("tag", f"{store}/gsm8k@500", "--", tag).failed(2)
    assert "\x1b" not in ran.err
    assert len(names_of(store)) == 2
    assert not [p for p in (store / "gsm8k").iterdir() if "-step-00000600-" in p.name]


OPTIONS = [
    ["--metric", "nan"],
    ["--metric", "reward=nan"],
    ["--metric", "reward=inf"],
    ["--metric", "reward=-Infinity"],
    ["--metric", "reward=1e999"],
    ["--metric", "reward="],
    ["--metric", "reward=high"],
    ["--metric", "=5"],
    ["--metric", ""],
    ["--metric", "a\x1b[31m=x"],
    ["--meta", "novalue"],
    ["--meta", ""],
    ["--meta", "a\x1b[31m"],
    ["--best", "reward:up"],
    ["--best", ":max"],
    ["--best", ""],
    ["--best", "a\x1b[31m:up"],
    ["--threads", "0"],
    ["--threads", "-1"],
    ["--threads", "257"],
    ["--threads", "many"],
    ["--threads", ""],
    ["--no-such-option"],
]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_options_that_cannot_be(place: Path, source: Path, options: list[str]) -> None:
    ran = ckpt("push", source, f"{place}/store/gsm8k@1", *options).failed(2)
    assert "\x1b" not in ran.err
    assert not (place / "store").exists()


@pytest.mark.parametrize("command", TAKE_A_REF, ids=lambda c: c[0])
def test_a_missing_argument(command: list[str]) -> None:
    if command[0] != "verify":
        ckpt(command[0]).failed(2)


def test_a_store_path_that_is_a_file(place: Path, source: Path) -> None:
    (place / "file").write_bytes(b"I am a file")
    ckpt("list", place / "file").failed(4)
    ckpt("show", f"{place}/file/gsm8k@1").failed(4)
    ckpt("gc", place / "file").failed(4)
    ran = ckpt("push", source, f"{place}/file/gsm8k@1")
    assert ran.code in (4, 6)
    assert ran.err.startswith("error: ")
    assert (place / "file").read_bytes() == b"I am a file"


def test_a_store_path_that_is_a_dangling_link(place: Path, source: Path) -> None:
    (place / "link").symlink_to(place / "nowhere")
    ckpt("list", place / "link").failed(4)
    ran = ckpt("push", source, f"{place}/link/gsm8k@1")
    assert ran.code in (0, 4, 6)
    assert "Traceback" not in ran.err


def test_a_source_that_is_a_file(place: Path, store: Path) -> None:
    (place / "file").write_bytes(b"I am a file")
    ckpt("push", place / "file", f"{store}/gsm8k@1").failed(4, "not a directory")
    ckpt("push", place / "nope", f"{store}/gsm8k@1").failed(4, "does not exist")
    ckpt("diff", f"{store}/gsm8k@500", place / "file").failed(4)


def test_a_path_that_is_too_long(place: Path, source: Path) -> None:
    long = place / ("x" * 300)
    for command in (
        ["list", long],
        ["init", long],
        ["show", f"{long}/gsm8k@1"],
        ["push", source, f"{long}/gsm8k@1"],
        ["push", long, f"{place}/store/gsm8k@1"],
    ):
        ran = ckpt(*command)
        assert ran.code in (2, 4), ran
        assert ran.err.startswith("error: ")


def test_a_nul_in_a_path_is_refused(place: Path, store: Path) -> None:
    """Not possible on a command line, but in ckpt.toml."""
    fill(place, {"ckpt.toml": b'store = "/tmp/a\\u0000b"\n'})
    ckpt("list").failed(2)


@pytest.mark.parametrize("name", ["red\x1b[31m", "c1\x9b31m", "rtl\u202e"])
def test_a_store_path_that_moves_a_cursor_is_printed_escaped(
    place: Path, source: Path, name: str
) -> None:
    root = place / name
    for args in (
        ["list", root],
        ["show", f"{root}/gsm8k@1"],
        ["push", source, f"{root}/gsm8k@1"],
        ["init", root],
        ["show", f"{root}/gsm8k@2"],
        ["list", root, "other"],
        ["show", f"{root}/gsm8k@1"],
        ["push", place / name / "nope", f"{root}/gsm8k@3"],
        ["pull", f"{root}/gsm8k@1", place / f"to{name}"],
        ["pull", f"{root}/gsm8k@1", place / f"to{name}"],
        ["push", "-n", source, f"{root}/gsm8k@4"],
    ):
        ran = ckpt(*args)
        assert not any(h in ran.out + ran.err for h in HAZARDS), (args, ran)


def test_paths_that_are_no_text(place: Path, source: Path) -> None:
    root = os.fsdecode(os.fsencode(place) + b"/\xff\xfe")
    for args in (
        ["init", root],
        ["push", source, f"{root}/gsm8k@1"],
        ["list", root],
        ["show", f"{root}/gsm8k@1"],
        ["show", f"{root}/gsm8k@1", "--json"],
        ["init", root, "--json"],
        ["pull", f"{root}/gsm8k@1", f"{root}-restored"],
        ["diff", f"{root}/gsm8k@1", f"{root}-restored"],
    ):
        ran = ckpt_process(*args, env=STRICT)
        assert "Traceback" not in ran.err, ran.err
        ran.ok()
    ckpt_process("show", f"{place}/store/\udcff@1").failed(2)
    ckpt_process("push", source, f"{root}/gsm8k@2", "--meta", "k=\udcff").failed(2)
