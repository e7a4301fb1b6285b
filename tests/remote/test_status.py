"""The status of a store with a mirror on a server: what the store notes of it is enough to ask."""

from __future__ import annotations

from pathlib import Path

import ckptstore
from ckptstore.maintenance.mirror import mirror
from ckptstore.maintenance.status import status
from tests.remote.places import Place
from tests.unit.support import RUN, save


def test_a_mirror_on_a_server_is_asked(tmp_path: Path, place: Place) -> None:
    source, target = ckptstore.open_store(str(tmp_path / "here")), ckptstore.open_store(place.uri())
    save(source, 100)
    mirror(source, target)
    save(source, 130)
    found = status(source)
    assert found.mirrors[0].problem is None
    (reached,) = found.runs[0].mirrors
    assert (reached.live, reached.behind.checkpoints) == (True, 1)
    assert reached.newest == source.get(RUN, step=100).name
    assert found.runs[0].loss.steps == 30


def test_a_store_on_a_server_has_a_status(place: Place) -> None:
    store = ckptstore.open_store(place.uri())
    save(store, 100)
    (run,) = status(store).runs
    assert (run.checkpoints, run.loss.everything) == (1, True)
    assert status(store).free is None
