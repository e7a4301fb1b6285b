"""Places for stores on each server."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Place:
    """Makes URIs of places where nothing is yet.

    Attributes:
        name: The kind of server.
        make: Makes the URI of a new place from a number.
    """

    name: str
    make: Callable[[int], str]
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def uri(self) -> str:
        """A new place."""
        return self.make(next(self._count))
