"""``ckpt verify``, ``ckpt diff``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptstore import open_store
from ckptstore.mirrors import expect_mirror
from tests.cli.support import (
    STRICT,
    Ran,
    ckpt,
    ckpt_process,
    contents,
    directory_of,
    flip,
    overwrite,
    record_of,
)


def test_verify_json_has_the_documented_keys(store: Path, source: Path) -> None:
    flip(directory_of(store) / "model.bin", 9)
    ran = ckpt("verify", store, "--deep", "--json").failed(5)
    document = ran.json
    assert set(document) == {"ok", "checkpoints"}
    assert document["ok"] is False
    good, bad = document["checkpoints"]
    for one in (good, bad):
        assert set(one) >= {"ref", "ok", "checked_bytes", "damaged"}
    assert (good["ref"], good["ok"], good["damaged"]) == ("gsm8k@400", True, [])
    assert good["checked_bytes"] == sum(map(len, contents(source).values()))
    assert (bad["ref"], bad["ok"]) == ("gsm8k@500", False)
    assert bad["damaged"] == [
        {"path": "model.bin", "offset": 0, "length": 102400, "reason": "content differs"}
    ]


def test_verify_names_the_damaged_range(place: Path) -> None:
    block = 16 * 1024 * 1024
    source = place / "big"
    source.mkdir()
    with open(source / "big.bin", "wb") as f:
        f.writelines(bytes([letter]) * block for letter in b"abc")
        f.write(b"tail")
    ckpt("push", source, f"{place}/store/gsm8k@1").ok()
    stored = directory_of(place / "store") / "big.bin"
    stored.chmod(0o644)
    with open(stored, "r+b") as f:
        f.seek(block + 5)
        f.write(b"X")
    ran = ckpt("verify", f"{place}/store/gsm8k@1", "--deep")
    ran.failed(5, f"gsm8k@1 is damaged: big.bin, bytes {block}-{2 * block - 1}: content differs")


def test_verify_says_what_is_intact(store: Path) -> None:
    ran = ckpt("verify", store).ok()
    assert ran.out.splitlines() == ["gsm8k@400 is intact", "gsm8k@500 is intact"]
    assert "read" in ckpt("verify", f"{store}/gsm8k@500", "--deep").ok().out
    assert ckpt("verify", store, "--quiet").ok() == Ran(0, "", "")
    ckpt("verify", f"{store}/gsm8k@400", f"{store}/gsm8k@500").ok()
    ckpt("verify", env={"CKPT_STORE": str(store)}).ok()


def test_verify_finds_missing_and_short_files_without_reading(store: Path) -> None:
    directory = directory_of(store)
    (directory / "nested" / "deep" / "state.pt").unlink()
    overwrite(directory / "config.json", b"{")
    ran = ckpt("verify", store).failed(5, "state.pt: missing", "config.json: size is 1, must be 14")
    assert "gsm8k@400 is intact" in ran.out
    assert "resume-info" in ran.err


def test_damage_is_remembered_and_forgotten_when_it_is_mended(store: Path, source: Path) -> None:
    stored = directory_of(store) / "model.bin"
    good = stored.read_bytes()
    overwrite(stored, good[:-1] + b"?")
    ckpt("verify", store, "--deep").failed(5)
    assert [r["state"] for r in ckpt("list", store, "--json").json] == ["ok", "damaged"]
    assert "takes gsm8k@400" in ckpt("resume-info", f"{store}/gsm8k@latest").out
    ckpt("verify", store).failed(5)  # a look at sizes proves nothing about content
    assert [r["state"] for r in ckpt("list", store, "--json").json] == ["ok", "damaged"]
    overwrite(stored, good)
    ckpt("verify", store, "--deep").ok()
    assert [r["state"] for r in ckpt("list", store, "--json").json] == ["ok", "ok"]


def test_verify_of_a_damaged_manifest_and_record(store: Path) -> None:
    flip(directory_of(store) / "MANIFEST.json", 50)
    flip(record_of(store, index=0), 100)
    ran = ckpt("verify", store, "--json").failed(5, "MANIFEST.json", "commits/")
    assert [c["ok"] for c in ran.json["checkpoints"]] == [False, False]


def test_files_beside_the_checkpoint_are_reported_and_no_damage(store: Path) -> None:
    (directory_of(store) / "note.txt").write_bytes(b"by hand")
    assert "1 unknown file" in ckpt("verify", store).ok().out
    document = ckpt("verify", store, "--json").ok().json
    assert document["checkpoints"][1]["extra"] == ["note.txt"]


def test_a_file_beside_it_whose_name_is_no_text(store: Path) -> None:
    with open(os.fsencode(directory_of(store)) + b"/\xff\xfe", "wb") as f:
        f.write(b"by hand")
    assert ckpt_process("verify", store, env=STRICT).code == 0
    ran = ckpt_process("verify", store, "--json", env=STRICT)
    assert "Traceback" not in ran.err
    assert ran.ok().json["ok"] is True


@pytest.mark.parametrize("what", ["nope", "nope/gsm8k@500"])
def test_verify_what_is_not_there(place: Path, what: str) -> None:
    ckpt("verify", place / what).failed(4)


def test_verify_of_an_empty_store(place: Path) -> None:
    ckpt("init", place / "empty").ok()
    assert ckpt("verify", place / "empty", "--json").ok().json == {"ok": True, "checkpoints": []}


def test_diff_of_two_checkpoints(store: Path) -> None:
    ran = ckpt("diff", f"{store}/gsm8k@400", f"{store}/gsm8k@500")
    assert (ran.code, ran.err) == (1, "")
    marks = {line[2:].split(" (")[0]: line[0] for line in ran.out.splitlines()}
    assert marks.pop("config.json") == "*"
    assert set(marks.values()) == {"="}
    same = ckpt("diff", f"{store}/gsm8k@500", f"{store}/gsm8k@500").ok()
    assert {line[0] for line in same.out.splitlines()} == {"="}


def test_diff_of_a_checkpoint_and_a_directory(store: Path, source: Path) -> None:
    ckpt("diff", f"{store}/gsm8k@500", source).ok()
    (source / "new.bin").write_bytes(b"new")
    (source / "empty.txt").unlink()
    (source / "run.sh").chmod(0o644)
    ran = ckpt("diff", f"{store}/gsm8k@500", source, "--json")
    assert ran.code == 1
    marks = {row["path"]: row["mark"] for row in ran.json}
    assert marks["new.bin"] == "+"
    assert marks["empty.txt"] == "-"
    assert marks["run.sh"] == "*"
    assert marks["model.bin"] == "="
    assert ckpt("diff", f"{store}/gsm8k@500", source, "-q") == Ran(1, "", "")


def test_diff_marks_damage(store: Path) -> None:
    overwrite(directory_of(store) / "config.json", b"")
    ran = ckpt("diff", f"{store}/gsm8k@400", f"{store}/gsm8k@500")
    assert ran.code == 1
    assert "! config.json" in ran.out


def test_diff_with_what_is_not_there(place: Path, store: Path) -> None:
    ckpt("diff", f"{store}/gsm8k@500", place / "nope").failed(4)
    ckpt("diff", f"{store}/gsm8k@501", f"{store}/gsm8k@500").failed(4)


def test_a_sample_reads_what_was_never_read_first(store: Path) -> None:
    ckpt("verify", f"{store}/gsm8k@400", "--deep").ok()
    assert ckpt("verify", store, "--sample", "5%").ok().out.startswith("gsm8k@500 is intact, ")
    ran = ckpt("verify", store, "--sample", "0.05", "--json").ok()
    assert [c["ref"] for c in ran.json["checkpoints"]] == ["gsm8k@400"]
    assert "nothing is due" in ckpt("verify", store, "--max-age", "7d").ok().err
    assert "2 checkpoints" in ckpt("verify", store, "--max-duration", "0").ok().err
    assert len(ckpt("verify", store, "--max-duration", "1h").ok().out.splitlines()) == 2
    ckpt("verify", f"{store}/gsm8k@500", "--sample", "100%").ok()


@pytest.mark.parametrize("share", ["0", "0%", "101%", "half", "-5%"])
def test_a_sample_that_is_no_share(store: Path, share: str) -> None:
    ckpt("verify", store, f"--sample={share}").failed(2)


def test_damage_is_reported_with_the_command_that_repairs_it(store: Path) -> None:
    flip(directory_of(store) / "model.bin", 9)
    ran = ckpt("verify", f"{store}/gsm8k@500", "--deep")
    ran.failed(5, f"hint: ckpt repair gsm8k@500 --store {store} --from STORE")
    expect_mirror(open_store(str(store)).catalog, "s3://bucket/ckpts")
    ran = ckpt("verify", store)
    ran.failed(5, f"hint: ckpt repair gsm8k@500 --store {store} --from s3://bucket/ckpts")
    flip(directory_of(store, index=0) / "model.bin", 9)
    ckpt("verify", store, "--deep").failed(5, f"ckpt repair {store} gsm8k --from s3://bucket/ckpts")
    pulled = ckpt("pull", f"{store}/gsm8k@500", "dest")
    pulled.failed(5, f"ckpt repair gsm8k@500 --store {store} --from s3://bucket/ckpts")
