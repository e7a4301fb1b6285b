"""Rewards: functions of a prompt, a response and the expected answer.

A function of one's own has the same shape, ``reward(prompt, response, answer) -> float``, and is
named as ``package.module:function`` or ``path/to/file.py:function``.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from types import ModuleType

from ckptstore.errors import UsageError, printable
from trainer.data import Sample

Reward = Callable[[str, str, str], float]
"""Of the prompt's text, the response's text and the answer."""

_NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)


def _number(text: str) -> Decimal | None:
    """The number at the start of ``text``, without currency sign and thousands separators."""
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    return Decimal(match[0].replace(",", "").replace("$", ""))


def gsm8k(prompt: str, response: str, answer: str) -> float:
    """1 if the number after the response's last ``####`` is the answer, else 0.

    The same task as verl's ``gsm8k`` score in its strict mode, without a part for the format;
    numbers are compared by value, so ``1,080.00`` is ``1080``.
    """
    del prompt
    _, mark, after = response.rpartition("####")
    expected = _number(answer.rpartition("####")[2])
    return float(bool(mark) and expected is not None and _number(after) == expected)


def digits(prompt: str, response: str, answer: str) -> float:
    """The share of the response's characters that are digits 0 to 9; 0 for an empty one."""
    del prompt, answer
    return sum(c.isascii() and c.isdigit() for c in response) / max(1, len(response))


def exact(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer, but for space around it, else 0."""
    del prompt
    return float(response.strip() == answer.strip())


_BUILT_IN: dict[str, Reward] = {"gsm8k": gsm8k, "digits": digits, "exact": exact}


def load_reward(name: str) -> Reward:
    """The reward function of that name.

    Args:
        name: ``gsm8k``, ``digits``, ``exact``, ``module:function`` or ``file.py:function``.

    Raises:
        UsageError: there is none, its module cannot be imported, or it is no function.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise UsageError(
            f"there is no reward {printable(name)!r}",
            hint=f"{', '.join(_BUILT_IN)}, or one's own as module:function or file.py:function",
        )
    module = _import(place)
    function = getattr(module, function_name, None)
    if function is None:
        raise UsageError(f"{printable(place)} has no function {printable(function_name)!r}")
    if not callable(function):
        raise UsageError(f"the reward {printable(name)!r} is no function")
    own: Reward = function
    return own


def _import(place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        # Pickling and dataclasses look a module up by its name.
        module_name = f"reward_{Path(place).stem}"
        spec = importlib.util.spec_from_file_location(module_name, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"the reward's module {printable(place)} cannot be imported:"
            f" {type(error).__name__}: {error}",
            hint="a module must be on PYTHONPATH; file.py:function needs no such path",
        ) from error
    return module


def score(reward: Reward, samples: Sequence[Sample], responses: Sequence[str]) -> list[float]:
    """The reward of each response.

    Args:
        reward: The function.
        samples: What was asked, a sample a response.
        responses: Texts without special tokens.

    Raises:
        UsageError: the function raised, or returned something else than a finite number.
    """
    return [_score(reward, s, r) for s, r in zip(samples, responses, strict=True)]


def _score(reward: Reward, sample: Sample, response: str) -> float:
    try:
        value = float(reward(sample.text, response, sample.answer))
    except Exception as error:
        raise UsageError(
            f"the reward function failed for sample {sample.id}: {type(error).__name__}: {error}"
        ) from error
    if not math.isfinite(value):
        raise UsageError(f"the reward of sample {sample.id} is {value}, not a finite number")
    return value
