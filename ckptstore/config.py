"""Settings from files and the environment: ``CKPT_*`` over ``./ckpt.toml`` over the user's file.

# ckpt.toml
store = "/data/ckpts"
grace = "24h"
threads = 4
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.durations import parse_duration
from ckptstore.errors import UsageError, printable, translate_os_errors

PROJECT_FILE = "ckpt.toml"


def _store(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a path or URI")
    return value


def _grace(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError('must be a duration such as "24h"')
    return parse_duration(value)


def _threads(value: Any) -> int:
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= 256:
        raise ValueError("must be a whole number from 1 to 256")
    return number


@dataclass(frozen=True)
class Setting:
    """A setting and where its value came from."""

    key: str
    value: Any
    origin: str


_KEYS: Mapping[str, tuple[Callable[[Any], Any], Any, str]] = {
    "store": (_store, None, "the store that is used when none is named"),
    "grace": (_grace, 24 * 3600.0, "how long a deleted checkpoint can be brought back"),
    "threads": (_threads, None, "blocks in flight; each costs 16 MiB of memory"),
}


def describe(key: str) -> str:
    """What a setting is for."""
    return _KEYS[key][2]


def user_file() -> Path:
    """The user's own configuration file."""
    import platformdirs

    return platformdirs.user_config_path("ckptstore") / PROJECT_FILE


SECTIONS = ("retention", "jobs")
"""Tables of the files; the modules that they are about say what may stand in them."""


@dataclass(frozen=True)
class Section:
    """One table of a section, and the file that it stands in.

    Attributes:
        name: ``NAME`` in ``[jobs.NAME]``.
        values: What stands in it.
        origin: The file.
    """

    name: str
    values: Mapping[str, Any]
    origin: str


def load_sections(section: str) -> dict[str, Section]:
    """The tables of a section, by name; one of the project's file replaces the user's.

    Raises:
        UsageError: a file is no TOML, or what stands there is no table.
    """
    found: dict[str, Section] = {}
    for path in (user_file(), Path(PROJECT_FILE)):
        tables = _read(path).get(section, {})
        if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
            raise UsageError(f"{path}: {section} must hold tables: [{section}.NAME]")
        found |= {name: Section(name, table, str(path)) for name, table in tables.items()}
    return found


def load_settings(environment: Mapping[str, str] | None = None) -> dict[str, Setting]:
    """Every setting, by key.

    Raises:
        UsageError: a file is no TOML, holds an unknown key, or a value that cannot be.
    """
    environment = os.environ if environment is None else environment
    found = {key: Setting(key, default, "default") for key, (_, default, _) in _KEYS.items()}
    for path in (user_file(), Path(PROJECT_FILE)):
        for key, value in _read(path).items():
            if key in SECTIONS:
                continue
            found[key] = _checked(key, value, str(path))
    for key in _KEYS:
        variable = f"CKPT_{key.upper()}"
        if environment.get(variable):
            found[key] = _checked(key, environment[variable], variable)
    return found


def _read(path: Path) -> dict[str, Any]:
    with translate_os_errors(str(path)):
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8: {error}") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error


def _checked(key: str, value: Any, origin: str) -> Setting:
    if key not in _KEYS:
        near = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_KEYS)}"
        raise UsageError(f"{origin}: unknown key {printable(key)!r}", hint=hint)
    try:
        return Setting(key, _KEYS[key][0](value), origin)
    except ValueError as error:
        raise UsageError(f"{origin}: {key} {error}") from error
    except UsageError as error:
        raise UsageError(f"{origin}: {key}: {error}", hint=error.hint) from error
