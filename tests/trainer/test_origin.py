"""What a start finds in the store: looked for once, and again when that does not hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.errors import IntegrityError
from ckptstore.testing.hooks import Phase
from tests.torch.support import hooked_store
from trainer.checkpointing import find_origin
from trainer.config import Config
from trainer.settings import read_config


def run_of(place: Path, *settings: str) -> Config:
    """A configuration with a store that holds the steps 1 and 2 of its run."""
    config, _ = read_config([f"storage.uri={place}", "storage.run=run", *settings])
    store = hooked_store(place, lambda *told: None)
    for step in (1, 2):
        with store.save("run", step) as save:
            save.add_bytes("x", b"x")
    return config


def counted(place: Path) -> tuple[Callable[[str, str, Phase], None], list[str]]:
    """A hook, and what it notes: what was listed."""
    listed: list[str] = []

    def hook(operation: str, key: str, phase: Phase) -> None:
        if operation == "list" and phase == "before":
            listed.append(key)

    return hook, listed


@pytest.mark.parametrize(
    "setting", ["trainer.resume_mode=auto", "trainer.resume_mode=2", "trainer.resume_mode=run@2"]
)
def test_the_store_is_listed_once_for_a_start(tmp_path: Path, setting: str) -> None:
    config = run_of(tmp_path, setting)
    hook, listed = counted(tmp_path)
    origin = find_origin(config, hooked_store(tmp_path, hook))
    assert origin is not None
    assert listed, "it has looked"
    listed.clear()
    assert origin.plan({}).require().step == 2
    assert origin.plan({}).require().step == 2
    assert listed == []


def test_what_is_refused_is_looked_for_again(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    store = hooked_store(tmp_path, lambda *told: None)
    origin = find_origin(config, store)
    assert origin is not None
    newest = origin.plan({}).require().name
    with store.save("run", 3) as save:  # by hand, meanwhile
        save.add_bytes("x", b"x")
    refused = {newest: "damaged"}
    assert origin.plan(refused).require().step == 3
    named = find_origin(run_of(tmp_path, "trainer.resume_mode=2"), store)
    assert named is not None
    with pytest.raises(IntegrityError, match="damaged"):
        named.plan({named.plan({}).require().name: "damaged"})
