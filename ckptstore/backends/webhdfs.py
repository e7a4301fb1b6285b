"""``webhdfs://host:port/path``: a store on HDFS over HTTP, through the `hdfs` package.

``swebhdfs://`` is the same over HTTPS.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ckptstore.backends.hadoop import HadoopBackend
from ckptstore.backends.hadoopclient import (
    HadoopClient,
    HadoopOptions,
    Sink,
    Source,
    Status,
    from_remote,
    silent,
    split_location,
    too_long,
    unreachable,
)
from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    ConflictError,
    NotFoundError,
    TemporaryError,
    UsageError,
    printable,
)
from ckptstore.uri import StoreURI

try:
    import requests
    from hdfs import HdfsError
    from urllib3.exceptions import HTTPError

    from ckptstore.backends.webhdfsapi import DATA_FACTOR, open_api
except ImportError as error:
    raise UsageError(
        f"a store on webhdfs:// needs the package hdfs, which is not installed ({error})",
        hint="pip install 'ckptstore[hdfs]'",
    ) from error

T = TypeVar("T")

_PIECE = 1024 * 1024


def from_uri(uri: StoreURI) -> HadoopBackend:
    """The backend that a ``webhdfs`` or ``swebhdfs`` URI names.

    Raises:
        UsageError: an option is unknown.
    """
    authority, root = split_location(uri)
    options = dict(uri.options)
    kerberos = options.pop("auth", "simple")
    if kerberos not in ("simple", "kerberos"):
        raise UsageError(f"auth={printable(kerberos)} is not known", hint="known: simple, kerberos")
    client = WebClient(
        uri.scheme, authority, HadoopOptions.take(options, uri), kerberos=kerberos == "kerberos"
    )
    return HadoopBackend(client, root)


class WebClient(HadoopClient):
    """The web service of one or several NameNodes.

    Args:
        scheme: ``webhdfs`` or ``swebhdfs``.
        authority: Host and port; several, one of which is active, with commas between them.
        options: What the storage URI says.
        kerberos: Authenticate with the Kerberos ticket of the environment.
    """

    def __init__(
        self, scheme: str, authority: str, options: HadoopOptions, *, kerberos: bool = False
    ) -> None:
        self.address = f"{scheme}://{authority}"
        self.options = options
        web = "https" if scheme == "swebhdfs" else "http"
        self._urls = ";".join(f"{web}://{host}" for host in authority.split(","))
        self._kerberos = kerberos
        self._process = os.getpid()
        self._api: Any = None

    @property
    def api(self) -> Any:
        """This process's session: connections are not shared with a parent."""
        if self._api is None or self._process != os.getpid():
            self._process = os.getpid()
            self._api = open_api(self._urls, self.options.timeout, kerberos=self._kerberos)
        return self._api

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Run one request.

        Args:
            what: The path, for messages.
            function: The request.

        Raises:
            CkptError: what its error means.
        """
        try:
            return function()
        except HdfsError as error:
            raise self._remote(error, what) from error
        except requests.exceptions.SSLError as error:
            raise CkptError(
                f"{self.address} has no certificate to trust: {printable(str(error))}",
                hint="REQUESTS_CA_BUNDLE names the file of certificates to trust",
            ) from error
        except requests.exceptions.Timeout as error:
            raise silent(self.address, self.options.timeout) from error
        except (requests.exceptions.RequestException, HTTPError, OSError) as error:
            cause = _root_cause(error)
            if isinstance(cause, TimeoutError):
                raise silent(self.address, self.options.timeout) from error
            reason = cause.strerror if isinstance(cause, OSError) else None
            raise unreachable(self.address, reason or str(cause)) from error
        except (ValueError, KeyError) as error:  # an answer that is no WebHDFS
            raise CkptError(
                f"{self.address}{printable(what)}: this is not an answer of WebHDFS",
                hint="is it the NameNode's HTTP port (often 9870)?",
            ) from error

    def _remote(self, error: HdfsError, what: str) -> CkptError:
        message = error.message
        text = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
        if error.exception is None:
            if "Authentication failure" in text:
                return AccessDeniedError(
                    f"{self.address}: authentication failed", hint="Kerberos? add ?auth=kerberos"
                )
            return TemporaryError(f"{self.address}{printable(what)}: {printable(text[:200])}")
        return from_remote(str(error.exception), text, f"{self.address}{what}")

    def status(self, path: str) -> Status | None:
        """See :class:`HadoopClient`."""
        try:
            found = self.call(path, lambda: self.api.file_status(path))
        except NotFoundError:
            return None
        return _status(found, path.rpartition("/")[2])

    def list(self, path: str) -> list[Status] | None:
        """See :class:`HadoopClient`."""
        try:
            found = self.call(path, lambda: self.api.listing(path))
        except NotFoundError:
            return None
        if len(found) == 1 and not found[0]["pathSuffix"]:  # a file lists itself
            return None
        return [_status(one, one["pathSuffix"]) for one in found]

    def read(self, path: str, limit: int) -> bytes:
        """See :class:`HadoopClient`. One request: between two the file may be replaced."""

        def whole() -> bytes:
            data = b""
            with self.api.part(path, 0, limit + 1) as answer:
                while len(data) <= limit and (more := answer.raw.read(limit + 1 - len(data))):
                    data += more
            return data

        data = self.call(path, whole)
        if len(data) > limit:
            raise too_long(f"{self.address}{path}", limit)
        return data

    def open(self, path: str) -> Source:
        """See :class:`HadoopClient`."""
        return _WebSource(self, path)

    def create(self, path: str, *, executable: bool = False) -> Sink:
        """See :class:`HadoopClient`."""
        return _WebSink(self, path, executable=executable)

    def make_directories(self, path: str) -> None:
        """See :class:`HadoopClient`."""
        self.call(path, lambda: self.api.directories(path))

    def rename(self, source: str, target: str, *, replace: bool = False) -> bool:
        """See :class:`HadoopClient`.

        With an option, the default one even, WebHDFS does the rename that fails on an existing
        target and never puts the source inside it. A gateway that does not know the option would
        do the other: it is told by its answer.
        """
        option = "OVERWRITE" if replace else "NONE"
        try:
            answer = self.call(target, lambda: self.api.renamed(source, target, option))
        except ConflictError:
            return False
        except TemporaryError as error:
            if " must both be " in str(error):  # a file and a directory
                return False
            raise
        if answer:
            raise UsageError(
                f"{self.address} does not know the option of a rename that makes it safe",
                hint="HttpFS? give the address of the NameNode itself",
            )
        return True

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """See :class:`HadoopClient`."""
        self.call(path, lambda: self.api.deleted(path, recursive))

    def close(self) -> None:
        """See :class:`HadoopClient`."""
        if self._api is not None and self._process == os.getpid():
            self._api.close()
            self._api = None


def _status(found: dict[str, Any], name: str) -> Status:
    kind = found["type"]
    return Status(
        name=name,
        size={"FILE": int(found["length"]), "DIRECTORY": 0}.get(kind, -1),
        modified=found["modificationTime"] / 1000,
        is_directory=kind == "DIRECTORY",
        block_size=int(found.get("blockSize", 0)),
    )


def _root_cause(error: BaseException) -> BaseException:
    """The innermost reason: requests wraps urllib3, which wraps the operating system's."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error


class _WebSource(Source):
    def __init__(self, client: WebClient, path: str) -> None:
        self._client = client
        self._path = path
        found = client.status(path)
        if found is None or found.is_directory or found.size < 0:
            raise NotFoundError(f"{client.address}{printable(path)}: no such file")
        self.size = found.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """See :class:`Source`."""
        return self._client.call(self._path, lambda: self._read(offset, buffer))

    def _read(self, offset: int, buffer: memoryview) -> int:
        done = 0
        with self._client.api.part(self._path, offset, len(buffer)) as answer:
            while done < len(buffer):
                count = answer.raw.readinto(buffer[done : done + _PIECE])
                if not count:
                    break
                done += count
        return done


class _WebSink(Sink):
    """One request whose body is what ``write`` is given.

    A thread sends it; ``write`` waits until its data has gone out, so nothing is copied or queued.
    """

    def __init__(self, client: WebClient, path: str, *, executable: bool) -> None:
        self._client = client
        self._path = path
        options = client.options
        params: dict[str, Any] = {"permission": "755" if executable else "644"}
        if options.replication:
            params["replication"] = options.replication
        if options.block_size:
            params["blocksize"] = options.block_size
        address = client.call(path, lambda: client.api.create_at(path, **params))
        self._data: SimpleQueue[memoryview | None] = SimpleQueue()
        self._events: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._send, args=(address,), name="ckptstore-webhdfs", daemon=True
        )
        self._thread.start()

    def _send(self, address: str) -> None:
        try:
            self._client.call(self._path, lambda: self._client.api.send(address, self._pieces()))
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
            self._events.put(error)
        else:
            self._events.put(None)

    def _pieces(self) -> Iterator[memoryview]:
        while (data := self._data.get()) is not None:
            for start in range(0, len(data), _PIECE):
                yield data[start : start + _PIECE]
            del data
            self._events.put(None)  # the last piece has gone: the next was asked for

    def _wait(self) -> None:
        seconds = self._client.options.timeout * DATA_FACTOR
        try:
            error = self._events.get(timeout=seconds)
        except Empty:
            raise silent(self._client.address, seconds) from None
        if error is not None:
            raise error

    def write(self, data: memoryview) -> None:
        """See :class:`Sink`."""
        if data:
            self._data.put(data)
            self._wait()

    def close(self) -> None:
        """See :class:`Sink`."""
        self._data.put(None)
        self._wait()
        self._thread.join()

    def abort(self) -> None:
        """See :class:`Sink`. The DataNode completes what it has; it is deleted next.

        A connection that is closed instead tells nothing of when the DataNode makes the file: that
        could be after it was deleted.
        """
        if self._thread.is_alive():
            self._data.put(None)
            self._thread.join(timeout=self._client.options.timeout)
