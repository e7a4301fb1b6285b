"""``ckpt prune``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptstore import mirrors, open_store
from tests.cli.support import Ran, ckpt, ckpt_on_terminal, contents, directory_of, flip, names_of


@pytest.fixture
def five(place: Path) -> Path:
    """A store that holds gsm8k@400 to gsm8k@800, and other@1 to other@3."""
    opened = open_store(str(place / "store"))
    refs = [("gsm8k", step) for step in range(400, 801, 100)] + [("other", n) for n in (1, 2, 3)]
    for run, step in refs:
        with opened.save(run, step) as one:
            one.add_bytes("model.bin", bytes([step % 251]) * 100_000)
    return place / "store"


def steps(store: Path, run: str = "gsm8k") -> list[int]:
    return [r["step"] for r in ckpt("list", store, run, "--json").ok().json]


def test_the_table_says_why(five: Path) -> None:
    ckpt("tag", f"{five}/gsm8k@400", "release-1").ok()
    rules = ("--keep-last", "2", "--keep-every", "300", "--keep-tag", "rel*")
    ran = ckpt("prune", five, "gsm8k", *rules).ok()
    rows = [line.split("\t") for line in ran.out.splitlines()]
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("gsm8k@400", "kept", "keep_tag rel*"),
        ("gsm8k@500", "deleted", "no rule keeps it"),
        ("gsm8k@600", "kept", "keep_every"),
        ("gsm8k@700", "kept", "keep_last"),
        ("gsm8k@800", "kept", "the newest of its run, keep_last"),
    ]
    assert ran.err.startswith("deleted 1 of 5 checkpoints, 100.0 kB; ")
    assert steps(five) == [400, 600, 700, 800]
    assert steps(five, "other") == [1, 2, 3]
    assert len([p for p in (five / "gsm8k").iterdir() if "-step-" in p.name]) == 4


def test_a_dry_run_deletes_nothing(five: Path) -> None:
    before = contents(five)
    ran = ckpt("prune", five, "gsm8k", "--keep-last", "2", "--dry-run").ok()
    assert [line.split("\t")[1] for line in ran.out.splitlines()] == ["would go"] * 3 + ["kept"] * 2
    assert "would delete 3 of 5 checkpoints" in ran.err
    assert contents(five) == before


def test_json(five: Path) -> None:
    names = names_of(five)
    document = ckpt("prune", five, "gsm8k", "--keep-last", "4", "--json").ok().json
    assert [set(one) for one in document] == [
        {"run", "kept", "deleted", "freed_bytes", "warnings", "dry_run"}
    ]
    (one,) = document
    assert one["run"] == "gsm8k"
    assert [d["name"] for d in one["kept"]] == names[1:]
    (gone,) = one["deleted"]
    assert gone == {
        "ref": "gsm8k@400",
        "name": names[0],
        "step": 400,
        "bytes": gone["bytes"],
        "reasons": ["no rule keeps it"],
    }
    assert one["freed_bytes"] >= gone["bytes"] == 100_000
    assert ckpt("prune", five, "gsm8k", "--keep-last", "2", "-q").ok() == Ran(0, "", "")


@pytest.mark.parametrize("extra", [(), ("--grace", "1d"), ("--owed-limit", "3"), ("--damaged",)])
def test_no_rule_at_all_is_refused(five: Path, extra: tuple[str, ...]) -> None:
    ckpt("prune", five, "gsm8k", *extra).failed(2, "no rule says what to keep", "--keep-last")
    ckpt("prune", five, *extra).failed(2, "no rule says what to keep")
    assert steps(five) == [400, 500, 600, 700, 800]


def test_max_delete(five: Path) -> None:
    few = ("--keep-last", "1", "--max-delete")
    ckpt("prune", five, "gsm8k", *few, "3").failed(6, "it would be 4", "--dry-run")
    ckpt("prune", five, *few, "5").failed(6, "it would be 6")
    assert len(steps(five)) == 5
    ckpt("prune", five, *few, "6").ok()
    assert (steps(five), steps(five, "other")) == ([800], [3])


def test_values_that_cannot_be(five: Path) -> None:
    for rule, value in (
        *(("--keep-last", "0"), ("--keep-last", "two"), ("--keep-within", "soon")),
        *(("--max-size", "0"), ("--max-size", "big"), ("--keep-every", "-1")),
    ):
        ckpt("prune", five, "gsm8k", rule, value).failed(2)
    ckpt("prune", five, "gsm8k", "--keep-best", "1").failed(2, "says what best is", "--best")
    ckpt("prune", five, "nope", "--keep-last", "1").failed(4, "nope")
    ckpt("prune", five.parent / "nothing", "--keep-last", "1").failed(4)
    assert len(steps(five)) == 5


def test_grace_and_undelete(five: Path) -> None:
    ran = ckpt("prune", five, "gsm8k", "--keep-last", "1", "--grace", "1h").ok()
    assert "ckpt undelete" in ran.err
    assert steps(five) == [800]
    ckpt("undelete", f"{five}/gsm8k@500").ok()
    assert steps(five) == [500, 800]


def test_max_size(five: Path) -> None:
    ckpt("prune", five, "gsm8k", "--max-size", "250kB").ok()
    assert steps(five) == [700, 800]
    ran = ckpt("prune", five, "gsm8k", "--max-size", "1kB", "-q").ok()
    assert steps(five) == [800]
    assert ran.err.startswith("warning: run gsm8k takes 100,000 bytes"), "also with --quiet"


def test_damaged_ones_are_left_alone_unless_asked(five: Path) -> None:
    flip(directory_of(five, index=1) / "model.bin", 9)
    ckpt("verify", f"{five}/gsm8k@500", "--deep").failed(5)
    ran = ckpt("prune", five, "gsm8k", "--keep-last", "1").ok()
    assert "damaged: left alone without --damaged" in ran.out
    assert steps(five) == [500, 800]
    ckpt("prune", five, "gsm8k", "--keep-last", "1", "--damaged").ok()
    assert steps(five) == [800]


def test_what_a_mirror_lacks(five: Path) -> None:
    mirrors.expect_mirror(open_store(str(five)).catalog, "s3://bucket/mirror")
    ckpt("delete", f"{five}/gsm8k@400").failed(6, "owed to s3://bucket/mirror", "--force")
    ran = ckpt("prune", five, "gsm8k", "--keep-last", "1", "--owed-limit", "2", "-q").ok()
    assert steps(five) == [600, 700, 800]
    lines = ran.err.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["warning:", "step", "400"],
        ["warning:", "step", "500"],
    ]
    assert "s3://bucket/mirror lacks it" in lines[0]
    ran = ckpt("prune", five, "gsm8k", "--keep-last", "1").ok()
    assert ran.out.count("owed to s3://bucket/mirror") == 2


# ckpt.toml


def configure(place: Path, text: str) -> None:
    (place / "ckpt.toml").write_text(text)


def test_policies_of_the_configuration(place: Path, five: Path) -> None:
    configure(
        place,
        f'store = "{five}"\n[retention."gsm*"]\nkeep_last = 3\n[retention."*8k"]\nkeep_last = 1\n',
    )
    ran = ckpt("prune", "--dry-run").ok()
    assert ran.out.count("would go") == 2
    assert "other: ckpt.toml has no [retention] for it, so all of it stays" in ran.err
    ckpt("prune", "gsm8k").ok()
    assert steps(five) == [600, 700, 800], "the first pattern that fits counts"
    ckpt("prune", "other").failed(2, "for run 'other'")
    configure(
        place,
        f'store = "{five}"\n[retention."*"]\nkeep_last = 2\n[retention.gsm8k]\nkeep_last = 1\n',
    )
    ckpt("prune").ok()
    assert (steps(five), steps(five, "other")) == ([800], [2, 3]), "a whole name counts most"


def test_options_replace_the_rules_of_the_configuration(place: Path, five: Path) -> None:
    configure(place, '[retention."*"]\nkeep_last = 1\n')
    ckpt("prune", five, "gsm8k", "--keep-every", "400").ok()
    assert steps(five) == [400, 800]


def test_a_configuration_that_is_wrong(place: Path, five: Path) -> None:
    configure(place, '[retention."*"]\nkeep_lst = 1\n')
    ckpt("prune", five).failed(2, "ckpt.toml", "keep_lst", "did you mean 'keep_last'?")
    configure(place, '[retention."*"]\ngrace = "1d"\n')
    ckpt("prune", five).failed(2, "would delete everything")
    assert len(steps(five)) == 5


# Terminals


def test_it_asks_on_a_terminal(five: Path) -> None:
    rules = ("prune", five, "gsm8k", "--keep-last", "1")
    asked = ckpt_on_terminal(*rules, answer="n\n")
    assert asked.code != 0
    assert "delete 4 of 5 checkpoints?" in asked.err
    assert "to delete" in asked.out
    assert len(steps(five)) == 5
    asked = ckpt_on_terminal(*rules, answer="y\n")
    assert asked.code == 0, asked
    assert asked.out.count("gsm8k@400") == 1
    assert steps(five) == [800]
    again = ckpt_on_terminal(*rules)
    assert (again.code, "?" in again.err) == (0, False), "there is nothing to ask"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(five: Path, columns: int) -> None:
    ckpt("tag", f"{five}/gsm8k@800", "a-release-with-a-long-name").ok()
    shown = ckpt_on_terminal(
        *("prune", five, "gsm8k", "--keep-last", "2", "--keep-every", "400", "--dry-run"),
        *("--keep-tag", "a-release-with-*", "--keep-daily", "3"),
        env={"COLUMNS": str(columns), "NO_COLOR": "1"},
    )
    assert shown.code == 0, shown
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in shown.out.splitlines()]
    assert max(map(len, lines)) <= columns
    assert lines[0].split() == ["REF", "FATE", "SIZE", "SAVED", "WHY"]
    assert "the newest of its run" in shown.out
