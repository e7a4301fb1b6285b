"""``ckpt push``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.support import Ran, ckpt, contents, directory_of, fill, names_of

PUSH_KEYS = {"ref", "name", "digest", "files", "bytes", "sent_bytes", "seconds"}


def test_the_first_push_makes_the_store_and_says_what_it_did(place: Path, source: Path) -> None:
    ran = ckpt("push", source, f"{place}/store/gsm8k@500").ok()
    assert ran.out.startswith("pushed gsm8k@500 (00001-step-00000500-")
    assert "5 files" in ran.out
    stored = contents(directory_of(place / "store"))
    del stored["MANIFEST.json"]
    assert stored == contents(source)


def test_json_has_exactly_the_documented_keys(place: Path, source: Path) -> None:
    document = ckpt("push", source, f"{place}/store/gsm8k@500", "--json").ok().json
    size = sum(map(len, contents(source).values()))
    assert set(document) == PUSH_KEYS
    assert document["ref"] == "gsm8k@500"
    assert document["name"] == names_of(place / "store")[0]
    assert (document["files"], document["bytes"], document["sent_bytes"]) == (5, size, size)
    assert len(document["digest"]) == 64
    assert document["seconds"] >= 0


def test_the_same_push_again_changes_nothing(store: Path, source: Path) -> None:
    before = contents(store)
    again = ckpt("push", source, f"{store}/gsm8k@500", "--json").ok().json
    assert again["sent_bytes"] == 0
    assert again["name"] == names_of(store)[-1]
    assert contents(store) == before


def test_an_unchanged_file_is_not_sent_again(store: Path, source: Path) -> None:
    (source / "config.json").write_bytes(b'{"layers": 4}\n')
    document = ckpt("push", source, f"{store}/gsm8k@600", "--json").ok().json
    assert document["sent_bytes"] == len(b'{"layers": 4}\n')
    assert document["bytes"] == sum(map(len, contents(source).values()))
    ckpt("verify", store, "--deep").ok()


def test_other_content_at_the_same_step_is_a_new_checkpoint(store: Path, source: Path) -> None:
    (source / "config.json").write_bytes(b"{}\n")
    ckpt("push", source, f"{store}/gsm8k@500").ok()
    assert len(names_of(store)) == 3
    assert ckpt("show", f"{store}/gsm8k@500", "--json").json["name"] == names_of(store)[-1]


def test_tags_metrics_metadata_and_best(store: Path, source: Path) -> None:
    options = ["--tag", "a", "--tag", "b", "--metric", "reward=0.5", "--metric", "kl=-1e-3"]
    options += ["--meta", "commit=abc=def", "--best", "reward:max"]
    ckpt("push", source, f"{store}/gsm8k@700", *options).ok()
    shown = ckpt("show", f"{store}/gsm8k@best", "--json").ok().json
    assert shown["ref"] == "gsm8k@700"
    assert shown["tags"] == ["a", "b"]
    assert shown["metrics"] == {"reward": 0.5, "kl": -1e-3}
    assert shown["metadata"] == {"commit": "abc=def"}
    assert ckpt("show", f"{store}/gsm8k@b", "--json").json["ref"] == "gsm8k@700"


def test_tags_and_metrics_reach_a_checkpoint_that_is_there_already(
    store: Path, source: Path
) -> None:
    ckpt("push", source, f"{store}/gsm8k@500", "--tag", "good", "--metric", "reward=1").ok()
    shown = ckpt("show", f"{store}/gsm8k@500", "--json").ok().json
    assert len(names_of(store)) == 2
    assert (shown["tags"], shown["metrics"]) == (["good"], {"reward": 1.0})


@pytest.mark.parametrize(
    ("directory", "state", "step"),
    [
        ("global_step_500", None, 500),
        ("checkpoint-12", None, 12),
        ("step_7", None, 7),
        ("out", b'{"global_step": 33}', 33),
        ("checkpoint-33", b'{"step": 33}', 33),
    ],
)
def test_the_step_is_read_from_the_directory(
    place: Path, directory: str, state: bytes | None, step: int
) -> None:
    files = {"a.bin": b"a"} | ({"trainer_state.json": state} if state else {})
    source = fill(place / "in" / directory, files)
    document = ckpt("push", source, f"{place}/store/gsm8k", "--json").ok().json
    assert document["ref"] == f"gsm8k@{step}"


@pytest.mark.parametrize(
    ("directory", "state"),
    [
        ("out", None),
        ("checkpoint-1", b'{"global_step": 2}'),
        ("out", b'{"global_step": -1}'),
        ("out", b'{"global_step": 1.5}'),
        ("out", b'{"global_step": true}'),
        ("out", b'{"global_step": 1' + b"0" * 30 + b"}"),
        ("out", b'{"global_step": 1' + b"0" * 5000 + b"}"),
        ("out", b"[" * 100_000),
        ("out", b"\xff\xfe"),
    ],
)
def test_a_directory_that_does_not_say_its_step_is_a_usage_error(
    place: Path, directory: str, state: bytes | None
) -> None:
    files = {"a.bin": b"a"} | ({"trainer_state.json": state} if state else {})
    source = fill(place / "in" / directory, files)
    ckpt("push", source, f"{place}/store/gsm8k").failed(2, "step")
    assert names_of(place / "store") == []


def test_dry_run_touches_nothing(place: Path, source: Path) -> None:
    ran = ckpt("push", source, f"{place}/store/gsm8k@1", "--dry-run").ok()
    assert ran.out.startswith("would push")
    assert not (place / "store").exists()
    document = ckpt("push", source, f"{place}/store/gsm8k@1", "-n", "--json").ok().json
    assert document["ref"] == "gsm8k@1"


def test_quiet_says_nothing(place: Path, source: Path) -> None:
    assert ckpt("push", source, f"{place}/store/gsm8k@1", "--quiet").ok() == Ran(0, "", "")


def test_links_inside_are_stored_as_what_they_mean(place: Path, source: Path) -> None:
    (source / "alias.bin").symlink_to("model.bin")
    ckpt("push", source, f"{place}/store/gsm8k@1").ok()
    stored = directory_of(place / "store") / "alias.bin"
    assert not stored.is_symlink()
    assert stored.read_bytes() == (source / "model.bin").read_bytes()


@pytest.mark.parametrize("target", ["/etc/passwd", "nowhere", "..", "."])
def test_links_that_cannot_be_stored_are_named(place: Path, source: Path, target: str) -> None:
    (source / "alias").symlink_to(target)
    ckpt("push", source, f"{place}/store/gsm8k@1").failed(6, "alias")
    assert names_of(place / "store") == []


def test_a_pipe_in_the_source_is_refused_and_not_waited_for(place: Path, source: Path) -> None:
    os.mkfifo(source / "fifo")
    ckpt("push", source, f"{place}/store/gsm8k@1").failed(2, "fifo")


@pytest.mark.parametrize("name", ["MANIFEST.json", "manifest.JSON", "a\x1b[31mb", "new\nline"])
def test_names_that_cannot_be_stored_are_refused(place: Path, source: Path, name: str) -> None:
    (source / name).write_bytes(b"x")
    ran = ckpt("push", source, f"{place}/store/gsm8k@1").failed(2)
    assert "\x1b" not in ran.err
    assert names_of(place / "store") == []


def test_a_name_that_is_no_text_is_refused(place: Path, source: Path) -> None:
    with open(os.fsencode(source) + b"/\xff\xfe.bin", "wb") as f:
        f.write(b"x")
    ckpt("push", source, f"{place}/store/gsm8k@1").failed(2, "UTF-8")


def test_a_place_that_holds_other_things_is_not_made_a_store(place: Path, source: Path) -> None:
    fill(place / "photos", {"cat.jpg": b"x"})
    ckpt("push", source, f"{place}/photos/gsm8k@1").failed(6, "is not empty", "hint:")
    assert sorted(p.name for p in (place / "photos").iterdir()) == ["cat.jpg"]


def test_a_bad_tag_makes_no_store(place: Path, source: Path) -> None:
    ckpt("push", source, f"{place}/store/gsm8k@1", "--tag", "latest").failed(2, "tag")
    assert not (place / "store").exists()
