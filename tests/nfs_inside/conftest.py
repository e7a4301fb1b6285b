"""The mounts; outside there are none, and nothing here is collected."""

from __future__ import annotations

import os
import random

import pytest

from tests.conftest import FULL
from tests.servers.nfs import INSIDE

collect_ignore_glob = [] if INSIDE in os.environ else ["test_*.py"]

_SAMPLE = {
    "test_names_are_exact": 8,
    "test_a_written_object_appears_whole_when_it_is_finished": 4,
    "test_zeros_may_be_skipped_and_read_as_zeros": 1,
    "test_the_command_on_one_client_and_a_pull_onto_nfs_on_the_other": 1,
    "test_a_save_killed_on_one_client_is_absent_or_whole_on_the_other": 1,
}
"""Tests that take long, and how many variants of each (versions and parameters) are a sample."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A seeded sample of the long tests, unless the tests run whole."""
    if FULL:
        return
    rng = random.Random(17)
    for name, count in _SAMPLE.items():
        same = [item for item in items if f"::{name}" in item.nodeid]
        for item in rng.sample(same, max(0, len(same) - count)):
            items.remove(item)
