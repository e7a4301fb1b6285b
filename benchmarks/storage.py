"""Push and pull on real servers, beside s5cmd and cp: ``python -m benchmarks.storage``.

SeaweedFS and Hadoop are started on this machine, so they take its cores too: what the servers do is
most of what is measured. ``cp -r`` is on the disk of the temporary folder and syncs nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Result, alternate, report, seconds
from tests.servers.hadoop import Hadoop
from tests.servers.process import Server
from tests.servers.s3 import client
from tests.servers.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedFS

BIN = Path(sys.executable).parent
SIZE = 512 * 1024 * 1024
SHARDS = 8


@contextmanager
def running(server: Server) -> Iterator[None]:
    """A server, for a while."""
    reason = server.missing()
    if reason is not None:
        sys.exit(f"{server.name}: {reason}")
    server.start()
    try:
        yield
    finally:
        server.kill()


def measure(
    name: str,
    rounds: int,
    folder: Path,
    uri: Callable[[str], str],
    peers: Callable[[Path, Path], dict[str, tuple[list[str], list[str]]]],
) -> list[Result]:
    """MB/s of a push and a pull of new data, and of the peers' up and down."""
    tree, back = folder / "tree", folder / "back"
    tree.mkdir(exist_ok=True)
    for i in range(SHARDS):
        (tree / f"shard-{i}").write_bytes(os.urandom(SIZE // SHARDS))
    pushed = iter(range(1, 1000))
    beside = peers(tree, back)

    def rate(command: list[str]) -> float:
        shutil.rmtree(back, ignore_errors=True)
        return SIZE / 1e6 / seconds(command)

    def push() -> float:
        run = next(pushed)
        for shard in tree.iterdir():  # what the store has already would not be sent
            with shard.open("r+b") as f:
                f.write(os.urandom(64))
        return rate([str(BIN / "ckpt"), "push", str(tree), uri(f"run{run}@1"), "--quiet"])

    def pull() -> float:
        return rate([str(BIN / "ckpt"), "pull", uri("run1@1"), str(back), "--quiet"])

    results = []
    for direction, ours in enumerate((push, pull)):
        calls = [lambda c=pair[direction]: rate(c) for pair in beside.values()]
        first, *others = alternate(rounds, ours, *calls)
        what = ("push", "pull")[direction]
        results.append(
            Result(f"{name}, {what}", "MB/s", first, dict(zip(beside, others, strict=True)))
        )
    return results


def copies(tree: Path, back: Path) -> dict[str, tuple[list[str], list[str]]]:
    """cp, up and down."""
    command = ["cp", "-r", str(tree), str(back)]
    return {"cp": (command, command)}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results += measure(
            "local disk", options.rounds, folder, lambda ref: f"{folder}/store/{ref}", copies
        )
        weed = SeaweedFS(folder / "weed")
        with running(weed):
            os.environ.update(
                AWS_ACCESS_KEY_ID=ACCESS_KEY,
                AWS_SECRET_ACCESS_KEY=SECRET_KEY,
                AWS_REGION="us-east-1",
            )
            client(weed).call_s3("create_bucket", Bucket="bench")
            s5cmd = [str(BIN / "s5cmd"), "--endpoint-url", weed.endpoint, "cp"]
            results += measure(
                "SeaweedFS",
                options.rounds,
                folder,
                lambda ref: f"s3://bench/store/{ref}?endpoint_url={weed.endpoint}",
                lambda tree, back: {
                    "s5cmd": (
                        [*s5cmd, f"{tree}/", "s3://bench/peer/"],
                        [*s5cmd, "s3://bench/peer/*", f"{back}/"],
                    ),
                    **copies(tree, back),
                },
            )
        hadoop = Hadoop(folder / "hadoop")
        with running(hadoop):
            os.environ.update(hadoop.environment, HADOOP_USER_NAME="root")
            for scheme, authority in (
                ("hdfs", hadoop.authority),
                ("webhdfs", hadoop.web_authority),
            ):
                place = f"{scheme}://{authority}/bench/"
                results += measure(scheme, options.rounds, folder, place.__add__, copies)
        report(results, options.json)


if __name__ == "__main__":
    main()
