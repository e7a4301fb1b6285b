"""What a job does in a store beside copying: retention, and reading a share of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.maintenance.retention import Policy


def policy_of(rules: Mapping[str, Any]) -> Policy:
    """The rules of a table.

    Raises:
        UsageError: one is unknown or cannot be, there is none, or they would keep nothing.
    """
    return Policy.from_mapping(rules)
