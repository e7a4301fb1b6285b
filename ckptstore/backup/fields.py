"""The keys of ``[jobs.NAME]``: how each value is read, and what a wrong one is told."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.backup.secretfile import is_variable
from ckptstore.backup.sources import LAYOUTS
from ckptstore.durations import parse_duration
from ckptstore.errors import UsageError, printable
from ckptstore.layout import check_run
from ckptstore.sizes import parse_size

NOTIFY_ON = ("failure", "change", "always")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or any(c in value for c in "\0\n\r"):
        raise ValueError("must be a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
        raise ValueError("must be a text, or a list of texts")
    return tuple(_text(one) for one in values)


def _variable(value: Any) -> str:
    if not isinstance(value, str) or not is_variable(value):
        raise ValueError("must be the name of an environment variable, such as CKPT_PING_URL")
    return value


def _variables(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
        raise ValueError("must be the name of an environment variable, or a list of them")
    return tuple(_variable(one) for one in values)


def _duration(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError('must be a duration such as "30min"')
    return parse_duration(value)


def _rate(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError('must be bytes a second, such as "50MB"')
    return parse_size(value.removesuffix("/s"))


def _share(value: Any) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value) if isinstance(value, str) else None
    share = float(match[1]) / 100 if match is not None else 0.0
    if not 0 < share <= 1:
        raise ValueError('must be a share of the bytes, such as "5%"')
    return share


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("must be a whole number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a table of rules, such as {keep_last = 5}")
    return value


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return str(value)

    return check


def _metrics_file(value: Any) -> str:
    text = _text(value)
    if not text.endswith(".prom"):
        raise ValueError("must be a file whose name ends in .prom, or nothing reads it")
    return text


FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "source": _text,
    "layout": _one_of("auto", *LAYOUTS),
    "settle": _duration,
    "run": lambda value: check_run(_text(value)),
    "runs": _texts,
    "to": _texts,
    "retention": _table,
    "source_retention": _table,
    "max_delete": _count,
    "verify": _share,
    "verify_time": _duration,
    "limit": _rate,
    "newest_first": _flag,
    "env_file": _text,
    "ping_env": _variable,
    "notify_env": _variables,
    "notify_on": _one_of(*NOTIFY_ON),
    "prometheus": _metrics_file,
    "status_file": _text,
}

_RENAMED = {
    "ping": "ping_env",
    "ping_url": "ping_env",
    "healthcheck": "ping_env",
    "notify": "notify_env",
    "notifications": "notify_env",
    "notify_url": "notify_env",
    "destination": "to",
    "destinations": "to",
    "target": "to",
    "verify_sample": "verify",
    "password": "env_file",
}


def read_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a job's keys.

    Raises:
        UsageError: a key is unknown, or a value cannot be; the message names ``where``.
    """
    found = {}
    for key, value in values.items():
        if key not in FIELDS:
            raise UsageError(f"{where}: unknown key {printable(key)!r}", hint=_hint(key))
        try:
            found[key] = FIELDS[key](value)
        except ValueError as error:
            raise UsageError(f"{where}: {key} {error}") from error
        except UsageError as error:
            raise UsageError(f"{where}: {key}: {error}", hint=error.hint) from error
    return found


def _hint(key: str) -> str:
    known = _RENAMED.get(key)
    if known in ("ping_env", "notify_env"):
        variable = "CKPT_PING_URL" if known == "ping_env" else "CKPT_NOTIFY_URL"
        return f"such a URL is a secret: put it into a variable, and write {known} = {variable!r}"
    near = [known] if known else difflib.get_close_matches(key, FIELDS, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FIELDS)}"
