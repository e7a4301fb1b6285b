"""Server processes: free ports, health polls, and a sure end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

_START_SECONDS = 120


class Server(ABC):
    """One or more server processes with their data in a folder.

    ``start`` after ``stop`` or ``kill`` brings back the same data at the same ports.

    Attributes:
        name: What people call it.
        folder: Where it keeps its data, its logs and its description.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why it cannot run here, as a sentence with what to do; ``None`` when it can."""

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it serves."""

    # What another process needs to know of it.

    @property
    def _state_file(self) -> Path:
        return self.folder / "server.json"

    def load(self) -> dict[str, Any]:
        """What ``save`` wrote last; empty when nothing was."""
        try:
            found: dict[str, Any] = json.loads(self._state_file.read_text())
        except FileNotFoundError:
            return {}
        return found

    def save(self, **facts: Any) -> None:
        """Note ports, keys and process ids, for this and for other processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._state_file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(self.load() | facts))
        temporary.rename(self._state_file)

    def port(self, name: str) -> int:
        """A port of this server: free when it is first asked for, the same ever after."""
        ports: dict[str, int] = self.load().get("ports", {})
        if name not in ports:
            ports[name] = free_port()
            self.save(ports=ports)
        return ports[name]

    def launch(
        self,
        label: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start one process; its output goes to ``<label>.log``, its id to the description."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"{label}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.servers.keeper", str(owner()), *map(str, command)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.stdout.close()
        process.wait()
        self.save(pids={**self.load().get("pids", {}), label: pid})

    def pid(self, label: str) -> int:
        """The id of a process of it."""
        found: int = self.load()["pids"][label]
        return found

    def alive(self, label: str) -> bool:
        """Whether a process of it runs."""
        pid = self.load().get("pids", {}).get(label)
        return pid is not None and _runs(pid)

    def wait_until(self, healthy: Callable[[], bool], label: str) -> None:
        """Poll until it serves; an early death or a long silence shows its log."""
        end = time.monotonic() + _START_SECONDS
        while not healthy():
            if not self.alive(label) or time.monotonic() > end:
                log = (self.folder / f"{label}.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self.name}: {label} did not start:\n{log}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it as an operator would, and wait until it is gone."""
        self._end(signal.SIGTERM)

    def kill(self, *labels: str) -> None:
        """End it (or some of its processes) as a power cut would, and wait until it is gone."""
        self._end(signal.SIGKILL, labels)

    def _end(self, number: int, labels: Sequence[str] = ()) -> None:
        pids: dict[str, int] = self.load().get("pids", {})
        for label in reversed(labels or list(pids)):
            end_process(pids[label], number)
            del pids[label]
        self.save(pids=pids)


def kill_all(folder: Path) -> None:
    """End every process of the server in a folder, whatever its kind."""
    description = folder / "server.json"
    if description.exists():
        for pid in json.loads(description.read_text()).get("pids", {}).values():
            end_process(pid, signal.SIGKILL)


def end_process(pid: int, number: int) -> None:
    """Send a signal to a server and wait for its end; SIGKILL after ten seconds."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    patience = time.monotonic() + 10
    while _runs(pid):
        if time.monotonic() > patience:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def owner() -> int:
    """The process whose end is the end of its servers: pytest's own, not a worker of it."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether something accepts connections at a port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
