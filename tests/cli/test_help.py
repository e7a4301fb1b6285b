"""Help and shell completion."""

from __future__ import annotations

import os
import pty
import shutil
from pathlib import Path

import pytest

from cli.main import app
from tests.cli.support import CKPT, ckpt, ckpt_process, read_terminal

COMMANDS = (
    "push",
    "pull",
    "list",
    "show",
    "diff",
    "verify",
    "repair",
    "delete",
    "undelete",
    "pin",
    "tag",
    "prune",
    "gc",
    "mirror",
    "status",
    "backup",
    "resume-info",
    "doctor",
    "init",
    "config",
)
GROUPED = ("schedule install", "schedule list", "schedule remove")


def test_every_command_is_known_here() -> None:
    assert sorted(c.name or "" for c in app.registered_commands) == sorted(COMMANDS)
    grouped = [
        f"{group.name} {command.name}"
        for group in app.registered_groups
        if group.typer_instance is not None
        for command in group.typer_instance.registered_commands
    ]
    assert sorted(grouped) == sorted(GROUPED)


@pytest.mark.parametrize("command", COMMANDS + GROUPED)
def test_help_says_what_it_does_and_shows_an_example(command: str) -> None:
    ran = ckpt(*command.split(), "--help", env={"COLUMNS": "200"}).ok()
    assert f"Usage: ckpt {command}" in ran.words
    assert "Example: " in ran.words
    assert f"ckpt {command}" in ran.words.partition("Example: ")[2]
    assert ckpt(*command.split(), "-h", env={"COLUMNS": "200"}).ok().out == ran.out


@pytest.mark.parametrize("command", COMMANDS + GROUPED)
def test_json_and_quiet_mean_the_same_everywhere(command: str) -> None:
    words = ckpt(*command.split(), "--help", env={"COLUMNS": "200"}).ok().words
    assert "--json Print one JSON document." in words
    assert "--quiet -q Print nothing but errors." in words


def test_help_lists_the_commands_and_the_exit_codes() -> None:
    ran = ckpt("--help", env={"COLUMNS": "200"}).ok()
    for command in (*COMMANDS, "schedule"):
        assert f" {command} " in ran.words
    for code in ("2 usage", "4 not found", "5 integrity", "6 conflict", "7 access", "8 temporary"):
        assert code in ran.words


def _complete(store: Path, *words: str) -> list[str]:
    env = {
        "CKPT_STORE": str(store),
        "_CKPT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    return ckpt_process(env=env).ok().out.split()


def test_completion_offers_commands_runs_and_steps(store: Path, source: Path) -> None:
    ckpt("push", source, f"{store}/other@1").ok()
    assert set(_complete(store, "ckpt", "p")) == {"push", "pull", "pin", "prune"}
    assert _complete(store, "ckpt", "show", "gs") == ["gsm8k@"]
    offered = _complete(store, "ckpt", "show", "gsm8k@")
    assert {"gsm8k@latest", "gsm8k@best", "gsm8k@500", "gsm8k@400"} <= set(offered)
    assert "gsm8k@500" in _complete(store, "ckpt", "show", "gsm8k@5")
    assert "gsm8k@400" not in _complete(store, "ckpt", "show", "gsm8k@5")


def test_completion_without_a_store_offers_nothing_and_is_silent(place: Path) -> None:
    env = {"_CKPT_COMPLETE": "complete_bash", "COMP_WORDS": "ckpt show g", "COMP_CWORD": "2"}
    for more in ({}, {"CKPT_STORE": str(place / "nope")}, {"CKPT_STORE": "gopher://x/y"}):
        ran = ckpt_process(env=env | more)
        assert ran.out.strip() == ""
        assert ran.err == ""


@pytest.mark.parametrize(
    ("typed", "becomes"), [("gs", "gsm8k@"), ("gsm8k@5", "gsm8k@500"), ("gsm8k@l", "gsm8k@latest")]
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_a_real_bash(store: Path, typed: str, becomes: str) -> None:
    """Bash breaks words at an ``@`` by default, so asking the command alone proves little."""
    pid, fd = pty.fork()
    if pid == 0:  # pragma: no cover - another process
        os.environ.update(
            CKPT_STORE=str(store), PS1="ready> ", TERM="dumb", PATH=f"{CKPT.parent}:{os.defpath}"
        )
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        read_terminal(fd, lambda s: "ready> " in s)
        os.write(fd, b'eval "$(_CKPT_COMPLETE=source_bash ckpt)"; bind "set bell-style none"\n')
        read_terminal(fd, lambda s: "ready> " in s.partition("\n")[2])
        os.write(fd, f"ckpt show {typed}\t".encode())
        shown = read_terminal(fd, lambda s: becomes in s, seconds=20)
        assert f"ckpt show {becomes}" in shown
    finally:
        os.close(fd)
        os.waitpid(pid, 0)
