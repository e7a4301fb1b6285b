"""Servers that listen to what a job tells: HTTP for pings and webhooks, SMTP for mail."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller

from tests.servers.process import free_port


@dataclass
class Hook:
    """An HTTP server that keeps what it is sent.

    Attributes:
        url: Where it is.
        requests: What came, as (path, body).
        answers: What it answers, one after the other; 200 when there is none left.
        answering: While it is not set, nobody is answered.
    """

    url: str
    requests: queue.Queue[tuple[str, str]] = field(default_factory=queue.Queue)
    answers: list[int] = field(default_factory=list)
    answering: threading.Event = field(default_factory=threading.Event)

    def next(self, seconds: float = 20) -> tuple[str, str]:
        """The next request; waits for it."""
        return self.requests.get(timeout=seconds)

    def paths(self) -> list[str]:
        """The paths of all requests that came and were not looked at."""
        found = []
        while not self.requests.empty():
            found.append(self.requests.get()[0])
        return found


@contextmanager
def hook_server() -> Iterator[Hook]:
    """A :class:`Hook` that listens."""
    hook = Hook("")
    hook.answering.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hook.requests.put((self.path, body.decode()))
            hook.answering.wait(30)
            self.send_response(hook.answers.pop(0) if hook.answers else 200)
            self.send_header("Content-Length", "0")
            with suppress(BrokenPipeError):  # the client was killed
                self.end_headers()

        do_GET = do_POST  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hook.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hook
    finally:
        hook.answering.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def mail_server() -> Iterator[tuple[int, queue.Queue[tuple[list[str], str]]]]:
    """The port of an SMTP server, and the (recipients, message) that it took."""
    mails: queue.Queue[tuple[list[str], str]] = queue.Queue()

    class Handler:
        async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
            mails.put((list(envelope.rcpt_tos), envelope.content.decode()))
            return "250 OK"

    controller = Controller(Handler(), hostname="127.0.0.1", port=free_port())
    controller.start()
    try:
        yield controller.port, mails
    finally:
        controller.stop()
