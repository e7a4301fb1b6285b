"""The configuration's keys with their types, and how text becomes a value of one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_type_hints

import msgspec
import yaml  # type: ignore[import-untyped]
from msgspec import inspect

from ckptstore.errors import UsageError, printable
from trainer.config import Config

NULLS = frozenset({"", "~", "null", "Null", "NULL", "None"})
_BOOLS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def _leaves(section: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in get_type_hints(section).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


KEYS: Mapping[str, Any] = dict(_leaves(Config))
"""Every dotted key and its type."""

_INFO = {key: inspect.type_info(kind) for key, kind in KEYS.items()}
_OPEN = tuple(k for k, info in _INFO.items() if isinstance(info, inspect.DictType))


def convert(key: str, value: Any) -> Any:
    """The value of ``key``'s type that ``value`` (text, or a list or mapping of texts) says.

    Raises:
        UsageError: it says none.
    """
    try:
        result = msgspec.convert(_prepared(value, _INFO[key]), KEYS[key], strict=False)
    except msgspec.ValidationError:
        result = math.nan
    numbers = result if isinstance(result, tuple) else (result,)
    if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
        raise UsageError(f"{key} is {display(value)}; it must be {_expected(_INFO[key])}")
    return result


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of a nested mapping; what a key itself holds is not taken apart."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in KEYS:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested mapping whose dotted keys are those of ``values``."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return tree


def is_section(name: str) -> bool:
    """Whether ``name`` is a part of the configuration that holds keys."""
    return any(key.startswith(f"{name}.") for key in KEYS)


def open_key(name: str) -> tuple[str, str] | None:
    """The key that takes any names below it, and the rest of ``name``: ``ray.init`` has one."""
    found = next((key for key in _OPEN if name.startswith(f"{key}.")), None)
    return None if found is None else (found, name[len(found) + 1 :])


def unknown(name: str, others: Iterable[str] = ()) -> UsageError:
    """What to say about a name that is no key: with the nearest one, first among our own."""
    if is_section(name):
        return UsageError(f"{name} is a section of keys and takes no value itself")
    near = [
        *difflib.get_close_matches(name, KEYS, n=1),
        *difflib.get_close_matches(name, others, n=1),
        *(key for key in KEYS if key.endswith(f".{name.rpartition('.')[2]}")),
    ]
    return UsageError(
        f"{printable(name)}: no such key" + (f"; did you mean {near[0]}?" if near else ""),
        hint="ckpt-train --print-config shows every key",
    )


def display(value: Any) -> str:
    """A value as a person would write it on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(display(v) for v in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{k}: {display(v)}' for k, v in value.items())}}}"
    return "null" if value is None else printable(str(value)) or "''"


def _prepared(value: Any, info: inspect.Type) -> Any:
    """``value`` with the ways people write null, truth values and lists of one made plain."""
    if isinstance(info, inspect.UnionType):
        return _of_union(value, info.types)
    if isinstance(info, inspect.BoolType) and isinstance(value, str):
        return _BOOLS.get(value.lower(), value)
    if isinstance(info, inspect.ListType) and isinstance(value, str) and value not in NULLS:
        return [value]
    if isinstance(info, inspect.DictType) and isinstance(value, Mapping):
        return {k: yaml.safe_load(v) if isinstance(v, str) else v for k, v in value.items()}
    return value


def _of_union(value: Any, kinds: tuple[inspect.Type, ...]) -> Any:
    optional = any(isinstance(kind, inspect.NoneType) for kind in kinds)
    if optional and (value is None or (isinstance(value, str) and value in NULLS)):
        return None
    words = [w for kind in kinds if isinstance(kind, inspect.LiteralType) for w in kind.values]
    lists = [kind for kind in kinds if isinstance(kind, inspect.ListType)]
    return _prepared(value, lists[0]) if lists and value not in words else value


def _expected(info: inspect.Type) -> str:
    match info:
        case inspect.UnionType(types=types):
            return " or ".join(_expected(kind) for kind in types)
        case inspect.LiteralType(values=values):
            return "one of " * (len(values) > 1) + ", ".join(map(str, values))
        case inspect.ListType(item_type=inspect.StrType()):
            return "a list of words such as [a,b]"
        case inspect.ListType(item_type=item):
            return f"a list, each {_expected(item)}"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)} numbers"
    return _NAMES[type(info)]


_NAMES: dict[type[inspect.Type], str] = {
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
    inspect.StrType: "text",
    inspect.NoneType: "null",
    inspect.DictType: "a mapping",
}
