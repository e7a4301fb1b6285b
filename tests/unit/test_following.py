"""When a mirror that follows tries again."""

from __future__ import annotations

import threading
from pathlib import Path

from ckptstore import open_store
from ckptstore.errors import TemporaryError
from ckptstore.maintenance.mirror import Follower, How
from ckptstore.store import Store


def test_a_mirror_that_failed_is_not_tried_again_for_a_new_checkpoint(tmp_path: Path) -> None:
    """Each try costs the training something; the end still gets its last pass."""
    source = str(tmp_path / "source")
    with open_store(source).save("run", 1) as files:
        files.add_bytes("x", b"x")
    tries: list[int] = []
    tried = threading.Event()

    def open_target() -> Store:
        tries.append(1)
        tried.set()
        raise TemporaryError("no answer")

    follower = Follower(
        str(tmp_path / "target"), lambda: open_store(source), open_target, How(), interval=60.0
    )
    thread = threading.Thread(target=follower.run)
    thread.start()
    assert tried.wait(30)
    follower.wake()
    thread.join(1.0)
    assert len(tries) == 1
    follower.finish()
    thread.join(30)
    assert not thread.is_alive()
    assert len(tries) == 2
