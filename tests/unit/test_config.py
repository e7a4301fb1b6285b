from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.config import describe, load_settings, user_file
from ckptstore.durations import parse_duration
from ckptstore.errors import UsageError
from tests.unit.support import examples


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def write_user(text: str) -> None:
    user_file().parent.mkdir(parents=True, exist_ok=True)
    user_file().write_text(text)


def write_project(text: str) -> None:
    Path("ckpt.toml").write_text(text)


def test_without_files_and_variables_the_defaults_hold() -> None:
    found = load_settings({})
    assert {k: s.value for k, s in found.items()} == {
        "store": None,
        "grace": 86400.0,
        "threads": None,
    }
    assert {s.origin for s in found.values()} == {"default"}


def test_the_user_file_lies_in_the_users_configuration(tmp_path: Path) -> None:
    assert user_file() == tmp_path / "config" / "ckptstore" / "ckpt.toml"


def test_the_environment_wins_over_the_project_and_the_project_over_the_user() -> None:
    write_user('store = "/user"\ngrace = "1h"\nthreads = 2\n')
    write_project('store = "/project"\ngrace = "2h"\n')
    found = load_settings({"CKPT_STORE": "/environment"})
    assert (found["store"].value, found["store"].origin) == ("/environment", "CKPT_STORE")
    assert (found["grace"].value, found["grace"].origin) == (7200.0, "ckpt.toml")
    assert (found["threads"].value, found["threads"].origin) == (2, str(user_file()))


def test_an_empty_variable_counts_as_not_set() -> None:
    write_project('store = "/project"\n')
    assert load_settings({"CKPT_STORE": ""})["store"].value == "/project"


def test_the_processes_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_THREADS", "3")
    assert load_settings()["threads"].value == 3


def test_an_unknown_key_is_refused_with_the_near_one_as_a_hint() -> None:
    write_project('stroe = "/x"\n')
    with pytest.raises(UsageError, match="stroe") as caught:
        load_settings({})
    assert "store" in (caught.value.hint or "")


def test_an_unknown_key_without_a_near_one_is_refused_with_the_known_ones() -> None:
    write_project("zzzz = 1\n")
    with pytest.raises(UsageError) as caught:
        load_settings({})
    assert "grace" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "line",
    [
        "store = 1",
        'store = ""',
        "grace = 24",
        'grace = "soon"',
        'grace = "-1h"',
        "threads = 0",
        "threads = 257",
        "threads = true",
        "threads = 1.5",
        'threads = "many"',
        "store =",
        "[store]",
    ],
)
def test_a_value_that_cannot_be_is_refused_and_the_file_named(line: str) -> None:
    write_project(line + "\n")
    with pytest.raises(UsageError, match=r"ckpt\.toml"):
        load_settings({})


@pytest.mark.parametrize(
    ("variable", "value"), [("CKPT_GRACE", "x"), ("CKPT_THREADS", "0"), ("CKPT_THREADS", "²")]
)
def test_a_variable_that_cannot_be_is_refused_and_named(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=variable):
        load_settings({variable: value})


def test_a_file_that_is_not_utf8_is_refused() -> None:
    Path("ckpt.toml").write_bytes(b'store = "\xff"\n')
    with pytest.raises(UsageError, match="UTF-8"):
        load_settings({})


def test_a_directory_in_place_of_the_file_is_an_error_of_ours() -> None:
    Path("ckpt.toml").mkdir()
    with pytest.raises(Exception, match=r"ckpt\.toml") as caught:
        load_settings({})
    assert type(caught.value).__module__ == "ckptstore.errors"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("0s", 0),
        ("90s", 90),
        ("30m", 1800),
        ("30min", 1800),
        ("24h", 86400),
        ("7d", 604800),
        ("2w", 1209600),
        ("1.5h", 5400),
        (" 5 min ", 300),
    ],
)
def test_durations_are_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "h", "-5h", "+5h", "5 y", "5H", "1h30m", "1e3s", ".5h", "5.h", "inf", "nan"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


@examples(200)
@given(st.one_of(st.text(max_size=10), st.from_regex(r"\d{1,4}(\.\d)?[smhdw]", fullmatch=True)))
def test_any_text_is_a_duration_that_is_not_negative_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert parse_duration(text) >= 0


def test_a_duration_is_always_finite() -> None:
    with pytest.raises(UsageError):
        parse_duration("9" * 400 + "d")


def test_every_setting_says_what_it_is_for() -> None:
    assert all(describe(key) for key in load_settings({}))
