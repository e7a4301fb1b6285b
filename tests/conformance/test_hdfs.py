"""The conformance suite on a real Hadoop, through each of its clients."""

from __future__ import annotations

import itertools
import os
import re
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

import hdfs_native
import pytest
import requests
from hdfs_native import WriteOptions
from pyarrow import fs

from ckptstore.backends import open_backend
from ckptstore.backends.base import Backend
from ckptstore.errors import AccessDeniedError, CkptError, TemporaryError, UsageError
from ckptstore.testing.conformance import NAMES, BackendConformance
from ckptstore.uri import StoreURI
from tests.conftest import FULL
from tests.servers.hadoop import Hadoop
from tests.servers.process import free_port

BASIC_PLANE = "\uffff"
"""The last character that libhdfs knows: it takes others for two."""

TRIED = ("a[1].pt", "%2F%41", "a+b&c=d;e,f", "back\\slash", "ünïcödé-日本語-🙂", "e\u0301", "a:b")
"""The names that another program writes in a short run."""

_roots = itertools.count()


class HadoopConformance(BackendConformance):
    """A directory on the run's Hadoop; plain HTTP requests look behind the backend's back."""

    @pytest.fixture(autouse=True)
    def _server(self, hadoop: Hadoop, monkeypatch: pytest.MonkeyPatch, worker_id: str) -> None:
        for key, value in hadoop.environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("HADOOP_USER_NAME", "root")
        self.server = hadoop
        self.root = f"conformance/{worker_id}/{os.getpid()}-{next(_roots)}"

    @pytest.mark.parametrize("name", NAMES if FULL else TRIED)
    def test_a_name_written_by_another_program_is_found(self, backend: Backend, name: str) -> None:
        """As everywhere, with a sample of the names in a short run."""
        super().test_a_name_written_by_another_program_is_found(backend, name)

    def test_a_server_that_is_not_there_is_no_empty_place(self) -> None:
        """Refused is an error that can pass, with the address; never "not there"."""
        port = free_port()
        closed = re.sub(r"127.0.0.1:\d+", f"127.0.0.1:{port}", self.uri())
        backend = open_backend(StoreURI.parse(closed))
        for call in (backend.stat, backend.list, backend.open_reader):
            with pytest.raises(TemporaryError, match=str(port)):
                call("d/x")
        backend.close()

    def test_what_one_may_not_see_is_not_absent(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another user looks into a closed directory."""
        backend.put("closed/x", b"x")
        native = hdfs_native.Client(f"hdfs://{self.server.authority}")
        native.set_permission(f"/{self.root}/closed", 0o700)
        monkeypatch.setenv("HADOOP_USER_NAME", "mallory")
        other = self.make()
        for call in (other.stat, other.list, other.open_reader):
            for key in ("closed/x", "closed/y"):
                with pytest.raises(AccessDeniedError, match="ermission denied"):
                    call(key)
        with pytest.raises(AccessDeniedError):
            other.put("closed/y", b"y")
        other.close()

    def test_a_name_of_hdfs_itself_is_refused(self, backend: Backend) -> None:
        with pytest.raises(UsageError, match=r"\.snapshot"):
            backend.open_writer("d/.snapshot/x")

    @abstractmethod
    def uri(self) -> str:
        """The store's URI."""

    def make(self) -> Backend:
        return open_backend(StoreURI.parse(self.uri()))

    def raw_write(self, key: str, data: bytes) -> None:
        at = self._datanode("PUT", key, op="CREATE", overwrite="true")
        requests.put(at, data, timeout=60).raise_for_status()

    def raw_read(self, key: str) -> bytes | None:
        at = self._datanode("GET", key, op="OPEN")
        if not at:
            return None
        found = requests.get(at, timeout=60)
        if found.status_code == 404:  # deleted since the NameNode was asked
            return None
        found.raise_for_status()
        data: bytes = found.content
        return data

    def _datanode(self, verb: str, key: str, **params: str) -> str:
        """Where a DataNode takes or gives a file; nothing when there is none."""
        path = quote(f"/webhdfs/v1/{self.root}/{key}")
        answer = requests.request(
            verb,
            f"http://{self.server.web_authority}{path}",
            params={"user.name": "root", **params},
            allow_redirects=False,
            timeout=60,
        )
        if answer.status_code == 404:
            return ""
        assert answer.status_code == 307, answer.text
        # The NameNode composes Unicode in the path, which would be another file's.
        location: str = answer.headers["location"]
        return urlsplit(location)._replace(path=path).geturl()


class TestNative(HadoopConformance):
    """hdfs-native."""

    def uri(self) -> str:
        return f"hdfs://{self.server.authority}/{self.root}"


class TestWeb(HadoopConformance):
    """The `hdfs` package; Hadoop's own clients look behind its back."""

    @pytest.fixture(autouse=True)
    def _java(self, _server: None) -> None:
        host, _, port = self.server.authority.partition(":")
        self.java: Any = fs.HadoopFileSystem(host, int(port), user="root")

    def uri(self) -> str:
        return f"webhdfs://{self.server.web_authority}/{self.root}"

    def raw_write(self, key: str, data: bytes) -> None:
        path = f"/{self.root}/{key}"
        if max(path) > BASIC_PLANE:  # libhdfs would write another name
            native = hdfs_native.Client(f"hdfs://{self.server.authority}")
            with native.create(path, WriteOptions(overwrite=True, create_parent=True)) as f:
                f.write(data)
            return
        with self.java.open_output_stream(path) as f:
            f.write(data)

    def raw_read(self, key: str) -> bytes | None:
        path = f"/{self.root}/{key}"
        try:
            if max(path) > BASIC_PLANE:
                native = hdfs_native.Client(f"hdfs://{self.server.authority}")
                content: bytes = native.read(path).read()
                return content
            with self.java.open_input_file(path) as f:
                found: bytes = f.readall()
        except FileNotFoundError:
            return None
        return found


class TestArrow(HadoopConformance):
    """pyarrow with libhdfs, which cannot do all of it, and says so."""

    def uri(self) -> str:
        return f"hdfs://{self.server.authority}/{self.root}?client=pyarrow"

    def names(self) -> list[str]:
        return [name for name in super().names() if max(name) <= BASIC_PLANE]

    @pytest.mark.parametrize("call", [Backend.stat, Backend.list, Backend.open_writer])
    def test_a_name_that_libhdfs_would_change_is_refused(
        self, backend: Backend, call: Callable[[Backend, str], object]
    ) -> None:
        with pytest.raises(UsageError, match="libhdfs"):
            getattr(backend, call.__name__)("d/🙂")
        self.raw_write("e/🙂", b"x")
        with pytest.raises(CkptError, match="libhdfs"):
            backend.list("e")

    def test_it_works_after_a_fork(self, backend: Backend) -> None:
        """A JVM does not: the child is told, and does not hang."""
        backend.put("d/x", b"parent")
        pid = os.fork()
        if pid == 0:
            told = False
            try:
                backend.read("d/x", 10)
            except UsageError as error:
                told = "fork" in str(error)
            finally:
                os._exit(0 if told else 1)
        assert os.waitpid(pid, 0)[1] == 0

    def test_put_replaces_whole(self, backend: Backend) -> None:
        """For a moment there is nothing: its rename deletes the target first. Never a mixture."""
        contents = [bytes([65 + i]) * (1000 + i) for i in range(20)]
        backend.put("d/lease", contents[0])
        done = threading.Event()
        seen: set[bytes | None] = set()

        def look() -> None:
            while not done.is_set():
                seen.add(self.raw_read("d/lease"))

        reader = threading.Thread(target=look)
        reader.start()
        for content in contents:
            backend.put("d/lease", content)
        done.set()
        reader.join()
        assert seen <= {*contents, None}
        assert self.raw_read("d/lease") == contents[-1]
