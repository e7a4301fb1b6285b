"""``ckpt init``, ``ckpt config``, and where settings come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.config import load_sections
from ckptstore.maintenance import Policy
from tests.cli.support import ckpt, fill


def test_init(place: Path) -> None:
    ran = ckpt("init", place / "store").ok()
    assert "is now a store" in ran.out
    document = ckpt("init", place / "store", "--json").ok().json
    assert set(document) == {"store", "id", "created"}
    assert (document["store"], document["created"]) == (str(place / "store"), False)
    assert document["id"] in ran.out


def test_init_in_a_place_that_is_not_empty(place: Path) -> None:
    fill(place / "photos", {"cat.jpg": b"x"})
    ckpt("init", place / "photos").failed(6, "cat.jpg", "--force")
    ckpt("init", place / "photos", "--force").ok()
    assert (place / "photos" / "cat.jpg").exists()


def test_init_on_a_file(place: Path) -> None:
    (place / "file").write_bytes(b"x")
    ran = ckpt("init", place / "file")
    assert ran.code in (4, 6)
    assert ran.err.startswith("error: ")
    assert (place / "file").read_bytes() == b"x"


@pytest.fixture
def stores(place: Path, source: Path) -> dict[str, Path]:
    """Four stores; each has one run, named like the store."""
    made = {name: place / name for name in ("flag", "environment", "project", "user")}
    for name, root in made.items():
        ckpt("push", source, f"{root}/{name}@1").ok()
    return made


def _listed(*args: str, env: dict[str, str] | None = None) -> str:
    rows = ckpt("list", "--json", *args, env=env).ok().json
    assert len(rows) == 1
    return str(rows[0]["run"])


def test_a_flag_wins_over_the_environment_over_the_project_over_the_user(
    place: Path, stores: dict[str, Path]
) -> None:
    ckpt("list").failed(2, "no store given", "CKPT_STORE")
    fill(place.parent / "config" / "ckptstore", {"ckpt.toml": _toml(stores["user"])})
    assert _listed() == "user"
    fill(place, {"ckpt.toml": _toml(stores["project"])})
    assert _listed() == "project"
    env = {"CKPT_STORE": str(stores["environment"])}
    assert _listed(env=env) == "environment"
    assert _listed("--store", str(stores["flag"]), env=env) == "flag"
    assert _listed(str(stores["flag"]), env=env) == "flag"
    ckpt("show", f"{stores['flag']}/flag@1", env=env).ok()


def _toml(store: Path) -> bytes:
    return f'store = "{store}"\n'.encode()


def test_config_says_where_each_setting_comes_from(place: Path, stores: dict[str, Path]) -> None:
    fill(place, {"ckpt.toml": b'store = "/project"\ngrace = "7d"\n'})
    document = ckpt("config", "--json", env={"CKPT_STORE": "/environment"}).ok().json
    assert document == {
        "store": {"value": "/environment", "origin": "CKPT_STORE"},
        "grace": {"value": 7 * 86400.0, "origin": "ckpt.toml"},
        "threads": {"value": None, "origin": "default"},
    }
    out = ckpt("config").ok().out
    assert "\tckpt.toml\t" in out


def test_a_configured_grace_period_is_used(place: Path, stores: dict[str, Path]) -> None:
    fill(place, {"ckpt.toml": b'grace = "0"\n'})
    ckpt("delete", f"{stores['flag']}/flag@1", "--force").ok()
    assert "removed 1 thing" in ckpt("gc", stores["flag"]).ok().out


@pytest.mark.parametrize(("typo", "meant"), [("stroe", "store"), ("thread", "threads")])
def test_an_unknown_key_gives_the_nearest_name(place: Path, typo: str, meant: str) -> None:
    fill(place, {"ckpt.toml": f'{typo} = "x"\n'.encode()})
    ckpt("config").failed(2, f"'{typo}'", f"did you mean '{meant}'?", "ckpt.toml")
    ckpt("list").failed(2, f"did you mean '{meant}'?")


BAD_TOML = {
    "no toml": b"store = ",
    "no text": b"\xff\xfe\x00",
    "wrong type": b"store = 5\n",
    "empty": b'store = ""\n',
    "threads as text": b'threads = "many"\n',
    "no threads": b"threads = 0\n",
    "true threads": b"threads = true\n",
    "grace as number": b"grace = 24\n",
    "bad grace": b'grace = "soon"\n',
    "twice": b'store = "/a"\nstore = "/b"\n',
    "table": b"[store]\npath = 1\n",
    "escape in a key": b'"\\u001b[31mred" = 1\n',
    "deeply nested": b"store = " + b"[" * 20_000,
    "a huge number": b"threads = " + b"9" * 5000,
}


@pytest.mark.parametrize("what", BAD_TOML)
@pytest.mark.parametrize("where", ["project", "user"])
def test_a_bad_file_is_a_sentence(place: Path, what: str, where: str) -> None:
    target = place if where == "project" else place.parent / "config" / "ckptstore"
    fill(target, {"ckpt.toml": BAD_TOML[what]})
    for command in (["config"], ["list"]):
        ran = ckpt(*command).failed(2, "ckpt.toml")
        assert "\x1b" not in ran.err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CKPT_THREADS", "many"),
        ("CKPT_THREADS", "0"),
        ("CKPT_THREADS", "²"),
        ("CKPT_THREADS", "9" * 5000),
        ("CKPT_GRACE", "soon"),
        ("CKPT_STORE", "gopher://somewhere/else"),
    ],
)
def test_a_bad_variable_is_a_sentence(place: Path, source: Path, variable: str, value: str) -> None:
    ckpt("push", source, f"{place}/store/gsm8k@1").ok()
    command = ["list"] if variable == "CKPT_STORE" else ["config"]
    says = "gopher" if variable == "CKPT_STORE" else variable
    ckpt(*command, env={variable: value}).failed(2, says)


def test_a_directory_of_that_name_is_a_sentence(place: Path) -> None:
    (place / "ckpt.toml").mkdir()
    ran = ckpt("config")
    assert ran.code in (2, 6)
    assert ran.err.startswith("error: ckpt.toml")


def test_the_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "examples")
    ckpt("config").ok()
    assert {job["job"]: job["problem"] for job in ckpt("backup", "--json").ok().json} == {
        "store": None,
        "verl": None,
    }
    assert Policy.of(load_sections("retention")["*"].values, "ckpt.toml").keep_last == 5
