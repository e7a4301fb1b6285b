"""Without permission: exit 7, nothing committed, and reading goes on where reading is allowed.

The tests may run as root, whom no permission stops, so each command runs in a process that has
loaded everything and then become nobody.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.support import Ran, ckpt, contents, fill, flip, names_of, record_of

NOBODY = 65534

_AS_NOBODY = f"""
import codecs, importlib, os, pkgutil, sys
import cli.main, ckptstore
for package in (cli, ckptstore):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import rich.filesize, rich.table, rich.text, rich.progress, platformdirs.unix
for codec in ("ascii", "utf-8", "unicode-escape"):
    codecs.lookup(codec)
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
cli.main.app(sys.argv[1:])
"""


def as_nobody(*args: str | Path) -> Ran:
    """Run a command as a user who owns nothing here."""
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that anybody can reach, which pytest's own is not."""
    root = Path(tempfile.mkdtemp(prefix="ckpt-access-"))
    root.chmod(0o755)
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(root / "config"))
    yield root
    for path in root.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(root)


@pytest.fixture
def held(shared: Path) -> Path:
    """A store of someone else, readable and not writable for nobody."""
    source = fill(shared / "out", {"model.bin": b"weights" * 1000, "a/b.json": b"{}"})
    ckpt("push", source, f"{shared}/store/gsm8k@400").ok()
    (source / "a" / "b.json").write_bytes(b"[]")
    ckpt("push", source, f"{shared}/store/gsm8k@500").ok()
    return _read_only(shared / "store")


def _read_only(root: Path) -> Path:
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    return root


def test_a_push_into_a_store_of_someone_else(shared: Path, held: Path) -> None:
    before = contents(held)
    ran = as_nobody("push", shared / "out", f"{held}/gsm8k@600").failed(7, "Permission denied")
    assert ran.out == ""
    as_nobody("push", shared / "out", f"{held}/newrun@1").failed(7)
    assert contents(held) == before
    assert not (held / "newrun").exists()


def test_a_push_that_would_make_a_store_where_it_may_not(shared: Path) -> None:
    source = fill(shared / "out", {"a": b"a"})
    as_nobody("push", source, f"{shared}/newstore/gsm8k@1").failed(7)
    as_nobody("init", shared / "newstore").failed(7)
    assert not (shared / "newstore").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["pin", "REF"],
        ["tag", "REF", "release"],
        ["delete", "REF"],
        ["gc", "STORE"],
    ],
    ids=lambda c: c[0],
)
def test_changing_a_store_of_someone_else(held: Path, command: list[str]) -> None:
    before = contents(held)
    words = {"REF": f"{held}/gsm8k@400", "STORE": str(held)}
    as_nobody(*(words.get(word, word) for word in command)).failed(7)
    assert contents(held) == before


def test_reading_a_store_of_someone_else(shared: Path, held: Path) -> None:
    open_to_all = shared / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert len(as_nobody("list", held, "--json").ok().json) == 2
    as_nobody("show", f"{held}/gsm8k@500").ok()
    as_nobody("verify", held).ok()
    assert as_nobody("verify", held, "--deep", "--json").ok().json["ok"] is True
    assert "takes gsm8k@500" in as_nobody("resume-info", f"{held}/gsm8k@latest").ok().out
    as_nobody("diff", f"{held}/gsm8k@500", shared / "out").ok()
    as_nobody("pull", f"{held}/gsm8k@500", open_to_all / "restored").ok()
    assert contents(open_to_all / "restored") == contents(shared / "out")


def test_unfinished_saves_of_someone_else_can_be_listed(shared: Path, held: Path) -> None:
    script = (
        "import sys, ckptstore, os\n"
        f"save = ckptstore.open_store({str(held)!r}).save(run='gsm8k', step=900)\n"
        "save.add_bytes('half.bin', b'half')\n"
        "os._exit(0)\n"
    )
    if os.getuid() != 0:
        pytest.skip("needs to write as root where nobody may not")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    _read_only(held)
    rows = as_nobody("list", held, "--all", "--json").ok().json
    assert [r["state"] for r in rows] == ["ok", "ok", "unfinished"]


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_damage_in_a_store_of_someone_else_is_still_damage(
    shared: Path, held: Path, deep: list[str]
) -> None:
    directory = held / "gsm8k" / names_of(held)[-1]
    directory.chmod(0o755)
    flip(directory / "model.bin", 3)
    (directory / "a").chmod(0o755)
    (directory / "a" / "b.json").unlink()
    _read_only(held)
    as_nobody("verify", f"{held}/gsm8k@500", *deep).failed(5, "b.json: missing")
    assert "takes gsm8k@400" in as_nobody("resume-info", f"{held}/gsm8k@latest", *deep).ok().out
    open_to_all = shared / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    as_nobody("pull", f"{held}/gsm8k@500", open_to_all / "restored").failed(5, "is damaged")
    assert contents(open_to_all) == {}


@pytest.mark.parametrize("what", ["marker", "root", "run", "commits", "record", "marks"])
def test_what_may_not_be_read_is_never_taken_for_not_there(
    shared: Path, held: Path, what: str
) -> None:
    if what == "marks":
        ckpt("pin", f"{held}/gsm8k@400").ok()
    path = {
        "marker": held / "CKPTSTORE.json",
        "root": held,
        "run": held / "gsm8k",
        "commits": held / "gsm8k" / "commits",
        "record": record_of(held),
        "marks": held / "gsm8k" / "marks",
    }[what]
    path.chmod(0)
    as_nobody("list", held).failed(7, "Permission denied")
    as_nobody("resume-info", f"{held}/gsm8k@latest").failed(7, "Permission denied")


def test_a_source_that_may_not_be_read(shared: Path) -> None:
    source = fill(shared / "out", {"a.bin": b"a", "secret/key.bin": b"b"})
    store = shared / "store"
    ckpt("init", store).ok()
    for path in [store, *store.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    (source / "a.bin").chmod(0)
    as_nobody("push", source, f"{store}/gsm8k@1").failed(7, "a.bin")
    (source / "a.bin").chmod(0o644)
    (source / "secret").chmod(0)
    as_nobody("push", source, f"{store}/gsm8k@1").failed(7, "secret")
    source.chmod(0)
    as_nobody("push", source, f"{store}/gsm8k@1").failed(7, "out")
    assert ckpt("list", store, "--json").ok().json == []
    source.chmod(0o755)
    (source / "secret").chmod(0o755)
    as_nobody("push", source, f"{store}/gsm8k@1").ok()


def test_a_destination_that_may_not_be_written(shared: Path, held: Path) -> None:
    as_nobody("pull", f"{held}/gsm8k@500", shared / "restored").failed(7, "restored")
    (shared / "closed").mkdir()
    as_nobody("pull", f"{held}/gsm8k@500", shared / "closed").failed(7, "closed")
    assert list((shared / "closed").iterdir()) == []


def test_a_configuration_that_may_not_be_read(shared: Path, held: Path) -> None:
    (shared / "ckpt.toml").write_bytes(b'store = "x"\n')
    (shared / "ckpt.toml").chmod(0)
    as_nobody("list").failed(7, "ckpt.toml")


def test_a_doctor_where_nothing_may_be_written(shared: Path, held: Path) -> None:
    before = contents(held)
    ran = as_nobody("doctor", held).failed(7, "cannot be used: write", "Permission denied")
    assert "store\tok\t" in ran.out
    assert contents(held) == before
    closed = shared / "closed"
    closed.mkdir()
    as_nobody("doctor", closed / "new").failed(7, "Permission denied")
    assert list(closed.iterdir()) == []
