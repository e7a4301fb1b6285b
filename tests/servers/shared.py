"""One server of a kind for a whole test run, whatever the number of workers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TypeVar

import pytest

from tests.servers.process import Server, kill_all, owner

S = TypeVar("S", bound=Server)


def require(kind: type[Server]) -> None:
    """Skip the test where a server cannot run; fail it where servers are required (CI)."""
    reason = kind.missing()
    if reason is None:
        return
    if os.environ.get("CKPT_REQUIRE_SERVERS"):
        pytest.fail(f"{kind.name} is required here: {reason}")
    pytest.skip(f"{kind.name}: {reason}")


def shared(kind: type[S], factory: pytest.TempPathFactory) -> S:
    """The run's server of this kind: started by whoever needs it first."""
    require(kind)
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / f"servers-{kind.__name__.lower()}"
    folder.mkdir(exist_ok=True)
    server = kind(folder)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not server.load().get("started"):
            server.start()
            server.save(started=owner())
    return server


def stop_all(base: Path) -> None:
    """End every shared server below a run's temporary folder; its data is of no use any more."""
    for folder in base.glob("servers-*"):
        kill_all(folder)
