"""Amounts of bytes as people write them."""

from __future__ import annotations

import pytest

from ckptstore.errors import UsageError
from ckptstore.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("500GiB", 500 * 2**30),
        ("500 gib", 500 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("800M", 800_000_000),
        ("7kb", 7000),
    ],
)
def test_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0GB", "-5GB", "5 bananas", "GB", "1e9", "9EiB"])
def test_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no amount of bytes"):
        parse_size(text)
