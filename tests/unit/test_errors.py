from __future__ import annotations

import errno
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import errors
from ckptstore.errors import (
    AccessDeniedError,
    CancelledError,
    CkptError,
    ConflictError,
    Damage,
    IntegrityError,
    NoSpaceError,
    NotFoundError,
    PartialError,
    PlaceNotFoundError,
    SourceChangedError,
    SupersededError,
    TemporaryError,
    UsageError,
    VoidedError,
    from_os_error,
    printable,
    translate_os_errors,
)
from tests.unit.support import examples

ALL = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, CkptError)
]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (CkptError, 1),
        (UsageError, 2),
        (PartialError, 3),
        (NotFoundError, 4),
        (PlaceNotFoundError, 4),
        (IntegrityError, 5),
        (ConflictError, 6),
        (VoidedError, 6),
        (SupersededError, 6),
        (SourceChangedError, 6),
        (AccessDeniedError, 7),
        (TemporaryError, 8),
        (NoSpaceError, 8),
        (CancelledError, 130),
    ],
)
def test_each_error_has_its_stable_exit_code(kind: type[CkptError], code: int) -> None:
    assert kind("x").exit_code == code


def test_the_kinds_are_told_apart_by_name() -> None:
    assert len({kind.kind for kind in ALL}) == len(ALL) == 14


def test_an_error_carries_its_hint_and_nothing_without_one() -> None:
    assert UsageError("x", hint="do y").hint == "do y"
    assert UsageError("x").hint is None
    assert str(UsageError("x", hint="do y")) == "x"


def test_an_integrity_error_carries_each_damaged_place() -> None:
    damage = (Damage("a", 0, 0, "missing"), Damage("b", 16, 4, "content differs"))
    assert IntegrityError("x", damage=damage).damage == damage


def test_damage_names_the_range_with_its_last_byte() -> None:
    assert str(Damage("f", 16, 4, "content differs")) == "f, bytes 16-19: content differs"
    assert str(Damage("f", 0, 0, "missing")) == "f: missing"


def test_damage_escapes_a_hostile_path() -> None:
    assert "\x1b" not in str(Damage("\x1b[2J", 0, 0, "missing"))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EACCES, AccessDeniedError),
        (errno.EPERM, AccessDeniedError),
        (errno.EROFS, AccessDeniedError),
        (errno.ENOENT, NotFoundError),
        (errno.ENOTDIR, NotFoundError),
        (errno.EEXIST, ConflictError),
        (errno.ENOTEMPTY, ConflictError),
        (errno.EISDIR, ConflictError),
        (errno.ENAMETOOLONG, UsageError),
        (errno.EIO, TemporaryError),
        (errno.ESTALE, TemporaryError),
        (errno.EMFILE, TemporaryError),
        (errno.EXDEV, CkptError),
    ],
)
def test_an_os_error_becomes_the_error_that_says_what_to_do(
    code: int, kind: type[CkptError]
) -> None:
    found = from_os_error(OSError(code, "whatever"), "the thing")
    assert type(found) is kind
    assert "the thing" in str(found)


def test_a_full_disk_comes_with_a_hint() -> None:
    assert "free some space" in (from_os_error(OSError(errno.ENOSPC, ""), "x").hint or "")


def test_an_os_error_without_a_number_keeps_its_text() -> None:
    assert "odd" in str(from_os_error(OSError("odd"), "x"))


def test_translation_keeps_the_cause_and_lets_other_errors_through() -> None:
    with pytest.raises(NotFoundError) as caught, translate_os_errors("x"):
        open("/nonexistent/file").close()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(ValueError, match="mine"), translate_os_errors("x"):
        raise ValueError("mine")


@examples(200)
@given(st.text(st.characters(codec=None)))
def test_printable_text_never_holds_what_moves_a_cursor_and_can_always_be_printed(
    text: str,
) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode("utf-8")


@examples(100)
@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_ordinary_text_is_printed_as_it_is(text: str) -> None:
    assert printable(text) == text
