"""Pings and notifications, to real servers."""

from __future__ import annotations

import json
import logging
import socket
import threading

import pytest

from ckptstore.backup import notify as notify_module
from ckptstore.backup.notify import notify, ping
from tests.backup.support import hook_server, mail_server
from tests.servers.process import free_port

SECRET = "s3cr3t-1d"


def test_a_ping_reaches_the_server() -> None:
    with hook_server() as hook:
        there = {"PING": f"{hook.url}/{SECRET}/"}
        assert ping("PING", "start", environment=there) is None
        assert ping("PING", "", "all is well", environment=there) is None
        assert ping("PING", "3", "not all is well ✗", environment=there) is None
        assert [hook.next(), hook.next(), hook.next()] == [
            (f"/{SECRET}/start", ""),
            (f"/{SECRET}/", "all is well"),
            (f"/{SECRET}/3", "not all is well ✗"),
        ]


def test_a_query_stays_behind_the_path() -> None:
    with hook_server() as hook:
        ping("PING", "start", environment={"PING": f"{hook.url}/a?create=1"})
        assert hook.next()[0] == "/a/start?create=1"


def test_a_ping_is_tried_again_when_that_may_help() -> None:
    with hook_server() as hook:
        there = {"PING": f"{hook.url}/{SECRET}"}
        hook.answers += [503, 500]
        assert ping("PING", environment=there, pause=0) is None
        assert len(hook.paths()) == 3
        hook.answers += [404]
        said = ping("PING", environment=there, pause=0)
        assert said == "the ping by PING failed: the server said 404"
        assert len(hook.paths()) == 1


@pytest.mark.parametrize(
    "url",
    ["", f"{SECRET}", f"file:///etc/{SECRET}", f"ftp://host/{SECRET}", f"http:///{SECRET}",
     f"http://[{SECRET}", f"http://host:{SECRET}/", f"http://127.0.0.1:1/{SECRET}",
     f"http://nowhere.invalid/{SECRET}", f"http://a b/{SECRET}"],
)  # fmt: skip
def test_a_ping_that_cannot_be_is_a_sentence_without_the_url(url: str) -> None:
    said = ping("PING", "start", environment={"PING": url}, pause=0)
    assert said is not None
    assert "PING" in said
    assert SECRET not in said


def test_a_server_that_does_not_answer_does_not_hold_the_job_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notify_module, "PING_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/{SECRET}"
        said = ping("PING", environment={"PING": url}, pause=0)
    assert said is not None
    assert SECRET not in said


def test_a_server_that_speaks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(3):
                connection, _ = server.accept()
                connection.recv(1000)
                connection.sendall(b"220 mail ready\r\n")
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/{SECRET}"
        said = ping("PING", environment={"PING": url}, pause=0)
        thread.join()
    assert said is not None
    assert SECRET not in said


def test_a_webhook_gets_what_was_said() -> None:
    with hook_server() as hook:
        there = {"HOOK": f"{hook.url.replace('http', 'json')}/hook/{SECRET}"}
        assert notify(["HOOK"], "nightly failed", "why", failed=True, environment=there) == []
        path, body = hook.next()
        assert path.startswith(f"/hook/{SECRET}")
        sent = json.loads(body)
        assert (sent["title"], sent["message"], sent["type"]) == (
            "nightly failed",
            "why",
            "failure",
        )


def test_mail_arrives() -> None:
    with mail_server() as (port, mails):
        there = {
            "MAIL": f"mailto://127.0.0.1:{port}?smtp=127.0.0.1&from=ckpt@example.org"
            "&to=team@example.org&mode=insecure&format=text"
        }
        assert (
            notify(["MAIL"], "nightly is well again", "2 copied", failed=False, environment=there)
            == []
        )
        recipients, message = mails.get(timeout=20)
    assert recipients == ["team@example.org"]
    assert "Subject: nightly is well again" in message
    assert "2 copied" in message


def test_each_variable_that_fails_is_named_and_the_others_are_told(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with hook_server() as hook, caplog.at_level(logging.DEBUG):
        there = {
            "DOWN": f"json://127.0.0.1:{free_port()}/{SECRET}",
            "ODD": f"nosuch://{SECRET}",
            "GOOD": f"{hook.url.replace('http', 'json')}/a {hook.url.replace('http', 'json')}/b",
        }
        said = notify(
            ["DOWN", "ODD", "UNSET", "GOOD"], "title", "body", failed=True, environment=there
        )
        assert sorted(path.rstrip("/") for path in hook.paths()) == ["/a", "/b"]
    assert [line.split(" failed")[0].split(": UNSET")[0] for line in said] == [
        "the notification by DOWN",
        "the notification by ODD",
        "nobody is notified",
    ]
    shown = capfd.readouterr()
    assert SECRET not in " ".join(said) + shown.out + shown.err
    assert not [r for r in caplog.records if r.name.startswith("apprise") and SECRET in r.message]
