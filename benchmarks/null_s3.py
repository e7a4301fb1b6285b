"""An S3 server without storage: what is measured against it is the client.

Takes any bytes and forgets them; gives zeros. ``python -m benchmarks.null_s3 [--connection-mb N]
[--delay-ms N]`` prints its port.
"""

from __future__ import annotations

import argparse
import re
import socket
import threading
import time
from contextlib import suppress

from ckptstore.layout import TEMPORARY_PREFIX

_CHUNK = 1024 * 1024
_ZEROS = bytes(_CHUNK)
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d*)\r\n", re.IGNORECASE)
_CHECKSUM = re.compile(rb"\r\nx-amz-checksum-crc64nvme: [^\r]+", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\n(?:x-amz-decoded-)?content-length: (\d+)\r\n", re.IGNORECASE)


class NullS3:
    """The server, on a free port of loopback.

    Args:
        object_size: Bytes of every object that is read.
        connection_mb: MB/s that one connection carries at most; 0 is no limit.
        delay: Seconds before each answer.
    """

    def __init__(self, object_size: int, connection_mb: float = 0, delay: float = 0) -> None:
        self._size = object_size
        self._rate = connection_mb * 1e6
        self._delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Serve for ever."""
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, suppress(OSError):
            while self._request(connection):
                pass

    def _request(self, connection: socket.socket) -> bool:
        head = b""
        while b"\r\n\r\n" not in head:
            more = connection.recv(65536)
            if not more:
                return False
            head += more
        head, _, body = head.partition(b"\r\n\r\n")
        head += b"\r\n"
        method, target = head.split(b" ", 2)[:2]
        length = max(
            (int(n) for n in re.findall(rb"\r\ncontent-length: (\d+)", head.lower())), default=0
        )
        if b"\r\nexpect: 100-continue" in head.lower() and not body:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._swallow(connection, length - len(body))
        if self._delay:
            time.sleep(self._delay)
        self._reply(connection, method, target, head)
        return True

    def _reply(self, connection: socket.socket, method: bytes, target: bytes, head: bytes) -> None:
        conditional = b"\r\nif-none-match:" in head.lower()
        if conditional and TEMPORARY_PREFIX.encode() in target:  # it asks whether we mind
            connection.sendall(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n")
        elif method == b"GET" and b"list-type" not in target:
            self._send_object(connection, head)
        elif method == b"HEAD":
            bucket_only = target.partition(b"?")[0].strip(b"/").count(b"/") == 0
            size = 0 if bucket_only else self._size
            self._answer(connection, b"", size, b'ETag: "0"\r\n')
        elif method == b"POST" and b"uploads" in target:
            self._answer(
                connection,
                b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
            )
        elif method == b"POST" and b"uploadId" in target:
            self._answer(
                connection,
                b'<CompleteMultipartUploadResult><ETag>"0"</ETag></CompleteMultipartUploadResult>',
            )
        elif method == b"GET":
            self._answer(
                connection, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            )
        else:
            checksum = _CHECKSUM.search(head)  # as if it had been compared
            told = checksum[0][2:] + b"\r\n" if checksum else b""
            self._answer(connection, b"", None, b'ETag: "0"\r\n' + told)

    def _answer(
        self, connection: socket.socket, body: bytes, length: int | None = None, extra: bytes = b""
    ) -> None:
        size = len(body) if length is None else length
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n"
            b"Content-Type: application/xml\r\n"
            + extra
            + b"Content-Length: %d\r\n\r\n" % size
            + body
        )

    def _swallow(self, connection: socket.socket, length: int) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        started, done = time.monotonic(), 0
        while done < length:
            count = connection.recv_into(buffer, min(_CHUNK, length - done))
            if count == 0:
                raise ConnectionError
            done += count
            self._pace(started, done)

    def _send_object(self, connection: socket.socket, head: bytes) -> None:
        found = _RANGE.search(head)
        first = int(found[1]) if found else 0
        last = int(found[2]) if found and found[2] else self._size - 1
        last = min(last, self._size - 1)
        length = last - first + 1
        status = b"206 Partial Content" if found else b"200 OK"
        connection.sendall(
            b"HTTP/1.1 "
            + status
            + b'\r\nETag: "0"\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n'
            b"Content-Range: bytes %d-%d/%d\r\nContent-Length: %d\r\n\r\n"
            % (first, last, self._size, length)
        )
        started, done = time.monotonic(), 0
        while done < length:
            count = min(_CHUNK, length - done)
            connection.sendall(memoryview(_ZEROS)[:count])
            done += count
            self._pace(started, done)

    def _pace(self, started: float, done: int) -> None:
        if self._rate:
            wait = done / self._rate - (time.monotonic() - started)
            if wait > 0:
                time.sleep(wait)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512 * 1024 * 1024)
    parser.add_argument("--connection-mb", type=float, default=0)
    parser.add_argument("--delay-ms", type=float, default=0)
    options = parser.parse_args()
    server = NullS3(options.size, options.connection_mb, options.delay_ms / 1000)
    print(server.port, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
