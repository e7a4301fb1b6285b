"""Alerts: said once, with what to do, and not again after a resume."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from trainer.alerts import MirrorLag, RewardStalled, SizeChanged


def _through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


def test_a_reward_that_does_not_improve_over_three_checkpoints_is_said_once() -> None:
    alert = RewardStalled()
    rewards = [0.1, 0.4, 0.4, 0.3, 0.39, 0.2, 0.1]
    said = [alert.check(10 * i, r) for i, r in enumerate(rewards, 1)]
    assert [i for i, text in enumerate(said) if text] == [4]
    assert said[4] is not None
    assert "0.39 at step 50, best 0.4 at step 20" in said[4]


def test_a_better_reward_ends_it_and_it_can_come_again() -> None:
    alert = RewardStalled()
    said = [alert.check(i, r) for i, r in enumerate([0.5, 0.1, 0.1, 0.1, 0.6, 0.1, 0.1, 0.1])]
    assert [i for i, text in enumerate(said) if text] == [3, 7]


def test_rewards_that_are_no_numbers_are_no_improvement() -> None:
    alert = RewardStalled()
    assert [alert.check(i, math.nan) is not None for i in range(4)] == [False, False, True, False]
    assert alert.check(5, 0.1) is None
    assert alert.state["best"] == 0.1


def test_a_resumed_run_goes_on_counting_and_does_not_repeat_itself() -> None:
    alert = RewardStalled()
    for step, reward in enumerate([0.5, 0.1, 0.1]):
        assert alert.check(step, reward) is None
    resumed = RewardStalled(_through_json(alert.state))
    assert resumed.check(3, 0.1)
    assert RewardStalled(_through_json(resumed.state)).check(4, 0.1) is None


@pytest.mark.parametrize(("size", "says"), [(121, "more"), (79, "less"), (120, ""), (80, "")])
def test_a_size_that_is_more_than_a_fifth_off_is_said(size: int, says: str) -> None:
    alert = SizeChanged("gsm")
    for step in range(3):
        assert alert.check(step, 100_000_000) is None
    text = alert.check(3, size * 1_000_000)
    assert (text or "").count(says) == (1 if says else len(text or "") + 1)
    if text:
        assert "`ckpt diff gsm@2 gsm@3`" in text
        assert "the 3 before it" in text


def test_one_odd_checkpoint_does_not_make_the_next_ones_odd() -> None:
    alert = SizeChanged("gsm")
    said = [alert.check(i, size) for i, size in enumerate([100, 100, 40, 100, 100, 40])]
    assert [i for i, text in enumerate(said) if text] == [2, 5]


def test_a_lasting_new_size_is_said_once_also_over_a_resume() -> None:
    alert = SizeChanged("gsm")
    said = 0
    for step in range(30):
        alert = SizeChanged("gsm", _through_json(alert.state))
        said += alert.check(step, 100 if step < 10 else 50) is not None
    assert said == 1
    assert set(alert.state["sizes"]) == {50}
    assert alert.state["said"] is False


def test_an_empty_predecessor_is_no_division_by_zero() -> None:
    alert = SizeChanged("gsm")
    assert alert.check(1, 0) is None
    assert alert.check(2, 0) is None
    assert alert.check(3, 10)


def test_each_mirror_is_said_once_while_it_is_late() -> None:
    alert = MirrorLag(3)
    assert alert.check("s3://a", 3) is None
    text = alert.check("s3://a", 4)
    assert text is not None
    assert "s3://a is 4 checkpoints behind" in text
    assert alert.check("s3://b", 9)
    assert alert.check("s3://a", 5) is None
    alert = MirrorLag(3, _through_json(alert.state))
    assert alert.check("s3://a", 6) is None
    assert alert.check("s3://a", 0) is None
    assert alert.check("s3://a", 4)
    assert alert.check("s3://b", 9) is None
