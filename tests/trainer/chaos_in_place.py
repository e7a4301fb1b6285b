"""A trainer whose store writes its records in place, as a store must not: the test must see it.

python tests/trainer/chaos_in_place.py KEY=VALUE …
"""

from __future__ import annotations

import sys
from pathlib import Path

from ckptstore.backends.local import LocalBackend
from trainer.__main__ import main


def write_in_place(self: LocalBackend, key: str, data: bytes) -> bool:
    """Create an object under its name, and write into it what is there to be read already."""
    path = Path(self._path(key))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


LocalBackend.create_exclusive = write_in_place  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
