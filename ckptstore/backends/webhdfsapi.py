"""The requests of WebHDFS, by the `hdfs` package.

Two things are done otherwise than the package does them: paths are taken as they are (it would
expand ``#LATEST``), and the address of a DataNode that the NameNode redirects to gets the path of
our own, because the NameNode normalises Unicode in it.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import quote, urlsplit

import requests
from hdfs.client import Client, _Request, _to_error
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from ckptstore.errors import UsageError

DATA_FACTOR = 3
"""How many times longer than another request one for a block of data may take."""

_CONNECTIONS = 32


def open_api(urls: str, timeout: float, *, kerberos: bool) -> Any:
    """A client of the package's, with our requests added."""
    session = requests.Session()
    # A request is repeated where it was not sent, and where it only looks. (A rename whose answer
    # was lost must not be: it would find its own work in its way.)
    retry = Retry(total=3, connect=3, read=1, backoff_factor=0.3, allowed_methods={"GET"})
    adapter = HTTPAdapter(
        pool_connections=_CONNECTIONS, pool_maxsize=_CONNECTIONS, max_retries=retry
    )
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    if not kerberos:
        user = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
        session.params = {"user.name": user}
        return Api(urls, timeout=timeout, session=session)
    try:
        from hdfs.ext.kerberos import KerberosClient
    except ImportError as error:
        raise UsageError(
            f"auth=kerberos needs a package that is not installed ({error})",
            hint="pip install 'hdfs[kerberos]'",
        ) from error
    return type("_KerberosApi", (Api, KerberosClient), {})(urls, timeout=timeout, session=session)


class Api(Client):  # type: ignore[misc] # it has no types
    """The package's client with paths as they are, and with its redirects left to us."""

    _create_1 = _Request("PUT", allow_redirects=False)
    _open_1 = _Request("GET", allow_redirects=False)

    def resolve(self, hdfs_path: str) -> str:
        """The path as it is."""
        return hdfs_path

    def file_status(self, path: str) -> dict[str, Any]:
        """GETFILESTATUS."""
        return cast(dict[str, Any], self._get_file_status(path).json()["FileStatus"])

    def listing(self, path: str) -> list[dict[str, Any]]:
        """LISTSTATUS."""
        return cast(
            list[dict[str, Any]], self._list_status(path).json()["FileStatuses"]["FileStatus"]
        )

    def directories(self, path: str) -> None:
        """MKDIRS."""
        self._mkdirs(path)

    def renamed(self, source: str, target: str, option: str) -> bytes:
        """RENAME. Returns the body: empty where the option was understood."""
        answer = self._rename(source, destination=target, renameoptions=option)
        return cast(bytes, answer.content)

    def deleted(self, path: str, recursive: bool) -> None:
        """DELETE."""
        self._delete(path, recursive="true" if recursive else "false")

    def part(self, path: str, offset: int, length: int) -> requests.Response:
        """OPEN: a range of a file, from a DataNode."""
        answer = self._open_1(path, offset=offset, length=length)
        return self._at_datanode("GET", answer, path, stream=True)

    def create_at(self, path: str, **params: Any) -> str:
        """CREATE: the address of a DataNode that takes the data."""
        answer = self._create_1(path, overwrite="false", **params)
        return _with_path(answer.headers["location"], path)

    def send(self, address: str, data: Iterator[memoryview]) -> None:
        """Send the data of a CREATE to a DataNode; it is complete when this returns."""
        answer = self._session.request(
            "PUT",
            address,
            data=data,
            headers={"content-type": "application/octet-stream"},
            timeout=(self._timeout, self._timeout * DATA_FACTOR),
        )
        if not answer.ok:
            raise _to_error(answer)

    def _at_datanode(self, verb: str, answer: Any, path: str, **how: Any) -> requests.Response:
        address = _with_path(answer.headers["location"], path)
        found = self._session.request(verb, address, timeout=self._timeout, **how)
        if not found.ok:
            raise _to_error(found)
        return cast(requests.Response, found)

    def close(self) -> None:
        """Close its connections."""
        self._session.close()


def _with_path(location: str, path: str) -> str:
    """The address of a DataNode with the path that was meant."""
    parts = urlsplit(location)
    return parts._replace(path=quote(f"/webhdfs/v1{path}")).geturl()
