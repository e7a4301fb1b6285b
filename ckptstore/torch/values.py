"""What a state holds beside tensors: numbers, words, lists. It is kept as JSON, never as a pickle.

A state is a nest of mappings with tensors and other values at its leaves. :func:`split` takes it
apart, and :func:`merge` puts stored values back into one.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptstore.errors import IntegrityError, UsageError

_TAG = "__ckptstore__"


def split(state: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a state, and its other values, each in the same nest.

    Args:
        state: The state; its mappings have words as keys.
        where: What it is, for messages.

    Raises:
        UsageError: something in it is neither a tensor with data of its own nor what JSON can hold,
            or two tensors get one name.
    """
    tensors, others = _split(state, where)
    names: set[str] = set()
    for name in _names(tensors):
        if name in names:
            raise UsageError(
                f"{where}: two tensors are called {name}: names of nested keys are joined by dots",
                hint="rename one of them",
            )
        names.add(name)
    return tensors, others


def _names(tensors: Mapping[str, Any]) -> Iterator[str]:
    """The name of each tensor, as the planner makes it."""
    for key, value in tensors.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{name}" for name in _names(value))
        else:
            yield key


def _split(state: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in state.items():
        place = f"{where}[{key!r}]"
        if not isinstance(key, str) or key == _TAG:
            raise UsageError(f"{place}: a key of a saved state must be a word", hint="use str(key)")
        if isinstance(value, torch.Tensor):
            _check_tensor(value, place)
            tensors[key] = value
        elif isinstance(value, Mapping) and _holds_tensor(value):
            inner, rest = _split(value, place)
            tensors[key] = inner
            if rest:
                others[key] = rest
        else:
            others[key] = _plain(value, place)
    return tensors, others


def _check_tensor(tensor: torch.Tensor, place: str) -> None:
    local = tensor
    problem = None
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        if any(placement.is_partial() for placement in tensor.placements):
            problem = "is a sum that its ranks have not added up yet (Partial)"
    wraps: bool = is_traceable_wrapper_subclass(local)
    if local.is_nested or local.layout is not torch.strided:
        problem = f"is nested or sparse ({local.layout})"
    elif local.is_quantized or wraps:
        problem = f"is a {type(local).__name__} of {local.dtype}, whose elements are not in memory"
    elif local.device.type == "meta":
        problem = "is on the meta device: it has no data"
    if problem is not None:
        raise UsageError(
            f"{place} {problem}: it is no plain tensor, and cannot be stored or loaded as one",
            hint="convert it, for example with to_dense(), dequantize() or to_empty()",
        )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(v) for v in value.values())
    return isinstance(value, torch.Tensor)


def _plain(value: Any, place: str) -> Any:
    """``value`` in the words of JSON; what JSON lacks is tagged."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        exact = float(value)  # also of a subclass, as NumPy's is, which prints in a way of its own
        return exact if math.isfinite(exact) else {_TAG: "float", "value": repr(exact)}
    if isinstance(value, list):
        return [_plain(v, f"{place}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [_plain(v, f"{place}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value) and _TAG not in value:
            return {k: _plain(v, f"{place}[{k!r}]") for k, v in value.items()}
        pairs = [[_plain(k, place), _plain(v, f"{place}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "mapping", "value": pairs}
    if isinstance(value, torch.Tensor):
        raise UsageError(
            f"{place} is a tensor in a list, or in a mapping whose keys are not all words",
            hint="put it into a mapping with words as keys, for example under str(i)",
        )
    raise UsageError(
        f"{place} is a {type(value).__name__}, which is neither a tensor nor a number, a word or a "
        "list or mapping of such",
        hint="convert it, or store it as a file of the checkpoint",
    )


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(v) for v in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {k: _restored(v) for k, v in value.items()}
    inner = value.get("value")
    try:
        if tag == "float" and isinstance(inner, str):
            return float(inner)
        if tag == "tuple" and isinstance(inner, list):
            return tuple(_restored(v) for v in inner)
        if tag == "bytes" and isinstance(inner, str):
            return base64.b64decode(inner, validate=True)
        if tag == "mapping" and isinstance(inner, list):
            return {_restored(k): _restored(v) for k, v in inner}
    except (TypeError, ValueError) as error:
        raise IntegrityError(f"a value with the tag {tag!r} is not one: {error}") from error
    raise IntegrityError(f"a value with the unknown tag {tag!r}", hint="update ckptstore")


def encode(others: Mapping[str, Any]) -> bytes:
    """The file that keeps what :func:`split` found beside tensors."""
    return json.dumps(others, indent=1, allow_nan=False).encode() + b"\n"


def decode(data: bytes, what: str) -> dict[str, Any]:
    """What :func:`encode` wrote.

    Raises:
        IntegrityError: it is something else.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{what} cannot be understood: {error}") from error
    if not isinstance(values, dict):
        raise IntegrityError(f"{what} cannot be understood: it is no mapping")
    return values


def merge(state: MutableMapping[str, Any], others: Mapping[str, Any]) -> None:
    """Put stored values into a state, in place: a mapping that holds tensors keeps them."""
    for key, value in others.items():
        there = state.get(key)
        nest = isinstance(value, dict) and _TAG not in value
        if nest and isinstance(there, MutableMapping) and _holds_tensor(there):
            merge(there, value)
        else:
            state[key] = _restored(value)
