from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.ids import default_ids, random_ids, random_letters, seeded_ids
from ckptstore.store import Store
from tests.unit.support import again, examples, memory_store, save

LETTERS = re.compile("[a-z]{8}")


def test_random_ids_are_eight_letters_and_differ() -> None:
    found = {random_letters() for _ in range(2000)}
    assert len(found) == 2000
    assert all(LETTERS.fullmatch(i) for i in found)


def test_random_ids_use_every_letter_about_equally_often() -> None:
    text = "".join(random_letters() for _ in range(2600))
    counts = [text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    assert min(counts) > 600
    assert max(counts) < 1000


def test_a_restored_random_state_does_not_bring_the_same_ids_back() -> None:
    state = random.getstate()
    first = random_ids("run", 1, 0)
    random.setstate(state)
    assert random_ids("run", 1, 0) != first


@examples(100)
@given(st.text(max_size=10), st.text(max_size=10), st.integers(0, 10**15), st.integers(0, 9))
def test_seeded_ids_follow_from_their_seed_run_step_and_attempt(
    seed: str, run: str, step: int, attempt: int
) -> None:
    made = seeded_ids(seed)(run, step, attempt)
    assert made == seeded_ids(seed)(run, step, attempt)
    assert LETTERS.fullmatch(made)
    others = {
        seeded_ids(f"{seed}!")(run, step, attempt),
        seeded_ids(seed)(f"{run}!", step, attempt),
        seeded_ids(seed)(run, step + 1, attempt),
        seeded_ids(seed)(run, step, attempt + 1),
    }
    assert made not in others


def test_the_variable_makes_two_stores_choose_the_same_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names(seed: str) -> list[str]:
        monkeypatch.setenv("CKPTSTORE_ID_SEED", seed)
        store = memory_store()
        return [str(save(store, step).name) for step in (5, 5, 7)]

    assert names("one") == names("one")
    assert names("one") != names("two")
    assert len(set(names("one"))) == 3


def test_without_the_variable_names_come_from_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTSTORE_ID_SEED", raising=False)
    assert default_ids() is random_ids
    monkeypatch.setenv("CKPTSTORE_ID_SEED", "")
    assert default_ids() is random_ids


def test_a_seeded_store_that_is_opened_again_never_reuses_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CKPTSTORE_ID_SEED", "s")
    store = memory_store()
    first = save(store, 5).name
    second = save(again(store), 5).name
    assert second.id != first.id
    assert second.seq == first.seq + 1


def test_an_id_that_is_taken_for_the_step_is_asked_for_anew() -> None:
    attempts: list[int] = []

    def ids(run: str, step: int, attempt: int) -> str:
        attempts.append(attempt)
        return "aaaaaaaa" if attempt < 2 else "bbbbbbbb"

    store = Store(memory_store().backend, ids=ids)
    assert save(store, 5).name.id == "aaaaaaaa"
    assert save(store, 5).name.id == "bbbbbbbb"
    assert attempts == [0, 0, 1, 2]


def test_a_factory_that_never_makes_a_new_id_is_refused_instead_of_asked_for_ever() -> None:
    store = Store(memory_store().backend, ids=lambda run, step, attempt: "aaaaaaaa")
    save(store, 5)
    with pytest.raises(UsageError):
        save(store, 5)
