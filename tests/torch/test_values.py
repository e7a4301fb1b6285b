from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from ckptstore.errors import IntegrityError, UsageError
from ckptstore.torch.values import decode, encode, merge, split
from tests.conftest import FULL
from tests.unit.support import examples

WORDS = st.text(max_size=8)
KEYS = WORDS | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.binary(max_size=3)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.just("__ckptstore__"), inner)
    ),
    max_leaves=20,
)


def alike(one: Any, other: Any) -> bool:
    """Equal in value and type; NaN is NaN, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (
            math.isnan(one) == math.isnan(other)
            and (math.isnan(one) or one == other)
            and math.copysign(1, one) == math.copysign(1, other)
        ) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            alike(k1, k2) and alike(v1, v2)
            for (k1, v1), (k2, v2) in zip(one.items(), other.items(), strict=True)
        )
    return bool(one == other)


def through(state: dict[str, Any], into: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a state's values become when they are stored and put into another one."""
    _, others = split(state, "part")
    found = {} if into is None else into
    merge(found, decode(encode(others), "state.json"))
    return found


@examples(1000 if FULL else 150)
@given(st.dictionaries(WORDS.filter(lambda w: w != "__ckptstore__"), VALUES, max_size=5))
def test_all_values_come_back_as_they_were(state: dict[str, Any]) -> None:
    assert alike(through(state), state)


@examples(100)
@given(VALUES, st.integers(0, 3))
def test_values_between_tensors_come_back_where_they_were(value: Any, depth: int) -> None:
    state: dict[str, Any] = {"value": value, "tensor": torch.ones(1)}
    there: dict[str, Any] = {"value": None, "tensor": torch.zeros(1)}
    innermost = there
    for level in range(depth):
        state = {"inner": state, "t": torch.ones(1), f"n{level}": level}
        there = {"inner": there, "t": torch.ones(1)}
    kept = there["t"] if depth else there["tensor"]
    found = through(state, there)
    assert alike(innermost["value"], value)
    assert (found["t"] if depth else found["tensor"]) is kept
    tensors, _ = split(state, "part")
    for _ in range(depth):
        assert set(tensors) == {"inner", "t"}
        tensors = tensors["inner"]
    assert set(tensors) == {"tensor"}


def test_a_random_generator_goes_on_where_it_was() -> None:
    ours, numbers = random.Random(7), np.random.default_rng(7)
    found = through({"python": ours.getstate(), "numpy": numbers.bit_generator.state})
    other, other_numbers = random.Random(), np.random.default_rng()
    other.setstate(found["python"])
    other_numbers.bit_generator.state = found["numpy"]
    assert ours.random() == other.random()
    assert numbers.random() == other_numbers.random()


def test_numpy_floats_come_back_as_floats() -> None:
    state = {"nan": np.float64("nan"), "inf": np.float64("-inf"), "third": np.float64(1) / 3}
    found = through(state)
    assert math.isnan(found["nan"])
    assert found["inf"] == -math.inf
    assert alike(found["third"], 1 / 3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1: torch.ones(1)}, "a key of a saved state must be a word"),
        ({"__ckptstore__": torch.ones(1)}, "must be a word"),
        ([1, torch.ones(1)], "part['x'][1] is a tensor in a list"),
        ({"deep": (torch.ones(1),)}, "part['x']['deep'][0] is a tensor in a list"),
        ({1, 2}, "part['x'] is a set, which is neither a tensor nor a number"),
        (np.arange(3), "part['x'] is a ndarray"),
        ([{"y": object()}], "part['x'][0]['y'] is a object"),
        ({frozenset(): 1}, "part['x'] is a frozenset"),
        (torch.eye(3).to_sparse(), "part['x'] is nested or sparse (torch.sparse_coo)"),
        (torch.ones(2, device="meta"), "part['x'] is on the meta device: it has no data"),
    ],
    ids=range(10),
)
def test_what_cannot_be_stored_is_named(value: Any, words: str | None) -> None:
    with pytest.raises(UsageError) as raised:
        split({"x": value}, "part")
    assert "part['x']" in str(raised.value)
    assert words is None or words in str(raised.value)
    assert raised.value.hint


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
def test_tensors_without_plain_memory_are_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    two = TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]
    for tensor in (quantized, nested, two):
        with pytest.raises(UsageError, match=r"part\['x'\] is"):
            split({"x": tensor}, "part")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"nonsense",
        b"\xff",
        b"[" * 100_000,
        b'{"a": {"__ckptstore__": "later"}}',
        b'{"a": {"__ckptstore__": "float", "value": "1.x"}}',
        b'{"a": {"__ckptstore__": "bytes", "value": "!"}}',
        b'{"a": {"__ckptstore__": "mapping", "value": [[[], 1]]}}',
        b'{"a": {"__ckptstore__": "mapping", "value": [1]}}',
        b'{"a": {"__ckptstore__": {"no": "word"}}}',
    ],
    ids=lambda text: text[:60].decode("latin-1"),
)
def test_a_stored_file_that_is_something_else_is_refused(text: bytes) -> None:
    with pytest.raises(IntegrityError):
        merge({}, decode(text, "state.json"))
