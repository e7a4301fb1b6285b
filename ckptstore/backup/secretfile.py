"""Secrets: kept out of ckpt.toml, and read from a file that nobody else can read.

A URL that notifications or pings go to is a secret: whoever knows it can send as the job. So a job
names environment variables, and a job run by cron, whose environment is bare, finds them in a file
of ``NAME=value`` lines, such as systemd's EnvironmentFile.
"""

from __future__ import annotations

import os
import re
import stat as stat_module
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import platformdirs

from ckptstore.errors import (
    AccessDeniedError,
    NotFoundError,
    UsageError,
    printable,
    translate_os_errors,
)

_SECRET_WORD = re.compile(
    r"secret|passw|passphrase|token|credential|access_?key|api_?key|private_?key|webhook",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SIZE_LIMIT = 1024 * 1024


def is_secret_name(name: str) -> bool:
    """Whether a key or a variable of this name holds a secret."""
    return _SECRET_WORD.search(name) is not None


def is_secret_url(text: str) -> bool:
    """Whether a URL carries a password or a token."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    if not parts.scheme or not parts.netloc:
        return False
    names = (pair.partition("=")[0] for pair in parts.query.split("&"))
    return ":" in parts.netloc.rpartition("@")[0] or any(map(is_secret_name, names))


def check_no_secret(values: Mapping[str, Any], where: str) -> None:
    """Refuse a table of ckpt.toml that holds a secret, in a key or in a URL.

    Raises:
        UsageError: it does; the value is not shown.
    """
    for key, value in values.items():
        if is_secret_name(key) and not key.endswith("_env"):
            variable = _variable_for(key)
            raise UsageError(
                f"{where}: {printable(key)} is a secret, and ckpt.toml is no place for one",
                hint=f"put it into the environment variable {variable}, or into env_file",
            )
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and is_secret_url(text):
                raise UsageError(
                    f"{where}: the URL of {printable(key)} carries a secret",
                    hint="give secrets by the environment (AWS_SECRET_ACCESS_KEY, …), or by a "
                    f"variable in env_file ({_variable_for(key)})",
                )


def _variable_for(key: str) -> str:
    words = re.sub(r"[^A-Za-z0-9]+", "_", key).strip("_").upper() or "SECRET"
    known = {"ACCESS_KEY": "AWS_ACCESS_KEY_ID", "SECRET_KEY": "AWS_SECRET_ACCESS_KEY"}
    return known.get(words, words if words.startswith(("AWS_", "CKPT_")) else f"CKPT_{words}")


def is_variable(name: str) -> bool:
    """Whether an environment variable can have this name."""
    return _VARIABLE.fullmatch(name) is not None


def default_env_file() -> Path:
    """The file of secrets that is read, if it is there, when a job names none."""
    return platformdirs.user_config_path("ckptstore") / "env"


def read_env_file(path: Path, *, missing_ok: bool = False) -> dict[str, str]:
    """The variables of a file of ``NAME=value`` lines.

    A value may stand in quotation marks; nothing in it is expanded. Empty lines and those that
    start with ``#`` or ``;`` mean nothing.

    Raises:
        NotFoundError: there is no such file, and one is needed.
        AccessDeniedError: others than its owner can read or change it, or it is someone else's.
        UsageError: a line is of another form.
    """
    with translate_os_errors(str(path)):
        try:
            with open(path, "rb") as f:
                status = os.fstat(f.fileno())
                data = f.read(_SIZE_LIMIT)
        except FileNotFoundError:
            if missing_ok:
                return {}
            raise NotFoundError(
                f"the file of secrets {printable(str(path))} does not exist"
            ) from None
    shown = printable(str(path))
    if status.st_uid not in (os.geteuid(), 0):
        raise AccessDeniedError(f"{shown} belongs to another user, so it is not read")
    if stat_module.S_IMODE(status.st_mode) & 0o077:
        raise AccessDeniedError(
            f"{shown} holds secrets, and others can read or change it",
            hint=f"chmod 600 {shown}",
        )
    found = {}
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").splitlines(), 1):
        text = line.strip()
        if not text or text[0] in "#;":
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise UsageError(f"{shown}, line {number}: this is not of the form NAME=value")
        found[match[1]] = _unquoted(match[2].strip())
    return found


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def add_to_environment(
    found: Mapping[str, str], environment: MutableMapping[str, str] | None = None
) -> None:
    """Set the variables that are not set yet."""
    target = os.environ if environment is None else environment
    for name, value in found.items():
        target.setdefault(name, value)
