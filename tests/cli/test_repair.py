"""``ckpt repair``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptstore import open_store
from ckptstore.layout import MARKER
from ckptstore.mirrors import expect_mirror
from tests.cli.support import ckpt, contents, directory_of, flip, names_of, overwrite, record_of


@pytest.fixture
def mirror(store: Path, place: Path) -> Path:
    """A copy of the store, as `cp -a` makes it."""
    return Path(shutil.copytree(store, place / "mirror", symlinks=True))


GONE = "no intact copy of it was found"


def states(store: Path) -> list[str]:
    return [row["state"] for row in ckpt("list", store, "--json").ok().json]


def test_a_damaged_checkpoint_is_repaired_by_the_command_that_verify_prints(
    store: Path, mirror: Path, source: Path
) -> None:
    flip(directory_of(store) / "config.json", 5)
    expect_mirror(open_store(str(store)).catalog, str(mirror))
    hint = ckpt("verify", f"{store}/gsm8k@500", "--deep").failed(5).err
    command = next(x for x in hint.splitlines() if x.startswith("hint: ckpt repair"))
    ran = ckpt(*command.split()[2:]).ok()
    assert f"repaired gsm8k@500: config.json: 1 block from {mirror}" in ran.out
    assert states(store) == ["ok", "ok"]
    ckpt("verify", store, "--deep").ok()
    assert contents(directory_of(store))["config.json"] == (source / "config.json").read_bytes()


def test_the_known_mirrors_are_used_and_those_that_are_away_are_left_out(
    store: Path, mirror: Path, place: Path
) -> None:
    catalog = open_store(str(store)).catalog
    expect_mirror(catalog, str(mirror))
    expect_mirror(catalog, "nonsense://nowhere")
    (directory_of(store) / "config.json").unlink()
    ran = ckpt("repair", "gsm8k@latest", "--store", store).ok()
    assert "the mirror nonsense://nowhere is left out" in ran.err
    assert states(store) == ["ok", "ok"]


def test_a_whole_store_is_repaired(store: Path, mirror: Path) -> None:
    flip(directory_of(store, index=0) / "model.bin", 9)
    flip(directory_of(store) / "MANIFEST.json", 60)
    record_of(store, index=0).unlink()
    ckpt("verify", store, "--deep").failed(5)
    before = contents(store)
    planned = ckpt("repair", store, "--from", mirror, "--dry-run").ok()
    assert all(line.startswith("would repair") for line in planned.out.splitlines())
    assert contents(store) == before
    document = ckpt("repair", store, "--from", mirror, "--json").ok().json
    assert document["ok"] is True
    assert [set(c) for c in document["checkpoints"]] == [
        {"ref", "name", "ok", "fixed", "left", "fetched_bytes", "shared"}
    ] * 2
    first = document["checkpoints"][0]["fixed"]
    assert [f["path"] for f in first] == ["model.bin", f"commits/{names_of(store)[0]}.json"]
    ckpt("verify", store, "--deep").ok()
    assert "nothing to repair" in ckpt("repair", store, "gsm8k", "--from", mirror).ok().out
    assert ckpt("repair", store, "--from", mirror, "--quiet").ok().out == ""


def test_one_whose_record_is_damaged_or_lost_is_found_by_its_step(
    store: Path, mirror: Path
) -> None:
    name = names_of(store)[-1]
    overwrite(record_of(store), b"rubbish")
    ckpt("show", f"{store}/gsm8k@500").failed(5, f"ckpt repair gsm8k@{name} --store {store}")
    ckpt("repair", f"{store}/gsm8k@500", "--from", mirror).ok()
    record_of(store).unlink()
    ckpt("repair", f"{store}/gsm8k@500", "--from", mirror).ok()
    record_of(store).unlink()
    ckpt("repair", f"{store}/gsm8k@{name}", "--from", mirror).ok()
    assert states(store) == ["ok", "ok"]


def test_the_exit_code_says_how_much_is_left(store: Path, mirror: Path) -> None:
    for path in ("model.bin", "config.json"):
        flip(directory_of(store) / path, 1)
    flip(directory_of(mirror) / "model.bin", 1)
    flip(directory_of(mirror, index=0) / "model.bin", 2)
    flip(directory_of(store, index=0) / "model.bin", 3)
    ran = ckpt("repair", f"{store}/gsm8k@500", "--from", mirror)
    ran.failed(3, "gsm8k@500 is still damaged: model.bin, bytes 0-102399: no intact copy")
    assert "repaired gsm8k@500: config.json" in ran.out
    ran = ckpt("repair", f"{store}/gsm8k@500", "--from", mirror, "--json")
    ran.failed(5)
    assert ran.json["checkpoints"][0]["left"] == [
        {"path": "model.bin", "offset": 0, "length": 102400, "reason": GONE}
    ]
    assert states(store) == ["ok", "damaged"]


def test_a_damaged_marker_is_repaired_first(store: Path, mirror: Path) -> None:
    good = (store / MARKER).read_bytes()
    flip(store / MARKER, 90)
    flip(directory_of(store) / "model.bin", 9)
    ckpt("verify", store).failed(5, f"ckpt repair {store}")
    ckpt("repair", store, "--from", mirror).ok()
    assert (store / MARKER).read_bytes() == good
    ckpt("verify", store, "--deep").ok()


def test_a_lost_marker_needs_its_id(store: Path, mirror: Path) -> None:
    known = open_store(str(store)).id
    (store / MARKER).unlink()
    ckpt("repair", store, "--from", mirror).failed(5, "--store-id", known)
    ckpt("repair", store, "--store-id", "short").failed(2)
    ckpt("repair", store, "--store-id", known, "--from", mirror).ok()
    assert open_store(str(store)).id == known


def test_a_mark_that_no_mirror_has_is_dropped_only_when_told(store: Path) -> None:
    ckpt("pin", f"{store}/gsm8k@500").ok()
    (mark,) = (store / "gsm8k" / "marks" / names_of(store)[-1]).iterdir()
    overwrite(mark, b"rubbish")
    ckpt("repair", store).failed(5, "marks/")
    assert mark.exists()
    ckpt("repair", store, "--drop-marks").ok()
    ckpt("verify", store).ok()


def test_what_cannot_be_meant(store: Path, place: Path) -> None:
    ckpt("repair", store, "--from", store).failed(2, "from itself")
    ckpt("repair", store, "--from", place / "nowhere").failed(4)
    ckpt("repair", place / "nowhere").failed(4)
    ckpt("repair", f"{store}/gsm8k@77").failed(4)
    ckpt("repair", f"{store}/gsm8k@500", "gsm8k").failed(2)
    ckpt("repair", store, "nope").failed(4)
