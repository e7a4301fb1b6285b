from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from ckptstore.errors import ConflictError, NotFoundError, SourceChangedError, UsageError
from ckptstore.scanning import scan, step_of
from tests.unit.support import ABC, write_tree


def paths(root: Path) -> list[str]:
    return [f.path for f in scan(root).files]


def test_a_scan_finds_every_file_with_its_size_and_exec_bit(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "src", ABC, executable=["a.txt"], empty=["sub/none"])
    found = scan(root)
    assert [(f.path, f.size, f.executable) for f in found.files] == [
        ("a.txt", 5, True),
        ("sub/b.bin", 400, False),
        ("sub/deep/c", 0, False),
    ]
    assert found.empty_directories == ["sub/none"]
    assert found.size == 405


def test_files_are_sorted_by_the_bytes_of_their_whole_paths(tmp_path: Path) -> None:
    names = ["a/b", "a-b", "a.b", "é", "z", "Z", "a0", "\U0001f600", "\uffee"]
    root = write_tree(tmp_path / "src", dict.fromkeys(names, b""))
    assert paths(root) == sorted(names, key=str.encode)


def test_an_empty_directory_can_be_scanned(tmp_path: Path) -> None:
    found = scan(tmp_path)
    assert (found.files, found.empty_directories) == ([], [])


def test_hidden_files_are_files(tmp_path: Path) -> None:
    assert paths(write_tree(tmp_path, {".hidden": b"", ".d/x": b""})) == [".d/x", ".hidden"]


@pytest.mark.parametrize("what", ["none", "file"])
def test_a_source_that_is_no_directory_is_not_found(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotFoundError, match=what):
        scan(tmp_path / what)


def test_a_source_that_is_a_link_to_a_directory_is_that_directory(tmp_path: Path) -> None:
    write_tree(tmp_path / "src", ABC)
    (tmp_path / "link").symlink_to("src")
    assert paths(tmp_path / "link") == sorted(ABC)


def test_links_inside_stand_for_what_they_point_to(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "src", {"real/f": b"data", "g": b"g"}, executable=["g"])
    (root / "dir").symlink_to("real")
    (root / "real/up").symlink_to("../g")
    (root / "absolute").symlink_to(root / "g")
    (root / "chain").symlink_to("absolute")
    found = scan(root)
    assert [f.path for f in found.files] == [
        "absolute",
        "chain",
        "dir/f",
        "dir/up",
        "g",
        "real/f",
        "real/up",
    ]
    by_path = {f.path: f for f in found.files}
    assert by_path["dir/f"].real == str(root / "real/f")
    assert by_path["chain"].executable


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("/etc/passwd", "outside"),
        ("../sibling/f", "outside"),
        ("../sibling", "outside"),
        ("..", "outside"),
        ("../src-evil/f", "outside"),
        ("nowhere", "dangling"),
        ("f/below-a-file", "dangling"),
        ("link", "circular"),
        (".", "circular"),
    ],
)
def test_links_that_lead_outside_nowhere_or_in_circles_are_refused_by_name(
    target: str, kind: str, tmp_path: Path
) -> None:
    write_tree(tmp_path / "sibling", {"f": b""})
    write_tree(tmp_path / "src-evil", {"f": b""})
    root = write_tree(tmp_path / "src", {"f": b""})
    (root / "link").symlink_to(target)
    with pytest.raises(ConflictError) as caught:
        scan(root)
    assert f"link -> {target} ({kind})" in str(caught.value)


def test_a_pair_of_links_that_point_to_each_other_is_circular(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConflictError, match="circular"):
        scan(tmp_path)


def test_directories_that_contain_each_other_by_links_are_circular(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "src", {"a/f": b"", "b/f": b""})
    (root / "a/to-b").symlink_to("../b")
    (root / "b/to-a").symlink_to("../a")
    with pytest.raises(ConflictError, match="circular"):
        scan(root)


def test_all_bad_links_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("/etc/passwd")
    (tmp_path / "two").symlink_to("nowhere")
    with pytest.raises(ConflictError, match=r"one.*two"):
        scan(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "MANIFEST.json", "manifest.JSON"])
def test_a_name_that_cannot_be_stored_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        scan(tmp_path)
    assert str(caught.value).isprintable()


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff", "wb"):
        pass
    with pytest.raises(UsageError, match="UTF-8"):
        scan(tmp_path)


def test_what_is_neither_file_nor_directory_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe"):
        scan(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "sock"))
        (tmp_path / "link").symlink_to("sock")
        with pytest.raises(UsageError, match="neither"):
            scan(tmp_path)


@pytest.mark.parametrize("how", ["content", "size", "touched", "replaced", "removed"])
def test_a_file_that_is_not_what_was_scanned_is_noticed(how: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")
    (scanned,) = scan(tmp_path).files
    scanned.check_unchanged()
    match how:
        case "content":
            path.write_bytes(b"after!")
        case "size":
            path.write_bytes(b"longer than before")
        case "touched":
            os.utime(path, (1, 1))
        case "replaced":
            (tmp_path / "other").write_bytes(b"before")
            (tmp_path / "other").replace(path)
        case "removed":
            path.unlink()
    what = "vanished" if how == "removed" else "changed"
    with pytest.raises(SourceChangedError, match=what):
        scanned.check_unchanged()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step_500", 500),
        ("checkpoint-500", 500),
        ("step-500", 500),
        ("step500", 500),
        ("iter_0000500", 500),
        ("run7_step_12", 12),
        ("my-run-checkpoint-3", 3),
    ],
)
def test_the_step_is_read_from_the_name_of_the_directory(
    name: str, step: int, tmp_path: Path
) -> None:
    assert step_of(scan(write_tree(tmp_path / name, {}))) == step


@pytest.mark.parametrize("key", ["global_step", "step"])
def test_the_step_is_read_from_the_state_of_the_trainer(key: str, tmp_path: Path) -> None:
    state = json.dumps({key: 7, "epoch": 1}).encode()
    assert step_of(scan(write_tree(tmp_path / "out", {"trainer_state.json": state}))) == 7


def test_name_and_state_that_agree_say_the_step(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "checkpoint-7", {"trainer_state.json": b'{"global_step": 7}'})
    assert step_of(scan(root)) == 7


def test_name_and_state_that_disagree_are_refused_with_both(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "checkpoint-8", {"trainer_state.json": b'{"global_step": 7}'})
    with pytest.raises(UsageError, match="7 and 8"):
        step_of(scan(root))


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"nonsense",
        b"[7]",
        b"{}",
        b'{"step": "7"}',
        b'{"step": true}',
        b'{"step": 7.0}',
        b'{"step": -7}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_state_that_says_no_step_is_passed_over(state: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say"):
        step_of(scan(write_tree(tmp_path / "out", {"trainer_state.json": state})))


@pytest.mark.parametrize("name", ["out", "500", "footstep-5x", "step-", "step-12-backup"])
def test_a_name_that_says_no_step_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say"):
        step_of(scan(write_tree(tmp_path / name, {})))


@pytest.mark.parametrize("path", [".ckpt-pull-x/a", "sub/.ckpt-pull-x/a", ".ckpt-tmp-abcdefgh"])
def test_names_that_are_ours_are_refused_in_a_source(path: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ours"):
        scan(write_tree(tmp_path, {path: b"x", "a": b""}))
