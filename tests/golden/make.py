"""Write the golden stores of the current format: one, and one for each later addition to it.

Run once for each, when it is new: every later version must read what stands here.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import ckptstore
from ckptstore import mirrors
from ckptstore.completing import write_whole
from ckptstore.ids import seeded_ids
from ckptstore.layout import Name, RunKeys
from ckptstore.leases import LeaseKeeper
from ckptstore.maintenance import verify
from ckptstore.manifest import FORMAT
from ckptstore.records import BestRule, writer_here
from ckptstore.saveoptions import SaveOptions
from ckptstore.uri import parse_ref
from ckptstore.voiding import ensure_void

HERE = Path(__file__).parent
RUN = "golden"


def make(root: Path) -> None:
    """A store with something of everything that the format has."""
    store = ckptstore.open_store(str(root / "store"), ids=seeded_ids("golden"))
    tree = root / "tree"
    (tree / "actor").mkdir(parents=True)
    (tree / "empty directory").mkdir()
    (tree / "actor/weights.bin").write_bytes(bytes(range(256)) * 8)
    (tree / "zero").write_bytes(b"")
    (tree / "naïve name [1].txt").write_text("text\n", encoding="utf-8")
    (tree / "run.sh").write_text("#!/bin/sh\n", encoding="utf-8")
    (tree / "run.sh").chmod(0o755)
    options = SaveOptions(
        metadata={"note": "ünïcode", "nested": {"list": [1, 2.5, None, True]}},
        metrics={"reward": 0.5},
        best=BestRule(metric="reward", mode="max"),
        tags=("birth",),
    )
    store.push(tree, RUN, 100, options)
    (tree / "zero").write_bytes(b"not any more\n")
    store.push(tree, RUN, 200, SaveOptions(metrics={"reward": 0.25}))
    for step in (300, 400, 500):
        (tree / "zero").write_text(f"{step}\n", encoding="utf-8")
        store.push(tree, RUN, step)
    first, second = store.get(RUN, step=100), store.get(RUN, step=200)
    store.pin(first)
    store.tag(second, "candidate")
    store.untag(first, "birth")
    store.add_metrics(second, {"eval": 0.75})
    verify(first, deep=True)
    store.delete(store.get(RUN, step=300), grace=10 * 365 * 86400.0)
    save = store.save(RUN, 600)
    save.add_bytes("half", b"never committed\n")
    save._lease.abandon()
    given_up = store.save(RUN, 700)
    assert ensure_void(store.catalog, RUN, given_up.name, "given up")
    given_up.abort()
    damaged = store.get(RUN, step=400)
    path = Path(damaged.path or "") / "zero"
    path.chmod(0o644)
    path.write_text("40o\n", encoding="utf-8")
    verify(damaged, deep=True)
    assert store.resolve(parse_ref(f"{RUN}@latest")).step == 500


def make_lives(root: Path) -> None:
    """A run that was started three times: each life saved, and what the first had begun is void."""
    store = ckptstore.open_store(str(root / "store"), ids=seeded_ids("golden lives"))
    for step in (100, 200):
        life = store.begin_life(RUN)
        with store.save(RUN, step, life=life) as save:
            save.add_bytes("state", f"{step}\n".encode())
        unfinished = store.save(RUN, step + 50, life=life)
        unfinished.add_bytes("state", b"never committed\n")
        unfinished._lease.abandon()
        unfinished._ended = True
    store.begin_life(RUN)


def make_mirrors(root: Path) -> None:
    """A store that has a mirror, which lacks one of two; and that is a mirror, with half a copy."""
    store = ckptstore.open_store(str(root / "store"), ids=seeded_ids("golden mirrors"))
    for step in (100, 200):
        with store.save(RUN, step) as save:
            save.add_bytes("state", f"{step}\n".encode())
    mirror = mirrors.expect_mirror(store.catalog, "s3://bucket/ckpts", [RUN])
    mirrors.acknowledge(store.catalog, mirror, RUN, [store.get(RUN, step=100).name])
    mirrors.note_attempt(store.catalog, mirror, store="abcdefghijklmnop", problem="no space left")
    name = Name(3, "zyxwvuts", 300)
    lease = LeaseKeeper(
        store.catalog, RUN, name, writer_here("abcdefghijklmnop"), copy_of="ponmlkjihgfedcba"
    )
    store.backend.make_directory(RunKeys(RUN).directory(name))
    write_whole(store.backend, RunKeys(RUN).file(name, "state"), b"300\n")
    lease.abandon()


STORES = {
    f"v{FORMAT}": make,
    f"v{FORMAT}-lives": make_lives,
    f"v{FORMAT}-mirrors": make_mirrors,
}


def write(target: Path) -> None:
    """Make one of them."""
    STORES[target.name](target)
    shutil.rmtree(target / "tree", ignore_errors=True)
    for directory, names, _ in os.walk(target):  # git keeps no empty directories
        for name in names:
            assert not os.path.islink(os.path.join(directory, name)) or name == "latest"


if __name__ == "__main__":
    missing = [name for name in STORES if not (HERE / name).exists()]
    if not missing:
        sys.exit("all of them exist: a golden store is never changed")
    for name in missing:
        write(HERE / name)
