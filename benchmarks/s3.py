"""Up and down between a local file and S3, beside s5cmd and s3fs: ``python -m benchmarks.s3``.

Measured against a server without storage (``null_s3``), as fast as it goes and with 80 MB/s a
connection and 30 ms an answer: so the client is what is measured. Ours hashes every block and
compares it when it comes down; the others do not. Python's own start (ours and that of s3fs, under
a second) is not counted. ``benchmarks.storage`` has whole pushes on real servers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Result, alternate, peak_megabytes, report

BIN = Path(sys.executable).parent
SIZE = 512 * 1024 * 1024
KEYS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

OURS = """
import sys, time
from functools import partial
from ckptstore.backends.localfile import LocalReader, LocalWriter
from ckptstore.backends.s3 import S3Backend
from ckptstore.hashing import BLOCK_SIZE, block_count, zero_block_digest
from ckptstore.manifest import FileEntry
from ckptstore.transfer import Mover, Transfer
from ckptstore.uri import StoreURI
import os
direction, path, uri, size = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
backend = S3Backend.from_uri(StoreURI.parse(uri))
mover = Mover(threads=backend.capabilities.threads)
backend.client.require_bucket(); begun = time.perf_counter()
if direction == "up":
    mover.run([Transfer("x", size, partial(LocalReader, path),
                        lambda: backend.open_writer("x", size=size))])
else:
    entry = FileEntry.build("x", size, [zero_block_digest()] * block_count(size))
    mover.run([Transfer("x", size, lambda: backend.open_reader("x"),
                        lambda: LocalWriter(path), expected=entry)])
print(time.perf_counter() - begun)
"""
S3FS = """
import sys, time, s3fs
direction, path, endpoint = sys.argv[1:4]
fs = s3fs.S3FileSystem(endpoint_url=endpoint,
                       config_kwargs={"s3": {"addressing_style": "path"}})
fs.exists("bucket"); begun = time.perf_counter()
fs.put_file(path, "bucket/x") if direction == "up" else fs.get_file("bucket/x", path)
print(time.perf_counter() - begun)
"""


@contextmanager
def null_server(*options: str) -> Iterator[str]:
    """The URL of a server without storage."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.null_s3", *options], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def told_seconds(command: list[str]) -> float:
    """How long a command says it took; else how long it took."""
    begun = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    took = time.perf_counter() - begun
    return float(done.stdout) if command[0] == sys.executable else took


def commands(direction: str, path: Path, endpoint: str) -> dict[str, list[str]]:
    """One transfer of each client."""
    uri = f"s3://bucket/?endpoint_url={endpoint}"
    s5cmd = [str(BIN / "s5cmd"), "--endpoint-url", endpoint, "cp"]
    remote, local = "s3://bucket/x", str(path)
    return {
        "ours": [sys.executable, "-c", OURS, direction, local, uri, str(SIZE)],
        "s5cmd": [*s5cmd, *((local, remote) if direction == "up" else (remote, local))],
        "s3fs": [sys.executable, "-c", S3FS, direction, local, endpoint],
    }


def null(rounds: int, folder: Path, name: str, *options: str) -> list[Result]:
    """MB/s up and down, and memory, against a server without storage."""
    results = []
    with null_server(*options) as endpoint:
        for direction in ("up", "down"):
            path = folder / direction
            if direction == "up":
                path.write_bytes(os.urandom(SIZE))
            clients = commands(direction, path, endpoint)

            def timed(command: list[str], path: Path = path, up: bool = direction == "up") -> float:
                if not up:
                    path.unlink(missing_ok=True)
                return SIZE / 1e6 / told_seconds(command)

            ours, s5cmd, s3fs = alternate(
                rounds,
                *(lambda c=c: timed(c) for c in clients.values()),
            )
            results.append(
                Result(f"{name} {direction}", "MB/s", ours, {"s5cmd": s5cmd, "s3fs": s3fs})
            )
            path.unlink(missing_ok=True)
            if direction == "up":
                path.write_bytes(os.urandom(SIZE))
            memory = {who: peak_megabytes(command) for who, command in clients.items()}
            results.append(Result(f"{name} {direction}, memory", "MB", memory.pop("ours"), memory))
            path.unlink(missing_ok=True)
    return results


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        results = []
        os.environ.update(KEYS)
        results += null(options.rounds, folder, "null server")
        results += null(
            options.rounds, folder, "80 MB/s", "--connection-mb", "80", "--delay-ms", "30"
        )
        report(results, options.json)


if __name__ == "__main__":
    main()
