"""A power cut: what the record depends on must be on the disk before the record is.

The order of system calls is recorded, and a model of the disk says what a power cut would have
left: the bytes of a file survive from its fsync on, a name from the fsync of its directory on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from tests.crash.helpers import make_tree


class Disk:
    """What is not durable yet."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = str(root)
        self.unsynced_data: set[int] = set()
        self.unsynced_names: dict[str, str] = {}
        self.at_record: list[str] = []
        self.saw_record = False
        for name in ("pwrite", "ftruncate", "fsync", "link", "rename", "mkdir", "open"):
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if name == "link" and "/commits/" in str(args[1]):
                self.saw_record = True
                self.at_record += self.lost(exclude=os.path.dirname(str(args[1])))
            result = call(*args, **kwargs)
            self._note(name, args, result)
            return result

        return recorded

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in ("pwrite", "ftruncate"):
            self.unsynced_data.add(os.fstat(args[0]).st_ino)
        elif name == "fsync":
            path = os.readlink(f"/proc/self/fd/{args[0]}")
            self.unsynced_data.discard(os.fstat(args[0]).st_ino)
            for made, directory in list(self.unsynced_names.items()):
                if directory == path:
                    del self.unsynced_names[made]
        elif name in ("link", "rename", "mkdir"):
            made = str(args[0] if name == "mkdir" else args[1])
            self.unsynced_names[made] = os.path.dirname(made)
        elif name == "open" and len(args) > 1 and args[1] & os.O_CREAT:
            self.unsynced_data.add(os.fstat(result).st_ino)

    def lost(self, exclude: str = "") -> list[str]:
        """What a power cut would take now, of what lies under its final name."""
        names = [made for made in self.unsynced_names if self._counts(made)]
        names = [n for n in names if self.unsynced_names[n] != exclude and n != exclude]
        data = [
            str(path)
            for path in Path(self.root).rglob("*")
            if path.is_file()
            and path.stat().st_ino in self.unsynced_data
            and self._counts(str(path))
        ]
        return names + data

    def _counts(self, path: str) -> bool:
        hints = ("/leases", "/latest", "/.ckpt-tmp-")
        return path.startswith(self.root) and not any(hint in path for hint in hints)


@pytest.mark.parametrize("how", ["push", "save"])
def test_a_record_is_created_when_all_it_names_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tree = make_tree(tmp_path / "tree", 1)
    uri = tmp_path / "deep" / "store"
    uri.parent.mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(uri, patch)
        store = ckptstore.open_store(str(uri))
        if how == "push":
            store.push(tree, "r", 1)
            store.push(tree, "r", 2)
        else:
            with store.save("r", 1) as save:
                save.add_file("x/y/z", tree / "cfg.json")
                with save.open("w") as f:
                    f.write(b"data")
        assert disk.saw_record
        assert disk.at_record == []
        assert disk.lost() == [], "when the save is reported, the record is durable too"
