"""Packages that only some runs need."""

from __future__ import annotations

import importlib
from typing import Any

from ckptstore.errors import UsageError


def optional_module(name: str, install: str, purpose: str) -> Any:
    """Import a package that is not always installed.

    Args:
        name: The module.
        install: What comes after ``pip install``.
        purpose: What needs it, as a person would say it.

    Raises:
        UsageError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        problem = "is not installed" if error.name == name.partition(".")[0] else f"fails: {error}"
        raise UsageError(
            f"{purpose} needs {name.partition('.')[0]}, which {problem}",
            hint=f"pip install {install}",
        ) from error
