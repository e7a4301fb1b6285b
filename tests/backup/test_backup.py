"""``ckpt backup``: one run of a job."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backup import lease as lease_module
from ckptstore.backup.jobs import load_job
from ckptstore.backup.lease import HeldJob
from ckptstore.backup.run import JobRunningError, run_job
from ckptstore.backup.state import JobState
from ckptstore.errors import ConflictError
from ckptstore.store import open_store
from tests.backup.support import Hook, hook_server
from tests.backup.test_sources import dcp, openrlhf
from tests.cli.support import CKPT, Ran, ckpt, ckpt_process, contents, fill, flip, names_of, start
from tests.servers.s3 import Bucket
from tests.servers.seaweed import SeaweedFS


def job(place: Path, text: str = "", **values: Any) -> None:
    """Write ckpt.toml with the job ``nightly``."""
    lines = {"source": "live", "run": "gsm8k", "to": ["./a"], **values}
    body = "".join(f"{k} = {json.dumps(v)}\n" for k, v in lines.items() if v is not None)
    fill(place, {"ckpt.toml": f"[jobs.nightly]\n{body}{text}".encode()})


def verl(place: Path, *steps: int, tracker: int | None = None) -> Path:
    """A directory that verl writes to."""
    live = place / "live"
    for step in steps:
        files = {
            "actor/model_world_size_1_rank_0.pt": f"weights {step}".encode() * 50,
            "data.pt": b"same",
        }
        fill(live / f"global_step_{step}", files)
    last = tracker if tracker is not None else max(steps)
    fill(live, {"latest_checkpointed_iteration.txt": str(last).encode()})
    return live


def steps(store: Path, run: str = "gsm8k") -> list[int]:
    """The steps in a store, in order of saving."""
    return [int(name.split("-")[2]) for name in names_of(store, run)]


def backup(*args: str) -> Ran:
    return ckpt("backup", "nightly", *args)


def status(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = JobState(load_job("nightly")).status()
    assert found
    return found


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    """A server for pings, in ``CKPT_PING_URL``."""
    with hook_server() as server:
        monkeypatch.setenv("CKPT_PING_URL", f"{server.url}/ping")
        yield server


# Copying


def test_finished_checkpoints_are_pushed_to_each_destination_oldest_first(place: Path) -> None:
    live = verl(place, 20, 3, 100, 120, tracker=100)
    job(place, to=["./a", "./b"])
    ran = backup().ok()
    assert ran.out.startswith("nightly: 6 checkpoints copied to 2 stores, ")
    assert "1 left (global_step_120: nothing says yet that it is finished)" in ran.out
    assert ran.out.count("\n") == 1
    assert ran.err == ""
    assert steps(place / "a") == steps(place / "b") == [3, 20, 100]
    ckpt("pull", f"{place}/b/gsm8k@20", place / "back").ok()
    assert contents(place / "back") == contents(live / "global_step_20")


def test_what_was_pushed_is_not_read_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verl(place, 3, 20)
    job(place)
    backup("--quiet").ok()
    with monkeypatch.context() as patch:
        patch.setattr("ckptstore.store.Store.push", lambda *_: pytest.fail("it was read"))
        assert backup("--quiet") == Ran(0, "", "")
    assert steps(place / "a") == [3, 20]


def test_without_its_memory_it_reads_and_sends_nothing(place: Path) -> None:
    verl(place, 3, 20)
    job(place)
    backup().ok()
    (JobState(load_job("nightly")).folder / "pushed.json").write_bytes(b"\xff{")
    assert "nothing new" in backup().ok().out
    assert steps(place / "a") == [3, 20]


def test_a_step_that_was_saved_again_is_pushed_again(place: Path) -> None:
    live = verl(place, 3, 20)
    job(place)
    backup().ok()
    fill(live / "global_step_3", {"actor/model_world_size_1_rank_0.pt": b"other"})
    fill(live, {"latest_checkpointed_iteration.txt": b"3"})
    fill(live, {"latest_checkpointed_iteration.txt": b"20"})
    assert "1 checkpoint copied" in backup().ok().out
    assert steps(place / "a") == [3, 20, 3]


def test_what_was_deleted_there_does_not_come_back(place: Path) -> None:
    verl(place, 3, 20)
    job(place)
    backup().ok()
    ckpt("delete", f"{place}/a/gsm8k@3", "--grace", "0").ok()
    ckpt("gc", place / "a").ok()
    backup().ok()
    listed = ckpt("list", place / "a", "--json").ok().json
    assert [row["step"] for row in listed] == [20]


def test_openrlhf_and_dcp(place: Path) -> None:
    for step in (10, 20):
        openrlhf(place / "live", step)
    for part in ("_actor", "_critic"):
        fill(place / "live" / part, {"latest": b"global_step20"})
    for path in (place / "live").rglob("*"):
        os.utime(path)
    job(place)
    backup().ok()
    ckpt("pull", f"{place}/a/gsm8k@10", place / "back").ok()
    assert (place / "back/_critic/latest").read_text() == "global_step10"
    assert "nothing new" in backup().ok().out
    dcp(place / "live2", 7, finished=True)
    dcp(place / "live2", 9, finished=False)
    job(place, source="live2", run="dcp")
    backup().ok()
    assert steps(place / "a", "dcp") == [7]


def test_a_plain_directory_is_numbered(place: Path, source: Path) -> None:
    job(place, source="out", to=["./a", "./b"])
    backup().ok()
    assert "nothing new" in backup().ok().out
    (source / "config.json").write_bytes(b'{"layers": 9}\n')
    backup().ok()
    assert steps(place / "a") == steps(place / "b") == [1, 2]
    (JobState(load_job("nightly")).folder / "pushed.json").unlink()
    assert "nothing new" in backup().ok().out
    fill(source, {"trainer_state.json": b'{"global_step": 700}'})
    backup().ok()
    assert steps(place / "a") == [1, 2, 700]


def test_a_store_is_mirrored(place: Path, store: Path) -> None:
    job(place, source="store", run=None, runs=["gsm*"], to=["./a", "./b"])
    ckpt("push", place / "out", f"{store}/other@1").ok()
    assert "4 checkpoints copied to 2 stores" in backup().ok().out
    assert names_of(place / "a") == names_of(store)
    assert not (place / "a" / "other").exists()
    assert "nothing new" in backup().ok().out


def test_a_dry_run_changes_nothing(place: Path, hook: Hook) -> None:
    verl(place, 3, 20)
    job(place, ping_env="CKPT_PING_URL")
    ran = backup("--dry-run").ok()
    assert "2 checkpoints would be copied to 1 store" in ran.out
    assert not (place / "a").exists()
    assert not JobState(load_job("nightly")).folder.exists()
    assert hook.paths() == []


def test_a_share_is_verified_and_damage_is_said(place: Path) -> None:
    verl(place, 3, 20)
    job(place, verify="100%", to=["./a", "./b"])
    assert "4 verified" in backup().ok().out
    damaged = place / "a" / "gsm8k" / names_of(place / "a")[0]
    flip(damaged / "actor" / "model_world_size_1_rank_0.pt", 7)
    ran = backup().failed(5, "gsm8k@3 is damaged: actor/model_world_size_1_rank_0.pt")
    assert ran.err.count("\n") == 1
    assert status(place)["hint"] == f"ckpt repair gsm8k@3 --store {place}/a --from {place}/b"
    ckpt(*status(place)["hint"].split()[1:]).ok()
    backup().ok()


def test_retention_in_each_destination_and_in_the_source(place: Path, store: Path) -> None:
    for step in (600, 700):
        ckpt("push", place / "out", f"{store}/gsm8k@{step}").ok()
    rules = "[jobs.nightly.retention]\nkeep_last = 2\n"
    rules += "[jobs.nightly.source_retention]\nkeep_last = 1\n"
    job(place, rules, source="store", run=None, to=["./a"])
    assert "would be removed" in backup("--dry-run").ok().out
    assert "5 removed by retention" in backup().ok().out
    listed = ckpt("list", place / "a", "--json").ok().json
    assert [row["step"] for row in listed] == [600, 700]
    assert [row["step"] for row in ckpt("list", store, "--json").ok().json] == [700]
    assert "nothing new" in backup().ok().out


def test_what_retention_removes_is_not_pushed_again(place: Path) -> None:
    verl(place, 10, 20, 30)
    job(place, "[jobs.nightly.retention]\nkeep_last = 2\n")
    ran = backup().ok()
    assert "3 checkpoints copied to 1 store" in ran.out
    assert "1 removed by retention" in ran.out
    ran = backup().ok()
    assert "nothing new" in ran.out
    assert "removed" not in ran.out
    assert len(names_of(place / "a")) == 3  # two commits, and the void of the third


def test_more_deletions_than_are_allowed(place: Path) -> None:
    verl(place, 10, 20, 30, 40)
    job(place, "[jobs.nightly.retention]\nkeep_last = 1\n", max_delete=2)
    backup().failed(6, f"{place}/a")
    assert len(ckpt("list", place / "a", "--json").ok().json) == 4


# What fails


def test_one_destination_that_fails_does_not_stop_the_others(place: Path) -> None:
    verl(place, 3, 20)
    fill(place, {"b": b"a file"})
    job(place, to=["./b/ckpts", "./a"])
    ran = backup().failed(3, f"{place}/b/ckpts")
    assert ran.err.startswith("error: nightly: ")
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert steps(place / "a") == [3, 20]
    assert [d["ok"] for d in status(place)["destinations"]] == [False, True]


def test_when_all_destinations_fail_it_is_their_code(place: Path) -> None:
    verl(place, 3)
    fill(place, {"b/photos": b"a file"})
    job(place, to=["./b"])
    backup().failed(6, "is not empty")


@pytest.mark.parametrize(
    ("values", "code", "says"),
    [
        ({"source": "nowhere"}, 4, "nowhere does not exist"),
        ({"source": "/nowhere/store", "run": None}, 4, "/nowhere/store does not exist"),
        ({"to": ["nas"]}, 2, "'nas' is no store"),
        ({"to": ["s4://bucket/x"]}, 2, "s4"),
        ({"to": ["s3://key:s3cr3t@bucket/x"]}, 2, "AWS_SECRET_ACCESS_KEY"),
        ({"to": ["s3://bucket/x?secret_key=s3cr3t"]}, 2, "AWS_SECRET_ACCESS_KEY"),
        ({"password": "s3cr3t"}, 2, "CKPT_PASSWORD"),
        ({"smtp_password": "s3cr3t"}, 2, "CKPT_SMTP_PASSWORD"),
        ({"aws_secret_access_key": "s3cr3t"}, 2, "AWS_SECRET_ACCESS_KEY"),
        ({"ping": "https://hc-ping.com/s3cr3t"}, 2, "ping_env = 'CKPT_PING_URL'"),
        ({"notify": ["mailto://me:s3cr3t@x"]}, 2, "CKPT_NOTIFY"),
        ({"ping_env": "https://hc-ping.com/s3cr3t"}, 2, "the name of an environment variable"),
        ({"to": []}, 2, "to must be"),
        ({"to": None}, 2, "to is missing"),
        ({"to": ["./a", "a/"]}, 2, "twice"),
        ({"to": ["./live"]}, 2, "also a destination"),
        ({"source": None}, 2, "source is missing"),
        ({"run": None}, 2, "run is missing"),
        ({"run": "../x"}, 2, "cannot be the name of a run"),
        ({"layout": "verI"}, 2, "layout must be one of"),
        ({"verify": 5}, 2, "such as"),
        ({"verify": "200%"}, 2, "such as"),
        ({"settle": "soon"}, 2, "settle"),
        ({"prometheus": "x.txt"}, 2, ".prom"),
        ({"retentoin": {}}, 2, "did you mean 'retention'?"),
        ({"runs": ["x"]}, 2, "runs is for a source that is a store"),
        ({"env_file": "gone.env"}, 4, "gone.env"),
        ({"max_delete": -1}, 2, "max_delete"),
    ],
)
def test_jobs_that_cannot_be(place: Path, values: dict[str, Any], code: int, says: str) -> None:
    (place / "live").mkdir()
    verl(place, 3)
    job(place, **values)
    ran = backup().failed(code, says)
    assert "s3cr3t" not in ran.err + ran.out
    assert "nightly" in ran.err or "gone.env" in ran.err
    assert not (place / "a").exists()


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ("", "would delete everything"),
        ("keep_last = 0", "keep_last must be"),
        ("keep_lats = 3", "did you mean 'keep_last'?"),
        ("grace = '1d'", "would delete everything"),
    ],
)
def test_a_retention_that_would_delete_everything(place: Path, rules: str, says: str) -> None:
    verl(place, 3)
    job(place, f"[jobs.nightly.retention]\n{rules}\n")
    backup().failed(2, "[jobs.nightly]: retention", says)
    assert not (place / "a").exists()


def test_two_jobs_of_one_name(place: Path) -> None:
    fill(place, {"ckpt.toml": b"[jobs.nightly]\nsource = 'a'\n\n[jobs.nightly]\nsource = 'b'\n"})
    backup().failed(2, "nightly", "twice", "line 4")


def test_a_job_that_is_not_there(place: Path) -> None:
    verl(place, 3)
    job(place)
    ckpt("backup", "nigthly").failed(4, "did you mean 'nightly'?")
    assert "never" in ckpt("backup").ok().out
    backup().ok()
    assert ckpt("backup", "--json").ok().json[0]["ok"] is True


def test_a_disk_that_is_not_mounted_is_not_a_new_store(place: Path) -> None:
    verl(place, 3)
    job(place)
    backup().ok()
    (place / "a").rename(place / "elsewhere")
    backup().failed(4, "is gone", str(place / "a"))
    assert not (place / "a").exists()
    (place / "elsewhere").rename(place / "a")
    backup().ok()


def test_a_source_that_changes_while_it_is_read_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = verl(place, 3, 20)
    job(place)
    from ckptstore.backup.sources import Finished
    from ckptstore.scanning import scan

    def vanish(_: Finished, scratch: Path) -> Any:
        scanned = scan(live / "global_step_3")
        (live / "global_step_3" / "data.pt").unlink()
        return scanned

    found = __import__("ckptstore.backup.run", fromlist=["find"]).find(live)
    first = found.finished[0]
    found.finished[0] = Finished(first.step, first.name, lambda s: vanish(first, s))
    monkeypatch.setattr("ckptstore.backup.run.find", lambda *_, **__: found)
    assert "global_step_3 changed while it was read: left" in backup().ok().out
    assert steps(place / "a") == [20]


def test_a_live_directory_while_a_process_writes_it(place: Path) -> None:
    """Every checkpoint that is stored is one that was finished, byte for byte."""
    job(place, settle="0")
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(place / "live")], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    rounds = 0
    while writer.poll() is None:
        ran = backup()
        assert ran.code == 0, ran
        rounds += 1
    writer.stdout.close()
    assert writer.returncode == 0
    backup().ok()
    assert rounds > 1
    assert steps(place / "a")[-1] == 30
    for row in ckpt("list", place / "a", "--json").ok().json:
        back = place / "back" / str(row["step"])
        ckpt("pull", f"{place}/a/gsm8k@{row['name']}", back).ok()
        files = contents(back)
        assert len(files) == 5
        assert set(files.values()) == {f"{row['step']:04d}".encode() * 50_000}


_WRITER = """
import os, shutil, sys, time
root = sys.argv[1]
for step in range(1, 31):
    directory = os.path.join(root, f"global_step_{step}")
    for name in ("actor/model_world_size_2_rank_0.pt", "actor/model_world_size_2_rank_1.pt",
                 "critic/model_world_size_2_rank_0.pt", "critic/model_world_size_2_rank_1.pt",
                 "data.pt"):
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            for _ in range(10):
                f.write(f"{step:04d}".encode() * 5000)
                f.flush()
    with open(os.path.join(root, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write(str(step))
    if step == 1:
        print("one", flush=True)
    if step > 3:
        shutil.rmtree(os.path.join(root, f"global_step_{step - 3}"))
    time.sleep(0.05)
"""


# Telling


def test_pings_of_a_run_that_went_well_and_of_one_that_did_not(place: Path, hook: Hook) -> None:
    verl(place, 3)
    job(place, ping_env="CKPT_PING_URL")
    backup().ok()
    assert hook.next() == ("/ping/start", "")
    path, body = hook.next()
    assert (path, body[:9]) == ("/ping", "nightly: ")
    job(place, ping_env="CKPT_PING_URL", source="gone")
    backup().failed(4)
    assert [hook.next()[0], hook.next()[0]] == ["/ping/start", "/ping/4"]


def test_a_ping_that_fails_changes_nothing_and_is_said(
    place: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    verl(place, 3)
    job(place, ping_env="CKPT_PING_URL", notify_env=["CKPT_NOTIFY"], notify_on="always")
    hook.answers += [404, 404]
    monkeypatch.setenv("CKPT_NOTIFY", "json://127.0.0.1:1/s3cr3t")
    ran = backup("--quiet").ok()
    assert ran.err.splitlines() == [
        "warning: the ping by CKPT_PING_URL failed: the server said 404",
        "warning: the notification by CKPT_NOTIFY failed: it was not sent",
    ]
    assert steps(place / "a") == [3]


@pytest.mark.parametrize(
    ("when", "told"), [("failure", "01110"), ("change", "01001"), ("always", "11111")]
)
def test_when_somebody_is_notified(
    place: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, when: str, told: str
) -> None:
    verl(place, 3)
    monkeypatch.setenv("CKPT_NOTIFY", hook.url.replace("http", "json"))
    came = ""
    for source in ("live", "gone", "gone", "gone", "live"):
        job(place, notify_env="CKPT_NOTIFY", notify_on=when, source=source)
        backup()
        try:
            title = json.loads(hook.requests.get_nowait()[1])["title"]
        except queue.Empty:
            came += "0"
            continue
        came += "1"
        assert title == f"ckpt backup nightly: {'ok' if source == 'live' else 'failed'}"
    assert came == told


def test_status_history_and_metrics(place: Path) -> None:
    verl(place, 3)
    job(place, prometheus="metrics/ckpt.prom", status_file="status.json")
    backup().ok()
    first = json.loads((place / "status.json").read_text())
    assert (first["ok"], first["exit_code"], first["last_success"]) == (True, 0, first["began"])
    assert first["destinations"][0]["copied"] == ["gsm8k@3"]
    metrics = (place / "metrics" / "ckpt.prom").read_text()
    assert 'ckptstore_backup_exit_code{job="nightly"} 0.0' in metrics
    assert 'ckptstore_backup_copied_checkpoints{job="nightly"} 1.0' in metrics
    assert f'ckptstore_backup_destination_ok{{job="nightly",store="{place}/a"}} 1.0' in metrics
    (place / "live").rename(place / "gone")
    backup().failed(4)
    second = json.loads((place / "status.json").read_text())
    assert (second["ok"], second["exit_code"]) == (False, 4)
    assert second["last_success"] == first["began"]
    metrics = (place / "metrics" / "ckpt.prom").read_text()
    assert 'ckptstore_backup_exit_code{job="nightly"} 4.0' in metrics
    assert 'ckptstore_backup_last_success_timestamp_seconds{job="nightly"}' in metrics
    state = JobState(load_job("nightly"))
    assert [entry["ok"] for entry in state.history()] == [True, False]
    assert state.status()["ok"] is False


def test_the_history_is_bounded(place: Path) -> None:
    verl(place, 3)
    job(place)
    state = JobState(load_job("nightly"))
    fill(state.folder, {"history.jsonl": b'{"n": 0}\nnot json\n' + b'{"n": 1}\n' * 2000})
    state.record({"n": 2})
    history = state.history()
    assert (len(history), history[0], history[-1]) == (1000, {"n": 1}, {"n": 2})


def test_secrets_come_from_a_file_that_only_the_owner_can_read(place: Path, hook: Hook) -> None:
    verl(place, 3)
    job(place, ping_env="MY_PING", env_file="secrets.env")
    fill(place, {"secrets.env": f"# pings\nexport MY_PING='{hook.url}/mine'\n".encode()})
    (place / "secrets.env").chmod(0o644)
    backup().failed(7, "chmod 600")
    assert hook.paths() == []
    (place / "secrets.env").chmod(0o600)
    backup().ok()
    assert hook.paths() == ["/mine/start", "/mine"]
    fill(place, {"secrets.env": b"MY_PING\n"})
    backup().failed(2, "line 1")
    del os.environ["MY_PING"]


# One at a time


def test_two_processes_at_once(place: Path, hook: Hook) -> None:
    """One of them does it. The others are told so at once; nobody else hears of them."""
    verl(place, 3)
    job(place, ping_env="CKPT_PING_URL")
    hook.answering.clear()
    processes = [start("backup", "nightly") for _ in range(3)]
    assert hook.next()[0] == "/ping/start"
    ended = [process for process in processes if process.poll() is not None]
    while len(ended) < 2:
        ended = [process for process in processes if process.poll() is not None]
    hook.answering.set()
    came = [process.communicate(timeout=60) for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 6, 6]
    for process, (out, err) in zip(processes, came, strict=True):
        if process.returncode == 6:
            assert (out, "is running already" in err) == ("", True)
    assert hook.paths() == ["/ping"]
    assert steps(place / "a") == [3]


def test_a_run_that_was_killed_holds_nobody_up(place: Path, hook: Hook) -> None:
    verl(place, 3, 20)
    job(place, ping_env="CKPT_PING_URL")
    hook.answering.clear()
    process = start("backup", "nightly")
    assert hook.next()[0] == "/ping/start"
    (lease,) = (place / "a" / ".jobs").iterdir()
    ckpt_process("backup", "nightly").failed(6, "running already", f"process {process.pid}")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hook.answering.set()
    assert lease.exists()
    backup().ok()
    assert steps(place / "a") == [3, 20]
    assert not lease.exists()


def test_a_run_that_is_terminated_says_so(place: Path, hook: Hook) -> None:
    verl(place, 3)
    job(place, ping_env="CKPT_PING_URL")
    hook.answering.clear()
    process = start("backup", "nightly")
    assert hook.next()[0] == "/ping/start"
    process.send_signal(signal.SIGTERM)
    assert hook.next()[0] == "/ping/143"
    hook.answering.set()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "error: terminated\n")
    assert status(place)["exit_code"] == 143
    assert not list((place / "a" / ".jobs").iterdir())
    backup().ok()


def test_on_one_host_it_is_held_whatever_the_stores_say(place: Path) -> None:
    verl(place, 3)
    job(place)
    with JobState(load_job("nightly")).locked():
        backup().failed(6, f"running already on this host (process {os.getpid()})")
        assert not (place / "a").exists()
    backup().ok()


def test_another_host_with_the_job_excludes_this_one(place: Path, hook: Hook) -> None:
    verl(place, 3)
    job(place, to=["./a", "./b"], ping_env="CKPT_PING_URL")
    other = open_store(str(place / "b"))
    other.create()
    held = HeldJob(other, "nightly", "gsm8k")
    with pytest.raises(JobRunningError, match=f"process {os.getpid()}"):
        run_job(load_job("nightly"))
    assert not list((place / "a" / ".jobs").iterdir())
    assert hook.paths() == []
    assert JobState(load_job("nightly")).history() == []
    elsewhere = HeldJob(other, "nightly", "another-run")
    held.release()
    backup().ok()
    elsewhere.release()


def test_a_lease_expires_by_itself(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another host, whose processes cannot be seen from here."""
    store = open_store(str(place / "a"))
    store.create()
    monkeypatch.setattr(lease_module, "is_gone", lambda _: False)
    held = HeldJob(store, "nightly", "gsm8k")
    with pytest.raises(ConflictError, match="running already on"):
        HeldJob(store, "nightly", "gsm8k")
    (file,) = (place / "a" / ".jobs").iterdir()
    old = file.stat().st_mtime - 31 * 60
    os.utime(file, (old, old))
    successor = HeldJob(store, "nightly", "gsm8k")
    held.release()  # it does not take the successor's away
    assert file.exists()
    successor.release()
    assert not file.exists()


def test_a_lease_that_cannot_be_read_expires_too(place: Path) -> None:
    store = open_store(str(place / "a"))
    store.create()
    HeldJob(store, "nightly", "gsm8k").release()
    held = HeldJob(store, "nightly", "gsm8k")
    (file,) = (place / "a" / ".jobs").iterdir()
    file.write_bytes(b"\0\0")
    with pytest.raises(ConflictError, match="cannot be read"):
        HeldJob(store, "nightly", "gsm8k")
    os.utime(file, (1, 1))
    HeldJob(store, "nightly", "gsm8k").release()
    held.release()


def test_a_lease_is_renewed_while_its_holder_lives(place: Path) -> None:
    store = open_store(str(place / "a"))
    store.create()
    held = HeldJob(store, "nightly", "gsm8k", heartbeat=0.02)
    (file,) = (place / "a" / ".jobs").iterdir()
    os.utime(file, (1, 1))
    while file.stat().st_mtime < 2:
        pass
    held.release()


def test_many_that_want_one_lease(place: Path) -> None:
    _race(str(place / "a"))


def test_leases_in_a_bucket(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    _race(Bucket.make(seaweed, monkeypatch).uri())


def _race(uri: str) -> None:
    """Of eight that want it one has it, and then the next one."""
    store = open_store(uri)
    store.create()
    begin = threading.Barrier(8)
    won: list[HeldJob] = []

    def take() -> None:
        begin.wait()
        with suppress(ConflictError):
            won.append(HeldJob(store, "nightly", "gsm8k"))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    won[0].release()
    HeldJob(store, "nightly", "gsm8k").release()


def test_leases_are_no_run(place: Path) -> None:
    verl(place, 3)
    job(place)
    backup().ok()
    fill(place / "a" / ".jobs", {"x.json": b"{}"})
    assert open_store(str(place / "a")).runs() == ["gsm8k"]
    ckpt("verify", place / "a", "--deep").ok()
    ckpt("gc", place / "a").ok()
    assert CKPT.exists()
