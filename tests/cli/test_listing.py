"""``ckpt list``, ``ckpt show``, ``ckpt resume-info``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.support import Ran, ckpt, directory_of, flip, names_of, overwrite, record_of

LIST_KEYS = {
    "ref",
    "run",
    "step",
    "seq",
    "name",
    "created",
    "size",
    "files",
    "digest",
    "state",
    "tags",
    "metrics",
}


def test_list_json_has_the_documented_keys(store: Path) -> None:
    rows = ckpt("list", store, "--json").ok().json
    assert [set(row) - {"pinned", "note"} for row in rows] == [LIST_KEYS, LIST_KEYS]
    assert [(r["ref"], r["run"], r["step"], r["seq"]) for r in rows] == [
        ("gsm8k@400", "gsm8k", 400, 1),
        ("gsm8k@500", "gsm8k", 500, 2),
    ]
    assert [r["name"] for r in rows] == names_of(store)
    assert {r["state"] for r in rows} == {"ok"}
    assert rows[0]["tags"] == []
    assert rows[0]["metrics"] == {}
    assert rows[0]["digest"] != rows[1]["digest"]


def test_list_of_an_empty_store_is_an_empty_list(place: Path) -> None:
    ckpt("init", place / "empty").ok()
    assert ckpt("list", place / "empty", "--json").ok().json == []
    ran = ckpt("list", place / "empty").ok()
    assert ran.out == ""
    assert "no checkpoint" in ran.err


def test_list_one_run(store: Path, source: Path) -> None:
    ckpt("push", source, f"{store}/other@1").ok()
    assert [r["run"] for r in ckpt("list", store, "--json").json] == ["gsm8k", "gsm8k", "other"]
    assert [r["run"] for r in ckpt("list", store, "other", "--json").json] == ["other"]
    assert [r["run"] for r in ckpt("list", "other", "--store", store, "--json").json] == ["other"]
    env = {"CKPT_STORE": str(store)}
    assert [r["run"] for r in ckpt("list", "other", "--json", env=env).json] == ["other"]
    ckpt("list", store, "third").failed(4, "third", "gsm8k")


def test_order_is_that_of_saving_after_a_rollback(store: Path, source: Path) -> None:
    (source / "config.json").write_bytes(b"rolled back")
    ckpt("push", source, f"{store}/gsm8k@400").ok()
    rows = ckpt("list", store, "--json").json
    assert [r["step"] for r in rows] == [400, 500, 400]
    assert [r["ref"] for r in rows] == [f"gsm8k@{names_of(store)[0]}", "gsm8k@500", "gsm8k@400"]
    assert ckpt("show", f"{store}/gsm8k@latest", "--json").json["seq"] == 3


def test_all_adds_the_trash_and_unfinished_saves(store: Path) -> None:
    ckpt("delete", f"{store}/gsm8k@400").ok()
    unfinished = store / "gsm8k" / "00009-step-00000900-abcdefgh"
    unfinished.mkdir()
    (unfinished / "half.bin").write_bytes(b"half")
    assert [r["step"] for r in ckpt("list", store, "--json").json] == [500]
    rows = ckpt("list", store, "--all", "--json").ok().json
    assert [(r["step"], r["state"]) for r in rows] == [
        (400, "trashed"),
        (500, "ok"),
        (900, "unfinished"),
    ]


@pytest.mark.parametrize("missing", ["nope", "nope/deeper"])
def test_list_of_what_is_not_there(place: Path, missing: str) -> None:
    ckpt("list", place / missing).failed(4, "no store")
    assert ckpt("list", place / missing, "--json").failed(4).out == ""


def test_show_json(store: Path) -> None:
    shown = ckpt("show", f"{store}/gsm8k@500", "--json").ok().json
    paths = [f["path"] for f in shown["files"]]
    assert paths == ["config.json", "empty.txt", "model.bin", "nested/deep/state.pt", "run.sh"]
    assert [f["exec"] for f in shown["files"]] == [False, False, False, False, True]
    assert shown["empty_directories"] == ["cache"]
    assert shown["path"] == str(directory_of(store))
    assert shown["parent"] == names_of(store)[0]
    assert (shown["state"], shown["pinned"], shown["verified"]) == ("ok", False, None)


def test_show_for_people(store: Path) -> None:
    out = ckpt("show", f"{store}/gsm8k@500").ok().out
    for text in ("gsm8k@500", names_of(store)[-1], "ok", "5 files", "model.bin", "never read"):
        assert text in out
    ckpt("verify", f"{store}/gsm8k@500", "--deep").ok()
    assert "never read" not in ckpt("show", f"{store}/gsm8k@500").out


@pytest.mark.parametrize("selector", ["450", "best", "nosuchtag", "00009-step-00000500-abcdefgh"])
def test_show_what_is_not_there(store: Path, selector: str) -> None:
    ckpt("show", f"{store}/gsm8k@{selector}").failed(4)


def test_a_missing_step_names_those_near_it(store: Path) -> None:
    ckpt("show", f"{store}/gsm8k@450").failed(4, "no step 450", "400", "500")


def test_resume_info(store: Path) -> None:
    ran = ckpt("resume-info", f"{store}/gsm8k@latest").ok()
    assert ran.out == f"a resume takes gsm8k@500 ({names_of(store)[-1]})\n"
    document = ckpt("resume-info", f"{store}/gsm8k@latest", "--json").ok().json
    assert (document["ref"], document["step"], document["commits"]) == ("gsm8k@500", 500, 1)
    assert document["passed_over"] == []
    assert ckpt("resume-info", f"{store}/gsm8k@latest", "-q").ok() == Ran(0, "", "")


def test_resume_info_says_why_newer_ones_are_passed_over(store: Path) -> None:
    (directory_of(store) / "model.bin").unlink()
    ran = ckpt("resume-info", f"{store}/gsm8k@latest").ok()
    assert "passed over gsm8k@500" in ran.out
    assert "model.bin: missing" in ran.out
    assert "a resume takes gsm8k@400" in ran.out
    ckpt("resume-info", f"{store}/gsm8k@500").failed(5, "none is intact")


def test_resume_info_deep_reads_content(store: Path) -> None:
    flip(directory_of(store) / "model.bin", 77)
    assert "takes gsm8k@500" in ckpt("resume-info", f"{store}/gsm8k@latest").ok().out
    assert "takes gsm8k@400" in ckpt("resume-info", f"{store}/gsm8k@latest", "--deep").ok().out


def test_resume_info_never_says_from_scratch_when_all_is_damaged(store: Path) -> None:
    for index in (0, 1):
        overwrite(record_of(store, index=index), b"")
    ran = ckpt("resume-info", f"{store}/gsm8k@latest", "--json").failed(5, "none is intact")
    assert ran.json["ref"] is None
    assert len(ran.json["passed_over"]) == 2


def test_resume_info_where_the_records_directory_is_lost(store: Path) -> None:
    """Step directories without any record are a store that lost its records, not a new run."""
    shutil.rmtree(store / "gsm8k" / "commits")
    ran = ckpt("resume-info", f"{store}/gsm8k@latest", "--json")
    assert ran.code in (4, 5)
    assert len(ran.json["passed_over"]) == 2
