"""What all tests share."""

from __future__ import annotations

import os

FULL = os.environ.get("CKPTSTORE_TEST_FULL") == "1"
"""Whether long tests run whole (`make test-full`) or as a seeded sample (`make test`)."""
