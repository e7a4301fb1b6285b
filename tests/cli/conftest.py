"""A clean place for every test: no settings from outside, an empty working directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.support import ckpt, fill


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with nothing configured anywhere."""
    for key in list(os.environ):
        if key.startswith(("CKPT_", "CKPTSTORE_", "XDG_", "_CKPT")):
            monkeypatch.delenv(key)
    for key in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "PYTHONWARNINGS"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = signal.getsignal(signal.SIGTERM)
    yield here
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def source(place: Path) -> Path:
    """A small directory to push."""
    out = fill(
        place / "out",
        {
            "model.bin": bytes(range(256)) * 400,
            "config.json": b'{"layers": 2}\n',
            "nested/deep/state.pt": b"state" * 100,
            "empty.txt": b"",
        },
    )
    (out / "run.sh").write_bytes(b"#!/bin/sh\n")
    (out / "run.sh").chmod(0o755)
    (out / "cache").mkdir()
    return out


@pytest.fixture
def store(place: Path, source: Path) -> Path:
    """A store that holds gsm8k@400 and gsm8k@500."""
    root = place / "store"
    ckpt("push", source, f"{root}/gsm8k@400").ok()
    (source / "config.json").write_bytes(b'{"layers": 3}\n')
    ckpt("push", source, f"{root}/gsm8k@500").ok()
    return root
