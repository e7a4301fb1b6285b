"""``ckpt schedule``: crontabs and timers."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backup.support import Hook, hook_server
from tests.cli.support import Ran, ckpt, fill
from tests.servers.process import end_process

JOB = """
[jobs.nightly]
source = "./out"
run = "gsm8k"
to = ["./copies"]
"""

NAMES = 'my % project\'s \\back $HOME "x" é'
"""A directory's name with everything in it that means something to someone."""


def job(directory: Path, extra: str = "", text: str = JOB) -> Path:
    """A directory with a job."""
    fill(directory, {"ckpt.toml": (text + extra).encode()})
    return directory


@pytest.fixture
def crontab(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the ``crontab`` command that keeps the table in the file it returns."""
    table = tmp_path / "table"
    text = f"""#!/bin/sh
case "$1" in
-l) [ -f {table} ] && exec cat {table}; echo "no crontab for me" >&2; exit 1;;
-) exec cat > {table};;
esac
"""
    fill(tmp_path / "bin", {"crontab": text.encode()})
    (tmp_path / "bin" / "crontab").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return table


def install(*args: str) -> Ran:
    return ckpt("schedule", "install", "nightly", *args)


def command_of(table: Path) -> list[str]:
    """The words of the command that cron would run, after it has read the line."""
    line = table.read_text().splitlines()[-1]
    return shlex.split(line.split(maxsplit=5)[5].replace("\\%", "%"))


# cron


def test_the_line_names_everything(
    place: Path, crontab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(place)
    monkeypatch.setenv("CKPT_THREADS", "3")
    monkeypatch.setenv("AWS_PROFILE", "ops")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    monkeypatch.setenv("EDITOR", "vi")
    ran = install("--cron", "30 2 * * *").ok()
    assert "30 2 * * *" in ran.out
    assert "AWS_SECRET_ACCESS_KEY" in ran.err
    words = command_of(crontab)
    program = str(Path(sys.executable).with_name("ckpt"))
    assert words[:4] == ["cd", str(place), "&&", "/usr/bin/env"]
    assert words[-4:] == [program, "backup", "nightly", "--quiet"]
    variables = dict(word.split("=", 1) for word in words[4:-4])
    assert (variables["CKPT_THREADS"], variables["AWS_PROFILE"]) == ("3", "ops")
    assert variables["PATH"].split(":")[0] == str(Path(program).parent)
    assert "EDITOR" not in variables
    assert "s3cr3t" not in crontab.read_text()


def test_a_jobs_own_secrets_stay_out(
    place: Path, crontab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(place, 'ping_env = "CKPT_PING_URL"\nnotify_env = ["CKPT_THREADS"]\n')
    monkeypatch.setenv("CKPT_PING_URL", "https://hc/s3cr3t")
    monkeypatch.setenv("CKPT_THREADS", "2")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:s3cr3t@proxy:1")
    ran = install("--every", "1h").ok()
    assert "CKPT_PING_URL, CKPT_THREADS, HTTPS_PROXY" in ran.err
    assert "s3cr3t" not in crontab.read_text() + ran.err + ran.out
    fill(
        place.parent / "config/ckptstore",
        {"env": b"CKPT_PING_URL=x\nCKPT_THREADS=2\nHTTPS_PROXY=p\n"},
    )
    (place.parent / "config/ckptstore/env").chmod(0o600)
    assert install("--every", "1h").ok().err == ""


def test_twice_is_once_and_the_others_lines_stay(place: Path, crontab: Path) -> None:
    others = "MAILTO=me\n# a comment\n\n0 1 * * *\ttrue # ckptstore: nightly in /else\n  \n"
    crontab.write_text(others)
    job(place)
    assert "now" in install("--every", "6h").ok().out
    first = crontab.read_text()
    assert first.startswith(others)
    assert "already" in install("--every", "6h").ok().out
    assert crontab.read_text() == first
    install("--every", "1h").ok()
    assert len(crontab.read_text().splitlines()) == len(first.splitlines())
    twice = crontab.read_text() + "".join(crontab.read_text().splitlines(keepends=True)[-2:])
    crontab.write_text(f"{twice}5 5 * * * later\n")
    install("--every", "6h").ok()
    assert crontab.read_text() == first + "5 5 * * * later\n"
    ckpt("schedule", "remove", "nightly").ok()
    assert crontab.read_text() == others + "5 5 * * * later\n"
    ckpt("schedule", "remove", "nightly").failed(4, "not scheduled")


def test_jobs_of_one_name_in_two_directories(
    place: Path, crontab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        monkeypatch.chdir(job(place / name))
        install("--every", "1h").ok()
    rows = ckpt("schedule", "list", "--json").ok().json
    assert [row["directory"] for row in rows] == [str(place / "a"), str(place / "b")]
    assert {row["where"] for row in rows} == {"crontab"}
    ckpt("schedule", "remove", "nightly").ok()
    assert [r["directory"] for r in ckpt("schedule", "list", "--json").ok().json] == [
        str(place / "a")
    ]
    ckpt("schedule", "remove", "nightly").failed(4, str(place / "a"))


def test_a_job_that_is_not_in_the_file_any_more_is_removed(place: Path, crontab: Path) -> None:
    job(place)
    install("--every", "1h").ok()
    (place / "ckpt.toml").unlink()
    ckpt("schedule", "remove", "nightly").ok()
    assert crontab.read_text() == ""


def test_a_long_path_gives_way(
    place: Path, crontab: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job(place)
    long = [tmp_path / f"{n}{'x' * 90}" for n in range(12)]
    for one in long:
        one.mkdir()
    monkeypatch.setenv("PATH", ":".join([os.environ["PATH"], *map(str, long)]))
    install("--every", "1h").ok()
    assert "xxxxx" not in crontab.read_text()
    assert len(crontab.read_text().splitlines()[-1]) < 1000
    monkeypatch.setenv("HADOOP_CONF_DIR", "/" + "y" * 900)
    install("--every", "1h").failed(2, "longer than cron takes", "--systemd")


def test_a_crontab_that_cannot_be_read_is_not_overwritten(
    place: Path, crontab: Path, tmp_path: Path
) -> None:
    job(place)
    crontab.write_text("0 0 * * * mine\n")
    (tmp_path / "bin/crontab").write_text(
        f'#!/bin/sh\n[ "$1" = -l ] || exec cat > {crontab}\necho "not allowed" >&2; exit 1\n'
    )
    install("--every", "1h").failed(7, "not allowed")
    ckpt("schedule", "list").failed(7, "not allowed")
    assert crontab.read_text() == "0 0 * * * mine\n"


def test_print_changes_nothing(place: Path, crontab: Path) -> None:
    job(place)
    shown = install("--every", "1h", "--print").ok().out
    assert not crontab.exists()
    assert "backup nightly --quiet" in shown
    install("--every", "1h").ok()
    assert crontab.read_text().strip() == shown.strip()
    shown = install("--every", "7h", "--systemd", "--print").ok().out
    assert "OnUnitActiveSec=25200s" in shown
    assert not (place.parent / "config" / "systemd").exists()


def test_without_cron_it_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(place)
    monkeypatch.setenv("PATH", "/nowhere")
    install("--every", "1h").failed(2, "no cron here", "--systemd")
    ckpt("schedule", "list").ok()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "--every TIME or --cron"),
        (("--every", "1h", "--cron", "* * * * *"), "one of them"),
        (("--every", "7h"), "cron cannot run a job every 7 h"),
        (("--cron", "0 0 30 2 *"), "never comes true"),
        (("--every", "1h", "--random-delay", "5min"), "--random-delay is for systemd"),
    ],
)
def test_times_that_cannot_be(place: Path, crontab: Path, args: tuple[str, ...], says: str) -> None:
    job(place)
    install(*args).failed(2, says)
    assert not crontab.exists()


def test_a_job_that_is_wrong_is_not_scheduled(place: Path, crontab: Path) -> None:
    job(place, "retentoin = {}\n")
    install("--every", "1h").failed(2, "'retention'")
    ckpt("schedule", "install", "nightli", "--every", "1h").failed(4, "'nightly'")
    assert not crontab.exists()


def test_lists_for_people(place: Path, crontab: Path) -> None:
    assert "no job" in ckpt("schedule", "list").ok().err
    job(place)
    install("--cron", "30 2 * * *").ok()
    assert ckpt("schedule", "list").ok().out.split("\t")[:2] == ["nightly", "30 2 * * *"]


# systemd


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and os.environ.get("CKPT_REQUIRE_TOOLS") != "1",
    reason="systemd-analyze is missing",
)


@needs_systemd
@pytest.mark.parametrize("args", [("--every", "6h"), ("--every", "7h"), ("--cron", "0 0 13 * 5")])
def test_systemd_takes_the_units(
    place: Path, crontab: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(job(place / NAMES))
    monkeypatch.setenv("CKPT_STORE", '/data/%d $HOME/"ckpts" \\n')
    assert "daemon-reload" in install("--systemd", *args).ok().err
    folder = place.parent / "config/systemd/user"
    units = sorted(folder.iterdir())
    assert [u.name for u in units] == ["ckpt-backup-nightly.service", "ckpt-backup-nightly.timer"]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, units)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
    )
    ours = [line for line in done.stderr.splitlines() if "ckpt" in line]
    assert (done.returncode, ours) == (0, [])
    assert ("Persistent=true" in units[1].read_text()) == (args[1] != "7h")
    assert f"WorkingDirectory={place}/my %% project's " in units[0].read_text()
    assert stat.S_IMODE(units[0].stat().st_mode) == 0o644


def test_timers_are_listed_and_removed(
    place: Path, crontab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(place)
    assert "now" in install("--systemd", "--every", "6h", "--random-delay", "90s").ok().out
    assert "already" in install("--systemd", "--every", "6h", "--random-delay", "90s").ok().out
    timer = place.parent / "config/systemd/user/ckpt-backup-nightly.timer"
    assert "RandomizedDelaySec=90s" in timer.read_text()
    (row,) = ckpt("schedule", "list", "--json").ok().json
    assert (row["job"], row["where"], row["directory"]) == ("nightly", "user timer", str(place))
    monkeypatch.chdir(job(place / "other"))
    install("--systemd", "--every", "6h").failed(6, str(place))
    monkeypatch.chdir(place)
    ckpt("schedule", "remove", "nightly").ok()
    assert not list(timer.parent.iterdir())


# cron for real


def why_no_cron() -> str | None:
    """Why cron cannot be tried here."""
    if os.geteuid() != 0:
        return "only root can start cron"
    if shutil.which("cron") is None or shutil.which("crontab") is None:
        return "cron is missing (apt install cron)"
    return None


@pytest.fixture
def real_crontab() -> Iterator[None]:
    """This machine's cron, and root's crontab, which is as it was afterwards."""
    missing = why_no_cron()
    if missing and os.environ.get("CKPT_REQUIRE_TOOLS") != "1":
        pytest.skip(missing)
    assert missing is None
    with open("/tmp/ckptstore-test-crontab.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = subprocess.run(["crontab", "-l"], capture_output=True, check=False)
        daemon = subprocess.Popen(
            ["cron", "-f"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            if before.returncode == 0:
                subprocess.run(["crontab", "-"], input=before.stdout, check=True)
            else:
                subprocess.run(["crontab", "-r"], check=False)
            if daemon.poll() is None:  # it ends at once where one is running already
                end_process(daemon.pid, 15)
            daemon.wait()


@pytest.fixture
def hook() -> Iterator[Hook]:
    with hook_server() as server:
        yield server


def test_cron_runs_an_installed_job(
    place: Path, tmp_path: Path, real_crontab: None, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cron's own environment, in a directory whose name means something to everybody."""
    here = job(place / NAMES, 'ping_env = "CKPT_PING_URL"\n')
    fill(here / "out", {"model.bin": b"weights", "trainer_state.json": b'{"global_step": 7}'})
    secrets = fill(tmp_path / "config" / "ckptstore", {"env": f"CKPT_PING_URL={hook.url}".encode()})
    (secrets / "env").chmod(0o600)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(here)
    ran = install("--cron", "* * * * *").ok()
    assert ran.err == ""
    assert "already" in install("--cron", "* * * * *").ok().out
    rows = ckpt("schedule", "list", "--json").ok().json
    assert [row["times"] for row in rows if row["directory"] == str(here)] == ["* * * * *"]
    assert hook.next(90)[0] == "/start"
    path, said = hook.next(60)
    assert (path, said[:40]) == ("/", "nightly: 1 checkpoint copied to 1 store,")
    ckpt("schedule", "remove", "nightly").ok()
    ckpt("pull", "gsm8k@7", "back", "--store", here / "copies").ok()
    assert (here / "back" / "model.bin").read_bytes() == b"weights"
    history = next((tmp_path / "state" / "ckptstore" / "jobs").glob("nightly-*/history.jsonl"))
    assert '"ok": true' in history.read_text()
