"""An HTTP proxy before a server that does to chosen requests what networks do."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Self

Fault = Literal["refuse", "reset", "hang", "lose-reply", "cut"]
"""What happens to a request.

``refuse``: 503 SlowDown, without asking the server. ``reset``: the connection breaks in the middle
of the request's body. ``hang``: it is accepted and never answered. ``lose-reply``: the server does
it, and the connection breaks before its answer. ``cut``: it breaks in the body of the answer.
"""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Too many requests.</Message></Error>"


@dataclass
class FaultyProxy:
    """A proxy; use it as a context manager.

    Args:
        upstream: Port of the server on loopback.

    Attributes:
        plan: Decides, from the method and the target of a request, what happens to it.
        seen: Method and target of every request.
        heads: The heads of all requests.
        faults: What was done to some of them.
    """

    upstream: int
    plan: Callable[[str, str], Fault | None] = lambda method, target: None
    seen: list[tuple[str, str]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: set[socket.socket] = set()
        self._closed = False
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        """Where it listens."""
        number: int = self._listener.getsockname()[1]
        return number

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def once(self, fault: Fault, chosen: Callable[[str, str], bool], times: int = 1) -> None:
        """Let the first ``times`` requests that are chosen suffer ``fault``."""
        left = [times]

        def plan(method: str, target: str) -> Fault | None:
            if left[0] > 0 and chosen(method, target):
                left[0] -= 1
                return fault
            return None

        self.plan = plan

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join()
        self._listener.close()
        with self.lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        while self._open:
            time.sleep(0.01)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._closed:
                connection.close()
                return
            with self.lock:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, suppress(OSError):
                self._request(client)
        finally:
            with self.lock:
                self._open.discard(client)

    def _request(self, client: socket.socket) -> None:
        """One request a connection: the server is told to close it after its answer."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = client.recv(65536)
            if not more:
                return
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        with self.lock:
            self.seen.append((method, target))
            self.heads.append(head)
            fault = self.plan(method, target)
            if fault is not None:
                self.faults.append(fault)
        if fault == "hang":
            while client.recv(65536):
                pass
            return
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        if fault == "refuse":
            self._refuse(client, head, length - len(body))
            return
        head = re.sub(rb"\r\nconnection: *[^\r]*", b"", head, flags=re.IGNORECASE)
        with socket.create_connection(("127.0.0.1", self.upstream)) as server:
            server.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
            sender = threading.Thread(
                target=self._send_body,
                args=(client, server, length - len(body), fault == "reset"),
                daemon=True,
            )
            sender.start()
            self._answer(client, server, fault)

    @staticmethod
    def _refuse(client: socket.socket, head: bytes, left: int) -> None:
        if b"100-continue" in head.lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while left > 0:
            more = len(client.recv(65536))
            if not more:
                return
            left -= more
        client.sendall(
            b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Type: application/xml\r\n"
            b"Content-Length: %d\r\n\r\n" % len(_SLOW_DOWN) + _SLOW_DOWN
        )

    @staticmethod
    def _send_body(client: socket.socket, server: socket.socket, left: int, breaks: bool) -> None:
        stop = left // 2 if breaks else 0
        with suppress(OSError):
            while left > stop:
                data = client.recv(min(65536, left))
                if not data:
                    return
                server.sendall(data)
                left -= len(data)
            if breaks:
                server.shutdown(socket.SHUT_RDWR)
                client.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _answer(client: socket.socket, server: socket.socket, fault: Fault | None) -> None:
        sent, whole = 0, b""
        while True:
            data = server.recv(65536)
            if not data:
                return
            if fault == "lose-reply":
                whole += data
                if whole.startswith(b"HTTP/1.1 100"):  # the client must send its body first
                    client.sendall(data)
                    whole = b""
                continue
            if fault == "cut":
                head = data.find(b"\r\n\r\n")
                data = data[: max(head + 4, len(data) // 2)] if head >= 0 else data[:1000]
            client.sendall(data)
            sent += len(data)
            if fault == "cut":
                client.shutdown(socket.SHUT_RDWR)
                return
