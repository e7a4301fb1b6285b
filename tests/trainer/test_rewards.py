"""Rewards: the ones that come with the trainer, and one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore.errors import UsageError
from trainer.data import Sample
from trainer.rewards import digits, exact, gsm8k, load_reward, score


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("3 + 4 = 7\n#### 7", "7", 1.0),
        ("#### 7", "a thought\n#### 7", 1.0),
        ("#### 1,080", "1080", 1.0),
        ("#### $18.", "18", 1.0),
        ("#### 18.50 dollars", "18.5", 1.0),
        ("#### -4", "-4", 1.0),
        ("#### 4", "-4", 0.0),
        ("#### 5\nno, rather\n#### 7", "7", 1.0),
        ("#### 7\nno, rather\n#### 5", "7", 0.0),
        ("#### 77", "7", 0.0),
        ("the answer is 7", "7", 0.0),
        ("####", "7", 0.0),
        ("#### seven", "7", 0.0),
        ("#### seven", "seven", 0.0),
        ("", "7", 0.0),
    ],
)
def test_gsm8k(response: str, answer: str, expected: float) -> None:
    assert gsm8k("a question", response, answer) == expected


@pytest.mark.parametrize(
    ("response", "expected"), [("", 0.0), ("1234", 1.0), ("a1b2", 0.5), ("²٣", 0.0), ("x 1 ", 0.25)]
)
def test_digits(response: str, expected: float) -> None:
    assert digits("", response, "") == expected


@pytest.mark.parametrize(
    ("response", "expected"), [(" 15", 1.0), ("15", 1.0), ("15\n", 1.0), ("15.", 0.0), ("", 0.0)]
)
def test_exact(response: str, expected: float) -> None:
    assert exact("7 + 8 =", response, "15") == expected


def test_own_function_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(prompt, response, answer):\n    return len(response)\n")
    assert load_reward(f"{file}:length")("", "abc", "") == 3


def test_own_function_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_for_a_test.py").write_text("def one(*_):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reward("reward_for_a_test:one")("", "", "") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "there is no reward"),
        ("json:", "there is no reward"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:f", "cannot be imported: FileNotFoundError"),
        ("json:no_such", "has no function 'no_such'"),
        ("json:decoder", "is no function"),
    ],
)
def test_a_reward_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_reward(name)


def test_a_module_that_fails_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise RuntimeError('no luck')\n")
    with pytest.raises(UsageError, match=r"broken\.py cannot be imported: RuntimeError: no luck"):
        load_reward(f"{file}:f")


SAMPLES = [Sample(3, "1 + 1 =", "2"), Sample(8, [{"role": "user", "content": "1 + 2 ="}], "3")]


def test_score_gives_each_function_call_its_sample() -> None:
    calls = []

    def reward(prompt: str, response: str, answer: str) -> bool:
        calls.append((prompt, response, answer))
        return response == answer

    assert score(reward, SAMPLES, ["2", "2"]) == [1.0, 0.0]
    assert calls == [("1 + 1 =", "2", "2"), ("1 + 2 =", "2", "3")]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_names_the_sample(value: float) -> None:
    with pytest.raises(UsageError, match="the reward of sample 8"):
        score(lambda _, response, __: value if response == "b" else 0.0, SAMPLES, ["a", "b"])


def test_a_reward_that_raises_names_the_sample() -> None:
    with pytest.raises(UsageError, match="sample 3: ValueError: could not convert"):
        score(lambda _, response, __: float(response), SAMPLES, ["a", "b"])


def test_a_reward_that_returns_nothing_names_the_sample() -> None:
    with pytest.raises(UsageError, match="sample 3: TypeError"):
        score(lambda *_: None, SAMPLES, ["a", "b"])  # type: ignore[arg-type]


def test_a_response_is_missing() -> None:
    with pytest.raises(ValueError, match="shorter"):
        score(exact, SAMPLES, ["a"])
