"""``ckpt delete``, ``undelete``, ``gc``, ``pin``, ``tag``."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.cli.support import Ran, ckpt, contents, directory_of, flip, names_of, record_of


def test_delete_and_undelete(store: Path) -> None:
    name = names_of(store)[0]
    ran = ckpt("delete", f"{store}/gsm8k@400").ok()
    assert ran.out.startswith(f"deleted gsm8k@400 ({name}")
    assert "24 h" in ran.out
    ckpt("show", f"{store}/gsm8k@400").failed(4)
    ckpt("gc", store).ok()  # within its grace period
    assert ckpt("undelete", f"{store}/gsm8k@400").ok().out == f"brought back gsm8k@400 ({name})\n"
    ckpt("verify", f"{store}/gsm8k@400", "--deep").ok()


def test_delete_json_and_quiet(store: Path) -> None:
    name = names_of(store)[0]
    document = ckpt("delete", f"{store}/gsm8k@400", "--json").ok().json
    assert [(d["ref"], d["name"]) for d in document] == [("gsm8k@400", name)]
    back = ckpt("undelete", f"{store}/gsm8k@400", "--json").ok().json
    assert back == {"ref": "gsm8k@400", "name": name}
    assert ckpt("delete", f"{store}/gsm8k@400", "-q").ok() == Ran(0, "", "")


def test_the_newest_is_kept_unless_forced(store: Path) -> None:
    ckpt("delete", f"{store}/gsm8k@500").failed(6, "newest", "--force")
    assert len(names_of(store)) == 2
    ckpt("delete", f"{store}/gsm8k@500", "--force").ok()
    assert len(names_of(store)) == 1


def test_the_last_verified_is_kept_unless_forced(store: Path) -> None:
    ckpt("verify", f"{store}/gsm8k@400", "--deep").ok()
    ckpt("delete", f"{store}/gsm8k@400").failed(6, "verified")


def test_a_pinned_one_is_always_kept(store: Path) -> None:
    assert ckpt("pin", f"{store}/gsm8k@400").ok().out == "gsm8k@400 is pinned\n"
    assert "already" in ckpt("pin", f"{store}/gsm8k@400").ok().out
    ckpt("delete", f"{store}/gsm8k@400", "--force").failed(6, "pinned", "pin --remove")
    assert ckpt("list", store, "--json").json[0]["pinned"] is True
    document = ckpt("pin", f"{store}/gsm8k@400", "--remove", "--json").ok().json
    assert document == {"ref": "gsm8k@400", "pinned": False, "changed": True}
    ckpt("delete", f"{store}/gsm8k@400").ok()


def test_deleting_many_stops_before_any_when_one_is_not_there(store: Path) -> None:
    ckpt("delete", f"{store}/gsm8k@400", f"{store}/gsm8k@401").failed(4, "401")
    assert len(names_of(store)) == 2


def test_deleting_many_of_which_one_is_kept_does_nothing_or_says_partial(store: Path) -> None:
    ran = ckpt("delete", f"{store}/gsm8k@400", f"{store}/gsm8k@500", "--json")
    assert "newest" in ran.err
    deleted = 2 - len(names_of(store))
    assert (ran.code, deleted) in {(6, 0), (3, 1)}
    if deleted:
        assert [d["ref"] for d in ran.json] == ["gsm8k@400"]


def test_delete_dry_run(store: Path) -> None:
    before = contents(store)
    both = ("delete", f"{store}/gsm8k@400", f"{store}/gsm8k@500", "--dry-run")
    ckpt(*both).failed(6, "newest")  # as without --dry-run
    ran = ckpt(*both, "--force").ok()
    assert [line.split()[:3] for line in ran.out.splitlines()] == [
        ["would", "delete", "gsm8k@400"],
        ["would", "delete", "gsm8k@500"],
    ]
    assert contents(store) == before


def test_undelete_what_is_not_in_the_trash(store: Path) -> None:
    ckpt("undelete", f"{store}/gsm8k@400").failed(4, "trash")
    ckpt("undelete", f"{store}/gsm8k@{names_of(store)[0]}").failed(4)
    ckpt("undelete", f"{store}/nope@400").failed(4)


def test_undelete_refuses_damaged_files(store: Path) -> None:
    (directory_of(store, index=0) / "model.bin").unlink()
    ckpt("delete", f"{store}/gsm8k@400").ok()
    ckpt("undelete", f"{store}/gsm8k@400").failed(5, "model.bin")
    assert len(names_of(store)) == 1


def test_gc_removes_expired_trash_for_good(store: Path) -> None:
    directory = directory_of(store, index=0)
    ckpt("delete", f"{store}/gsm8k@400", "--grace", "0").ok()
    ran = ckpt("gc", store, "--dry-run").ok()
    assert ran.out.splitlines()[-1].startswith("would remove 1 thing")
    assert directory.is_dir()
    document = ckpt("gc", store, "--json").ok().json
    assert [(a["key"], a["removed"]) for a in document] == [(f"gsm8k/{directory.name}", True)]
    assert set(document[0]) == {"key", "removed", "reason", "bytes"}
    assert not directory.exists()
    ckpt("undelete", f"{store}/gsm8k@{directory.name}").failed(4)
    ckpt("verify", store, "--deep").ok()


def test_gc_with_nothing_to_do(store: Path) -> None:
    before = contents(store)
    assert ckpt("gc", store).ok().out == "there is nothing to remove\n"
    assert ckpt("gc", store, "gsm8k").ok().out == "there is nothing to remove\n"
    assert contents(store) == before
    ckpt("gc", store, "nope").failed(4)


def test_gc_collects_a_dead_save_when_its_grace_is_over(store: Path) -> None:
    dead = store / "gsm8k" / "00009-step-00000900-abcdefgh"
    dead.mkdir()
    (dead / "half.bin").write_bytes(b"half")
    assert "too recently" in ckpt("gc", store).ok().out
    assert dead.is_dir()
    ckpt("gc", store, "--grace", "0").ok()
    assert not dead.exists()
    assert len(names_of(store)) == 3  # the void stays


def test_gc_collects_stray_temporaries(store: Path) -> None:
    stray = store / "gsm8k" / "commits" / ".ckpt-tmp-abcdefgh"
    stray.write_bytes(b"half a record")
    ckpt("gc", store).ok()
    assert stray.exists()
    old = time.time() - 3 * 86400
    os.utime(stray, (old, old))
    ckpt("gc", store).ok()
    assert not stray.exists()


def test_gc_refuses_a_run_that_lost_its_records(store: Path) -> None:
    shutil.rmtree(store / "gsm8k" / "commits")
    ckpt("gc", store, "--grace", "0").failed(6, "records may be lost")
    assert len([p for p in (store / "gsm8k").iterdir() if "-step-" in p.name]) == 2


def test_gc_never_touches_what_has_an_unreadable_record(store: Path) -> None:
    flip(record_of(store), 99)
    before = contents(directory_of(store))
    ckpt("gc", store, "--grace", "0", "--force").ok()
    assert contents(directory_of(store)) == before


def test_tag(store: Path) -> None:
    ran = ckpt("tag", f"{store}/gsm8k@400", "release", "v1.0").ok()
    assert ran.out.count("gsm8k@400 has the tag") == 2
    assert ckpt("show", f"{store}/gsm8k@release", "--json").ok().json["step"] == 400
    document = ckpt("tag", f"{store}/gsm8k@400", "release", "--remove", "--json").ok().json
    assert document == {"ref": "gsm8k@400", "tags": ["v1.0"]}
    ckpt("show", f"{store}/gsm8k@release").failed(4)
    assert "before" in ckpt("tag", f"{store}/gsm8k@400", "v1.0").ok().out


def test_a_tag_given_at_the_push_can_be_taken_away(store: Path, source: Path) -> None:
    ckpt("push", source, f"{store}/gsm8k@600", "--tag", "born").ok()
    ckpt("tag", f"{store}/gsm8k@600", "born", "--remove").ok()
    ckpt("show", f"{store}/gsm8k@born").failed(4)
    ckpt("tag", f"{store}/gsm8k@600", "born").ok()
    ckpt("show", f"{store}/gsm8k@born").ok()


def test_one_bad_tag_among_good_ones_changes_nothing(store: Path) -> None:
    ckpt("tag", f"{store}/gsm8k@400", "good", "latest").failed(2, "latest")
    assert ckpt("show", f"{store}/gsm8k@400", "--json").json["tags"] == []


@pytest.mark.parametrize("grace", ["soon", "1y", "-1h", "5", "", "nan", "inf", "9" * 400 + "d"])
def test_a_grace_period_that_cannot_be(store: Path, grace: str) -> None:
    ckpt("delete", f"{store}/gsm8k@400", "--grace", grace).failed(2)
    ckpt("gc", store, "--grace", grace).failed(2)
    assert len(names_of(store)) == 2
