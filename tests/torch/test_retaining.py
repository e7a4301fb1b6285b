"""Retention beside saves: only for the newest life, and never a reason for a save to fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore import mirrors
from ckptstore.errors import NoSpaceError
from ckptstore.maintenance import Policy
from ckptstore.records import Commit
from ckptstore.store import Store
from ckptstore.torch.ranks import Ranks
from ckptstore.torch.retaining import Retention
from tests.unit.support import RUN, file_store, save


def writes(store: Store, step: int) -> Callable[[], Commit]:
    return lambda: save(store, step).commit


def steps(store: Store) -> list[int]:
    return [c.step for c in store.list(RUN)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return file_store(tmp_path / "store")


def test_after_each_save_the_rules_hold(store: Store) -> None:
    retention = Retention(store, RUN, Policy(keep_last=2))
    for step in range(1, 6):
        assert retention.save(writes(store, step), Ranks(), None).step == step
    retention.close()
    assert steps(store) == [4, 5]
    assert len(store.catalog.directories(RUN)) == 2


def test_an_older_life_deletes_nothing_any_more(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    old = store.begin_life(RUN)
    for step in (1, 2, 3):
        save(store, step)
    store.begin_life(RUN)
    retention = Retention(store, RUN, Policy(keep_last=1))
    retention.save(writes(store, 4), Ranks(), old)
    retention.close()
    assert steps(store) == [1, 2, 3, 4]
    assert "old checkpoints of run were not all deleted: life 2 of run 'run'" in caplog.text


def test_a_retention_that_cannot_be_is_a_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    retention = Retention(store, RUN, Policy(keep_best=1))
    assert retention.save(writes(store, 1), Ranks(), None).step == 1
    retention.close()
    assert "keep_best needs a rule" in caplog.text


class FullOnce:
    """A save that finds the disk full so many times."""

    def __init__(self, store: Store, times: int) -> None:
        self.store = store
        self.left = times

    def __call__(self) -> Commit:
        self.left -= 1
        if self.left >= 0:
            raise NoSpaceError("no space left")
        return save(self.store, 9).commit


def test_a_full_disk_is_tried_again_once_and_only_if_something_was_freed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    policy = Policy(keep_last=1, grace=3600)
    for step in (1, 2, 3):
        save(store, step)
    mirrors.expect_mirror(store.catalog, "/nowhere")
    retention = Retention(store, RUN, policy)
    assert retention.save(FullOnce(store, 1), Ranks(), None).step == 9
    assert "goes although /nowhere lacks it" in caplog.text
    retention.wait()
    assert steps(store) == [3, 9], "the third was the newest, and /nowhere lacks it"
    with pytest.raises(NoSpaceError):
        retention.save(FullOnce(store, 2), Ranks(), None)
    again = FullOnce(store, 2)
    with pytest.raises(NoSpaceError):
        retention.save(again, Ranks(), None)
    assert again.left == 1, "nothing was left to free, so it was not tried again"
    retention.close()
