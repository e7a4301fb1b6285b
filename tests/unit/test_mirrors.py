"""What a store knows of its mirrors."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore import mirrors, open_store
from ckptstore.errors import NotFoundError
from ckptstore.layout import Name
from ckptstore.store import Store

ONE, TWO = Name(1, "aaaaaaaa", 1), Name(2, "bbbbbbbb", 2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "store"))
    store.create()
    return store


def test_a_mirror_is_owed_everything_from_the_start(store: Store) -> None:
    assert mirrors.owed(store.catalog, "run", [ONE, TWO]) == {}
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts")
    assert mirrors.owed(store.catalog, "run", [ONE, TWO]) == {ONE: (mirror,), TWO: (mirror,)}


def test_what_is_acknowledged_is_owed_no_more(store: Store) -> None:
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts")
    mirrors.acknowledge(store.catalog, mirror, "run", [ONE])
    assert set(mirrors.owed(store.catalog, "run", [ONE, TWO])) == {TWO}
    assert set(mirrors.owed(store.catalog, "other", [ONE])) == {ONE}
    mirrors.acknowledge(store.catalog, mirror, "run", [])
    assert set(mirrors.owed(store.catalog, "run", [ONE, TWO])) == {ONE, TWO}


def test_a_mirror_of_some_runs_is_owed_those(store: Store) -> None:
    mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts", ["gsm*"])
    assert mirrors.owed(store.catalog, "gsm8k", [ONE])
    assert not mirrors.owed(store.catalog, "smoke", [ONE])
    mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts", ["smoke"])
    assert mirrors.owed(store.catalog, "gsm8k", [ONE])
    assert mirrors.owed(store.catalog, "smoke", [ONE])
    assert not mirrors.owed(store.catalog, "other", [ONE])
    mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts")
    mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts", ["smoke"])
    assert mirrors.owed(store.catalog, "other", [ONE])


def test_documents_that_cannot_be_read_protect(store: Store) -> None:
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts", ["gsm*"])
    mirrors.acknowledge(store.catalog, mirror, "gsm8k", [ONE])
    path = Path(store.uri) / "mirrors" / mirror.id / "gsm8k.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"aaaaaaaa", b"aaaaaaab"))
    assert set(mirrors.owed(store.catalog, "gsm8k", [ONE])) == {ONE}
    note = Path(store.uri) / "mirrors" / f"{mirror.id}.json"
    note.chmod(0o644)
    note.write_bytes(b"rubbish")
    assert set(mirrors.owed(store.catalog, "smoke", [ONE])) == {ONE}


def test_forgotten(store: Store) -> None:
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts")
    mirrors.acknowledge(store.catalog, mirror, "run", [ONE])
    assert mirrors.forget_mirror(store.catalog, mirror.id)
    assert mirrors.owed(store.catalog, "run", [TWO]) == {}
    assert mirrors.known_mirrors(store.catalog) == []
    assert not mirrors.forget_mirror(store.catalog, mirror.id)


def test_attempts_are_noted(store: Store) -> None:
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts")
    mirror = mirrors.note_attempt(store.catalog, mirror, store="abcdefgh", problem="no route")
    assert mirror.note is not None
    assert (mirror.note.store, mirror.note.problem, mirror.note.reached) == (
        "abcdefgh",
        "no route",
        None,
    )
    mirror = mirrors.note_attempt(store.catalog, mirror)
    again = mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts")
    assert again == mirror
    assert again.note is not None
    assert again.note.problem is None
    assert again.note.reached == again.note.tried


def test_nothing_is_noted_where_the_store_is_not_any_more(store: Store, tmp_path: Path) -> None:
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts")
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(NotFoundError):
        mirrors.acknowledge(store.catalog, mirror, "run", [ONE])
    with pytest.raises(NotFoundError):
        mirrors.note_attempt(store.catalog, mirror)
    assert not (tmp_path / "store").exists()
