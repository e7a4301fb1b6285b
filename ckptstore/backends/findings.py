"""What an examination of a place finds: a verdict, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    PlaceNotFoundError,
    TemporaryError,
)

Verdict = Literal["ok", "slow", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: The check's name; stable.
        verdict: ``ok``; ``slow`` and ``warning`` are safe, and worth knowing; ``failed`` is not
            safe; ``skipped`` could not be looked at, or does not apply.
        detail: What was found, as a sentence for people.
        hint: What to do about it.
        command: A command line that does it, where there is one.
        numbers: What was measured, by name.
        exit_code: Of ``ckpt doctor`` when this is the first check that failed.
    """

    check: str
    verdict: Verdict
    detail: str
    hint: str | None = None
    command: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    exit_code: int = 0

    @classmethod
    def ok(cls, check: str, detail: str, **numbers: float) -> Finding:
        """All is well."""
        return cls(check, "ok", detail, numbers=numbers)

    @classmethod
    def warning(cls, check: str, detail: str, hint: str | None = None, **numbers: float) -> Finding:
        """Safe, with a drawback that people should know."""
        return cls(check, "warning", detail, hint, numbers=numbers)

    @classmethod
    def failed(cls, check: str, detail: str, hint: str | None = None, **numbers: float) -> Finding:
        """Not safe."""
        return cls(check, "failed", detail, hint, numbers=numbers, exit_code=1)

    @classmethod
    def skipped(cls, check: str, detail: str) -> Finding:
        """Not looked at."""
        return cls(check, "skipped", detail)

    @classmethod
    def of_error(cls, check: str, error: CkptError) -> Finding:
        """A check that ended with an error."""
        kept = (AccessDeniedError, PlaceNotFoundError, TemporaryError)
        code = error.exit_code if isinstance(error, kept) else 1
        return cls(check, "failed", str(error), error.hint, exit_code=code)


def attempt(check: str, call: Callable[[], Finding]) -> Finding:
    """What ``call`` finds; an error of the storage is a check that failed."""
    try:
        return call()
    except CkptError as error:
        return Finding.of_error(check, error)
