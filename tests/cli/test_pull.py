"""``ckpt pull``."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.cli.support import Ran, ckpt, contents, directory_of, flip, names_of
from tests.cli.test_push import PUSH_KEYS


def test_exactly_the_pushed_files_come_back(place: Path, source: Path, store: Path) -> None:
    ckpt("pull", f"{store}/gsm8k@latest", place / "restored").ok()
    restored = place / "restored"
    assert contents(restored) == contents(source)
    assert (restored / "cache").is_dir()
    assert stat.S_IMODE((restored / "run.sh").stat().st_mode) & 0o100
    assert not stat.S_IMODE((restored / "model.bin").stat().st_mode) & 0o100
    assert sorted(p.name for p in restored.iterdir()) == sorted(p.name for p in source.iterdir())


def test_json_has_exactly_the_documented_keys(place: Path, source: Path, store: Path) -> None:
    document = ckpt("pull", f"{store}/gsm8k@500", place / "restored", "--json").ok().json
    size = sum(map(len, contents(source).values()))
    assert set(document) == PUSH_KEYS
    assert document["ref"] == "gsm8k@500"
    assert document["name"] == names_of(store)[-1]
    assert (document["files"], document["bytes"], document["sent_bytes"]) == (5, size, size)


def test_what_was_pulled_can_be_changed(place: Path, store: Path) -> None:
    ckpt("pull", f"{store}/gsm8k@500", place / "restored").ok()
    (place / "restored" / "config.json").write_bytes(b"mine now")
    (place / "restored" / "model.bin").write_bytes(b"mine too")
    ckpt("verify", store, "--deep").ok()


@pytest.mark.parametrize("selector", ["500", "latest", "NAME"])
def test_every_kind_of_ref_works(place: Path, store: Path, selector: str) -> None:
    selector = names_of(store)[-1] if selector == "NAME" else selector
    ckpt("pull", f"gsm8k@{selector}", place / "restored", "--store", store).ok()
    assert (place / "restored" / "config.json").read_bytes() == b'{"layers": 3}\n'


def test_a_destination_that_holds_something_is_a_conflict(
    place: Path, source: Path, store: Path
) -> None:
    dest = place / "restored"
    dest.mkdir()
    (dest / "mine.txt").write_bytes(b"mine")
    (dest / "config.json").write_bytes(b"old")
    ckpt("pull", f"{store}/gsm8k@500", dest).failed(6, "not empty", "--force")
    assert contents(dest) == {"mine.txt": b"mine", "config.json": b"old"}
    ckpt("pull", f"{store}/gsm8k@500", dest, "--force").ok()
    assert contents(dest) == contents(source) | {"mine.txt": b"mine"}


def test_a_link_in_the_destination_leads_nowhere(place: Path, store: Path) -> None:
    dest, outside = place / "restored", place / "outside"
    dest.mkdir()
    outside.mkdir()
    (dest / "nested").symlink_to(outside)
    ckpt("pull", f"{store}/gsm8k@500", dest, "--force").failed(6, "symbolic link")
    assert contents(outside) == {}


def test_include_and_exclude(place: Path, store: Path) -> None:
    ref = f"{store}/gsm8k@500"
    ckpt("pull", ref, place / "a", "--include", "*.json", "--include", "*.pt").ok()
    assert set(contents(place / "a")) == {"config.json", "nested/deep/state.pt"}
    ckpt("pull", ref, place / "b", "--exclude", "*.bin", "--exclude", "nested/*").ok()
    assert set(contents(place / "b")) == {"config.json", "empty.txt", "run.sh"}
    ckpt("pull", ref, place / "c", "--include", "*.safetensors").failed(4, "matches")
    assert not (place / "c").exists()


def test_a_damaged_file_is_not_delivered(place: Path, store: Path) -> None:
    flip(directory_of(store) / "model.bin", 5000)
    ran = ckpt("pull", f"{store}/gsm8k@500", place / "restored")
    ran.failed(5, "gsm8k@500 is damaged: model.bin, bytes 0-102399: content differs", "hint:")
    assert contents(place / "restored") == {}
    row = ckpt("list", store, "gsm8k", "--json").json[-1]
    assert row["state"] == "damaged"


def test_dry_run_and_quiet(place: Path, store: Path) -> None:
    ran = ckpt("pull", f"{store}/gsm8k@500", place / "restored", "--dry-run").ok()
    assert ran.out.startswith("would pull gsm8k@500: 5 files")
    assert not (place / "restored").exists()
    assert ckpt("pull", f"{store}/gsm8k@500", place / "restored", "-q").ok() == Ran(0, "", "")


def test_a_destination_that_is_a_file(place: Path, store: Path) -> None:
    (place / "restored").write_bytes(b"I am a file")
    ckpt("pull", f"{store}/gsm8k@500", place / "restored").failed(6, "not a directory")
    ckpt("pull", f"{store}/gsm8k@500", place / "restored", "--force").failed(6, "not a directory")
    assert (place / "restored").read_bytes() == b"I am a file"


def test_a_destination_below_a_file(place: Path, store: Path) -> None:
    (place / "file").write_bytes(b"I am a file")
    ran = ckpt("pull", f"{store}/gsm8k@500", place / "file" / "restored")
    assert ran.code in (4, 6)
    assert ran.err.startswith("error: ")
