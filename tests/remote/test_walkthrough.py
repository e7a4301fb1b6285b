"""docs/backup.md, followed word for word but for the names of the places."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckptstore
from ckptstore.store import Store
from tests.crash.helpers import check_store
from tests.servers.hadoop import Hadoop
from tests.servers.s3 import Bucket
from tests.servers.seaweed import SeaweedFS

ROOT = Path(__file__).parents[2]
CRONTAB = """#!/bin/sh
case "$1" in
-l) [ -f {table} ] && exec cat {table}; echo "no crontab for me" >&2; exit 1;;
*) exec cat "${{1:--}}" >{table};;
esac
"""
"""A stand-in for the command: this machine's own table is not the test's."""


@pytest.fixture
def place(
    tmp_path: Path, seaweed: SeaweedFS, hadoop: Hadoop, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A directory with the examples, and an environment in which the page can be followed."""
    os.symlink(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "crontab"
    command.write_text(CRONTAB.format(table=tmp_path / "table"))
    command.chmod(0o755)
    bucket = Bucket.make(seaweed, monkeypatch)
    unique = f"{os.getpid()}-{time.monotonic_ns()}"
    for key, value in {
        "PRIMARY": str(tmp_path / "ckpts"),
        "BUCKET": bucket.uri(),
        "HDFS": f"hdfs://{hadoop.authority}/backups/{unique}",
        "HADOOP_USER_NAME": "root",
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }.items():
        monkeypatch.setenv(key, value)
    for key in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "CKPT_STORE", "CKPT_THREADS"):
        monkeypatch.delenv(key, raising=False)
    return tmp_path


def commands() -> list[str]:
    """The page's commands, without the block that names the reader's own places."""
    blocks: list[str] = re.findall(
        r"```sh\n(.*?)```", (ROOT / "docs/backup.md").read_text(), re.DOTALL
    )
    assert "export PRIMARY=" in blocks[0]
    return blocks[1:]


def bash(place: Path, script: str) -> str:
    """What a script prints; it must succeed."""
    done = subprocess.run(
        ["bash", "-euc", script],
        check=False,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    return " ".join(done.stdout.split())


def metrics(directory: Path) -> list[dict[str, object]]:
    lines = (directory / "logs" / "digits" / "metrics.jsonl").read_text().splitlines()
    skipped = ("time/", "mirror/", "life")
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(skipped)} for line in lines
    ]


def files_of_newest(store: Store) -> dict[str, str]:
    newest = store.list("digits")[-1]
    return {e.path: e.digest for e in newest.files if e.path != "trainer_state.json"}


@pytest.mark.timeout(600)
def test_the_page_works_word_for_word(place: Path) -> None:
    train, look, job, lost, restore, go_on, repair = commands()
    assert "the mirrors hold all checkpoints" in bash(place, train)
    assert "digits@20" in bash(place, look)
    said = bash(place, job)
    assert "nightly: nothing new for 2 stores" in said
    assert "nightly is now in the crontab" in said
    as_cron_would(place)
    said = bash(place, lost)
    assert "nothing is started from scratch" in said
    assert "refused with exit code 6" in said
    assert not (place / "ckpts").exists()
    said = bash(place, restore)
    assert "copied 4 checkpoints" in said
    assert "digits@20 is intact" in said
    said = bash(place, go_on)
    assert "resumed from step 20" in said
    assert "the mirrors hold all checkpoints" in said
    bash(place, repair)

    primary = ckptstore.open_store(str(place / "ckpts"))
    kept = [f"digits@{step}" for step in (30, 35, 40)]
    assert check_store(primary.uri)[-3:] == kept
    for uri in (os.environ["BUCKET"], os.environ["HDFS"]):
        assert check_store(uri)[-3:] == kept
    straight = place / "straight"
    straight.mkdir()
    os.symlink(ROOT / "examples", straight / "examples")
    bash(
        straight,
        "ckpt-train --config examples/digits.yaml trainer.total_steps=40 trainer.save_freq=5 "
        "storage.uri=ckpts",
    )
    assert metrics(place) == metrics(straight)
    whole = ckptstore.open_store(str(straight / "ckpts"))
    assert files_of_newest(primary) == files_of_newest(whole)


def as_cron_would(place: Path) -> None:
    """Run the installed line with cron's bare environment."""
    line = (place / "table").read_text().splitlines()[-1]
    command = line.split(maxsplit=5)[5].replace(r"\%", "%")
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        check=False,
        env={"HOME": str(place), "LOGNAME": "root", "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"},
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert done.stderr == ""
