"""A mirror in a process of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckptstore import open_store
from ckptstore.maintenance.mirror.beside import MirrorBeside
from tests.trainer.support import until

GROUP = Path("/proc/self/autogroup")


@pytest.mark.skipif(not GROUP.exists(), reason="this kernel does not group sessions")
def test_it_has_the_lowest_priority_although_it_is_a_session_of_its_own(tmp_path: Path) -> None:
    """Where Linux shares the processor among sessions, the niceness of a process is not enough."""
    source = str(tmp_path / "source")
    open_store(source).create()
    beside = MirrorBeside(source, [str(tmp_path / "mirror")], tmp_path, interval=0.05)
    until(lambda: beside.states, "the first pass")
    state = beside.states
    assert state is not None
    assert [m.problem for m in state.mirrors.values()] == [None], "there is nothing to mirror yet"
    assert os.getpriority(os.PRIO_PROCESS, beside.pid) == 19
    assert os.getsid(beside.pid) == beside.pid
    group = Path(f"/proc/{beside.pid}/autogroup").read_text(encoding="ascii")
    assert group.endswith("nice 19\n")
    with open_store(source).save(run="run", step=1) as save, save.open("weights") as file:
        file.write(b"weights")
    assert beside.finish(None)
    assert beside.states is not None
    assert [m.ok for m in beside.states.mirrors.values()] == [True]
    assert [c.step for c in open_store(str(tmp_path / "mirror")).list("run")] == [1]


def test_a_process_that_was_killed_has_not_finished(tmp_path: Path) -> None:
    source = open_store(str(tmp_path / "source"))
    with source.save("run", 1) as files:
        files.add_bytes("x", b"x")
    beside = MirrorBeside(source.uri, [str(tmp_path / "target")], tmp_path)
    os.kill(beside.pid, signal.SIGKILL)
    assert not beside.finish(30)
    assert beside.revive()
    assert beside.finish(60)
    assert [c.step for c in open_store(str(tmp_path / "target")).list("run")] == [1]
