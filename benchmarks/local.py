"""Push, pull, verify and list on a local disk, beside cp and b3sum: ``make bench``."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import ckptstore
from benchmarks.harness import Result, alternate, drop_caches, peak_megabytes, report, seconds
from ckptstore import document
from ckptstore.ids import random_letters
from ckptstore.layout import Name, RunKeys
from ckptstore.manifest import FORMAT
from ckptstore.records import Commit, ManifestPin, timestamp, writer_here

CKPT = Path(sys.executable).parent / "ckpt"


def make_tree(root: Path, size: int, shards: int) -> int:
    """Shards of random bytes; returns the bytes in all."""
    root.mkdir(parents=True)
    each = size // shards
    for i in range(shards):
        with (root / f"shard-{i:05d}.bin").open("wb") as f:
            left = each
            while left > 0:
                f.write(os.urandom(min(left, 1 << 24)))
                left -= 1 << 24
    return each * shards


def many_records(uri: Path, count: int) -> None:
    """A run with this many commits, as listings see it: records without their files."""
    store = ckptstore.open_store(str(uri))
    store.create()
    run, writer = "many", writer_here(random_letters())
    for i in range(1, count + 1):
        name = Name(i, random_letters(), i * 10)
        record = Commit(
            format=FORMAT,
            name=str(name),
            run=run,
            step=name.step,
            seq=i,
            store=store.id,
            manifest=ManifestPin(size=1000, digest="0" * 64),
            content="0" * 64,
            size=10**9,
            files=16,
            created=timestamp(),
            writer=writer,
            metrics={"reward": i / count},
        )
        path = uri / RunKeys(run).record(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document.encode(record))


def copying(work: Path, size: int, shards: int, rounds: int) -> list[Result]:
    """Push, pull and verify of one checkpoint."""
    tree = work / "tree"
    total = make_tree(tree, size, shards) / 1e9
    store, pulled, copied = work / "store", work / "pulled", work / "copied"

    def rate(prepare: Callable[[], object], *command: str | Path) -> float:
        prepare()
        return total / seconds(command)

    def clear(path: Path) -> Callable[[], None]:
        return lambda: shutil.rmtree(path, ignore_errors=True)

    sync_copy = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
    push, cp, cp_sync = alternate(
        rounds,
        lambda: rate(clear(store), CKPT, "push", tree, f"{store}/r@1"),
        lambda: rate(clear(copied), "cp", "-r", tree, copied),
        lambda: rate(clear(copied), "bash", "-c", sync_copy, tree, copied),
    )
    again, cp_again = alternate(
        rounds,
        lambda: seconds([CKPT, "push", tree, f"{store}/r@1"]),
        lambda: rate(clear(copied), "cp", "-r", tree, copied),
    )
    pull, cp_back = alternate(
        rounds,
        lambda: rate(clear(pulled), CKPT, "pull", f"{store}/r@1", pulled),
        lambda: rate(clear(copied), "cp", "-r", tree, copied),
    )
    subprocess.run(["diff", "-r", tree, pulled], check=True)
    shards_list = sorted(tree.iterdir())
    peers: list[Callable[[], float]] = [
        lambda: rate(lambda: None, CKPT, "verify", f"{store}/r@1", "--deep"),
        lambda: rate(lambda: None, "sha256sum", *shards_list),
    ]
    names = ["sha256sum"]
    if shutil.which("b3sum"):
        peers.append(lambda: rate(lambda: None, "b3sum", *shards_list))
        names.append("b3sum")
    verify, *others = alternate(rounds, *peers)
    results = [
        Result("push (durable, hashed)", "GB/s", push, {"cp": cp, "cp + fsync": cp_sync}),
        Result("push again, nothing changed", "s", again, {"cp (whole)": total / cp_again}),
        Result("pull (verified)", "GB/s", pull, {"cp": cp_back}),
        Result("verify --deep, warm", "GB/s", verify, dict(zip(names, others, strict=True))),
    ]
    if drop_caches():
        cold, cat = alternate(
            max(1, rounds // 2),
            lambda: rate(drop_caches, CKPT, "verify", f"{store}/r@1", "--deep"),
            lambda: rate(drop_caches, "cat", *shards_list),
        )
        results.append(Result("verify --deep, cold", "GB/s", cold, {"cat": cat}))
    return results


def listing(work: Path, count: int, rounds: int) -> list[Result]:
    """The command over many checkpoints, and over none."""
    many, none = work / "many", work / "none"
    many_records(many, count)
    ckptstore.open_store(str(none)).create()
    plain = "import glob, json, sys; [json.load(open(p)) for p in glob.glob(sys.argv[1])]"
    full, empty, loop = alternate(
        rounds,
        lambda: seconds([CKPT, "list", many]),
        lambda: seconds([CKPT, "list", none]),
        lambda: seconds([sys.executable, "-c", plain, f"{many}/many/commits/*.json"]),
    )
    peers = {"an empty store": empty, "glob + json.load": loop}
    return [Result(f"list {count:,} checkpoints", "s", full, peers)]


def memory(work: Path, size: int) -> list[Result]:
    """The most memory of a push and of a pull of one sparse file."""
    tree = work / "sparse"
    tree.mkdir()
    with (tree / "big").open("wb") as f:
        f.truncate(size)
    store = work / "sparse-store"
    push = peak_megabytes([CKPT, "push", tree, f"{store}/r@1"])
    pull = peak_megabytes([CKPT, "pull", f"{store}/r@1", work / "sparse-pulled"])
    return [
        Result(f"peak memory, push {size / 1024**3:.0f} GiB", "MB", push, {}),
        Result(f"peak memory, pull {size / 1024**3:.0f} GiB", "MB", max(push, pull), {}),
    ]


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB to push (default 1)")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as place:
        work = Path(place)
        results = copying(work, int(given.size * 1e9), given.shards, given.rounds)
        results += listing(work, given.checkpoints, given.rounds)
        results += memory(work, 8 * 1024**3)
        report(results, given.json)


if __name__ == "__main__":
    main()
