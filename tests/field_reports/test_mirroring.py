"""What went wrong for others when checkpoints were copied elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore import open_store
from ckptstore.errors import NotFoundError
from ckptstore.maintenance import gc, verify
from ckptstore.maintenance.mirror import How, mirror
from ckptstore.store import Store


def save(store: Store, step: int) -> None:
    with store.save("run", step) as files:
        for name in ("a", "b"):
            files.add_bytes(name, b"%d" % step * 100_000)


def steps(store: Store) -> list[int]:
    return [c.step for c in store.list("run")]


@pytest.mark.parametrize("purged", [False, True], ids=["in the trash", "gone"])
def test_the_previous_one_is_deleted_while_it_is_copied(tmp_path: Path, purged: bool) -> None:
    """The mirror finishes or skips it; nothing half is there, and the others go."""
    source = open_store(str(tmp_path / "source"))
    target = open_store(str(tmp_path / "target"))
    for step in (1, 2):
        save(source, step)
    deleted = []

    def delete_the_first(count: int) -> None:
        deleted.append(count)
        if len(deleted) == 1:
            source.delete(source.get("run", step=1), grace=0, force=True)
            if purged:
                gc(source, grace=0)

    result = mirror(source, target, How(threads=1, progress=delete_the_first))
    assert result.ok
    assert steps(target) in ([1, 2], [2])
    assert all(verify(c, deep=True).ok for c in target.list("run"))
    assert mirror(source, target).ok
    assert mirror(source, target).behind.checkpoints == 0


def test_an_empty_source_deletes_nothing(tmp_path: Path) -> None:
    """Not with --delete either, and not when it is a new store in the old one's place."""
    source = open_store(str(tmp_path / "source"))
    target = open_store(str(tmp_path / "target"))
    save(source, 1)
    mirror(source, target)
    empty = open_store(str(tmp_path / "empty"))
    with pytest.raises(NotFoundError):
        mirror(empty, target, How(delete=True))
    empty.create()
    with pytest.raises(NotFoundError):
        mirror(empty, target, How(delete=True))
    with empty.save("another", 1) as files:
        files.add_bytes("x", b"x")
    assert mirror(empty, target, How(delete=True)).ok
    assert steps(target) == [1]
