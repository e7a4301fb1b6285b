"""What stands in ``[jobs.NAME]``, and files of secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backup.jobs import Job, load_job, load_jobs, parse_job
from ckptstore.backup.secretfile import (
    add_to_environment,
    check_no_secret,
    is_secret_url,
    read_env_file,
)
from ckptstore.config import Section
from ckptstore.errors import AccessDeniedError, NotFoundError, UsageError
from tests.cli.support import fill

LEAST = {"source": "/data/live", "run": "gsm8k", "to": "/mnt/nas"}


def parse(**values: Any) -> Job:
    return parse_job(Section("nightly", {**LEAST, **values}, "/etc/ckpt/ckpt.toml"))


def test_everything_that_a_job_can_say() -> None:
    job = parse(
        source="live",
        layout="verl",
        settle="5min",
        to=["/mnt/nas", "s3://bucket/ckpts?region=eu-north-1", "~/copies"],
        retention={"keep_last": 3},
        max_delete=5,
        verify="2.5%",
        verify_time="30min",
        env_file="~/secrets",
        ping_env="PING",
        notify_env=["A", "B"],
        notify_on="always",
        prometheus="/var/lib/x.prom",
        status_file="status.json",
    )
    home = os.path.expanduser("~")
    assert job.source == "/etc/ckpt/live"
    assert job.to == ("/mnt/nas", "s3://bucket/ckpts?region=eu-north-1", f"{home}/copies")
    assert (job.layout, job.settle, job.verify, job.verify_time) == ("verl", 300.0, 0.025, 1800.0)
    assert job.retention is not None
    assert job.retention.keep_last == 3
    assert (job.env_file, job.prometheus) == (Path(home) / "secrets", Path("/var/lib/x.prom"))
    assert (job.status_file, job.directory) == (Path("/etc/ckpt/status.json"), Path("/etc/ckpt"))
    assert (job.ping_env, job.notify_env, job.notify_on) == ("PING", ("A", "B"), "always")


def test_what_a_job_does_not_say() -> None:
    job = parse(layout="auto")
    assert (job.layout, job.settle, job.retention, job.verify) == (None, 600.0, None, None)
    assert (job.ping_env, job.notify_env, job.notify_on) == (None, (), "failure")


def test_a_store_as_source() -> None:
    job = parse_job(
        Section("n", {"source": "s3://b/x", "to": ["/m"], "runs": ["gsm*", "[ab]?"]}, "/c.toml")
    )
    assert job.reads_a_store
    assert job.runs == ("gsm*", "[ab]?")


@pytest.mark.parametrize("key", ["run", "layout"])
def test_what_is_for_directories(key: str) -> None:
    values = {"source": "s3://b/x", "to": ["/m"], "run": "gsm8k", "layout": "verl"}
    values = {k: v for k, v in values.items() if k in ("source", "to", key)}
    with pytest.raises(UsageError, match=f"{key} is for a source that is a directory"):
        parse_job(Section("n", values, "/c.toml"))


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 65, "-x", "a\x1b[2J", "a%b", "é"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a job") as caught:
        parse_job(Section(name, LEAST, "/c.toml"))
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"source": ["a"]}, "source must be a text"),
        ({"source": ""}, "source must be a text"),
        ({"to": 3}, "to must be a text, or a list"),
        ({"to": [3]}, "to must be a text"),
        ({"to": "s3://"}, "to: "),
        ({"runs": ["a b"]}, "fits the name of no run"),
        ({"retention": 3}, "retention must be a table"),
        ({"max_delete": True}, "max_delete must be a whole number"),
        ({"notify_on": "never"}, "notify_on must be one of failure, change, always"),
        ({"notify_env": []}, "notify_env must be"),
        ({"ping_env": "A B"}, "ping_env must be the name of an environment variable"),
        ({"limit": "fast"}, "limit: "),
        ({"newest_first": "yes"}, "newest_first must be true or false"),
        ({"destination": "/x"}, "unknown key 'destination'"),
        ({"\x1b[2J": 1}, "unknown key"),
    ],
)
def test_values_that_cannot_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=r"/etc/ckpt/ckpt.toml: \[jobs.nightly\]") as caught:
        parse(**values)
    assert says in str(caught.value)
    assert "\x1b" not in f"{caught.value}{caught.value.hint}"


def test_a_key_by_another_name() -> None:
    with pytest.raises(UsageError) as caught:
        parse(destination="/x")
    assert caught.value.hint == "did you mean 'to'?"


def test_the_projects_job_wins_over_the_users(place: Path) -> None:
    assert load_jobs() == {}
    fill(place.parent / "config" / "ckptstore", {"ckpt.toml": _toml("user") + _toml("other")})
    fill(place, {"ckpt.toml": _toml("nightly") + _toml("other")})
    assert set(load_jobs()) == {"nightly", "user", "other"}
    assert load_job("other").directory == place
    assert load_job("user").directory == place.parent / "config" / "ckptstore"


def _toml(name: str) -> bytes:
    return f"[jobs.{name}]\nsource = '/data/live'\nrun = 'x'\nto = '/mnt/nas'\n".encode()


@pytest.mark.parametrize(
    "url", ["s3://b/x", "/data/a:b@c", "s3://b/x?region=eu", "hdfs://me@h/x", ""]
)
def test_what_is_no_secret(url: str) -> None:
    assert not is_secret_url(url)
    check_no_secret({"to": [url], "ping_env": "X", "token_env": "X"}, "here")


@pytest.mark.parametrize(
    "url", ["https://me:pw@host/", "s3://b/x?access_key=a", "smb://a:b@c/d", "x://h/?api_key=1&b=2"]
)
def test_what_is_a_secret(url: str) -> None:
    with pytest.raises(UsageError, match="carries a secret") as caught:
        check_no_secret({"to": ["/a", url]}, "here")
    assert url not in str(caught.value)


# Files of secrets


def env_file(directory: Path, text: str, mode: int = 0o600) -> Path:
    fill(directory, {"env": text.encode()})
    (directory / "env").chmod(mode)
    return directory / "env"


def test_lines_of_a_file_of_secrets(tmp_path: Path) -> None:
    text = "# one\n; two\n\nA=1\n export B = x\nC='a b'\nD=\"$A #\"\nE=\nF=a=b\n"
    with pytest.raises(UsageError, match="line 5"):
        read_env_file(env_file(tmp_path, text))
    found = read_env_file(env_file(tmp_path, text.replace("B = x", "B=x")))
    assert found == {"A": "1", "B": "x", "C": "a b", "D": "$A #", "E": "", "F": "a=b"}


def test_what_is_set_already_stays() -> None:
    environment = {"A": "mine"}
    add_to_environment({"A": "file", "B": "file"}, environment)
    assert environment == {"A": "mine", "B": "file"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_is_not_read(tmp_path: Path, mode: int) -> None:
    with pytest.raises(AccessDeniedError, match="holds secrets") as caught:
        read_env_file(env_file(tmp_path, "A=s3cr3t\n", mode))
    assert str(caught.value.hint).startswith("chmod 600")
    assert "s3cr3t" not in str(caught.value)


def test_a_line_that_is_wrong_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1") as caught:
        read_env_file(env_file(tmp_path, "s3cr3t\n"))
    assert "s3cr3t" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read_env_file(tmp_path / "env", missing_ok=True) == {}
    with pytest.raises(NotFoundError, match="does not exist"):
        read_env_file(tmp_path / "env")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    path = env_file(tmp_path, "A=1\n")
    os.chown(path, 12345, -1)
    with pytest.raises(AccessDeniedError, match="another user"):
        read_env_file(path)
