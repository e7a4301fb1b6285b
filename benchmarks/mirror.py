"""What a mirror does to the training beside it: ``make bench-mirror``, or ``-m benchmarks.mirror``.

The same training without a mirror, with one on the local disk, and with mirrors in trouble for the
whole run: down (nobody listens), denied (403 for everything), slow (1 MB/s) and full (5 MB; needs
root, and is left out without). One after the other on one machine, in several rounds, each ratio
being one to the training without a mirror of the same round. After the last round the trouble is
over, and catching up is timed. The training and the S3 server (SeaweedFS) share the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

from ckptstore import open_store
from ckptstore.maintenance.mirror import mirror
from tests.servers.process import free_port
from tests.servers.s3 import client
from tests.servers.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedFS
from trainer.make_data import ensure_data
from trainer.make_model import byte_tokenizer
from trainer.optional import optional_module

RUN = "bench"
SLOW = 1_000_000
"""Bytes a second."""
SMALL = "5m"
"""The size of the full file system; a checkpoint has more."""
SAVE_EVERY = 8
PATIENCE = 120.0
"""Seconds for what must happen after a training has ended."""


# Servers in trouble


class Door:
    """Passes connections on to a port of this machine.

    Args:
        upstream: That port.
        port: Where it listens.
        rate: Bytes a second that it lets in, over all connections; ``None``: any. It may change.
    """

    def __init__(self, upstream: int, port: int, rate: float | None = None) -> None:
        self.rate = rate
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._lock = threading.Lock()
        self._free_at = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                host = socket.create_connection(("127.0.0.1", self._upstream))
                for ends in ((guest, host, True), (host, guest, False)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, limited: bool) -> None:
        with suppress(OSError):
            while data := source.recv(16384):
                if limited:
                    self._wait_for(len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _wait_for(self, count: int) -> None:
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self.rate
        time.sleep(self._free_at - now)


class Refusing(BaseHTTPRequestHandler):
    """Answers every request with 403 AccessDenied."""

    protocol_version = "HTTP/1.1"

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _refuse  # noqa: N815 - the base's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing."""


# Mirrors


@dataclass
class Mirror:
    """A mirror as a training meets it.

    Attributes:
        uri: Of its store; ``None``: there is no mirror.
        heal: Ends its trouble.
    """

    uri: str | None
    heal: Callable[[], None] = lambda: None


@contextmanager
def no_mirror(server: SeaweedFS, place: Path) -> Iterator[Mirror]:
    """Nothing to mirror to."""
    del server, place
    yield Mirror(None)


@contextmanager
def well(server: SeaweedFS, place: Path) -> Iterator[Mirror]:
    """A mirror on the same disk."""
    del server
    yield Mirror(str(place / "mirror"))


def _behind(port: int, place: Path) -> str:
    return f"s3://bench/{place.name}?endpoint_url=http://127.0.0.1:{port}"


@contextmanager
def down(server: SeaweedFS, place: Path) -> Iterator[Mirror]:
    """An S3 endpoint where nobody listens."""
    port = free_port()
    with ExitStack() as stack:

        def heal() -> None:
            stack.callback(Door(server.port("s3"), port).close)

        yield Mirror(_behind(port, place), heal)


@contextmanager
def denied(server: SeaweedFS, place: Path) -> Iterator[Mirror]:
    """An S3 endpoint that forbids everything."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    with ExitStack() as stack:
        stack.callback(http.server_close)

        def heal() -> None:
            http.shutdown()
            http.server_close()
            stack.callback(Door(server.port("s3"), http.server_port).close)

        yield Mirror(_behind(http.server_port, place), heal)


@contextmanager
def slow(server: SeaweedFS, place: Path) -> Iterator[Mirror]:
    """An S3 endpoint that takes 1 MB/s."""
    port = free_port()
    door = Door(server.port("s3"), port, SLOW)

    def heal() -> None:
        door.rate = None

    yield Mirror(_behind(port, place), heal)
    door.close()


@contextmanager
def full(server: SeaweedFS, place: Path) -> Iterator[Mirror]:
    """A file system that has no room for a checkpoint."""
    del server
    point = place / "small"
    point.mkdir()
    _mount(f"size={SMALL}", point)
    try:
        yield Mirror(str(point / "mirror"), lambda: _mount("remount,size=4g", point))
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)


def _mount(options: str, point: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "bench", point], check=True)


MIRRORS = {
    "no mirror": no_mirror,
    "well": well,
    "down": down,
    "denied": denied,
    "slow": slow,
    "full": full,
}


# Trainings


@dataclass
class Seen:
    """What one training came to.

    Attributes:
        plain: Seconds of each step after which nothing was saved.
        saving: Of the others, with what the save holds up.
        whole: Seconds a step over all of the training but its first step.
        said: Warnings that the mirror is in trouble.
        stored: Checkpoints.
        lacking: Of these, what the mirror had not when its process had ended after the training.
        caught_up: Seconds until it had all; ``None`` where that was not tried.
        megabytes: Of a checkpoint.
    """

    plain: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    whole: float = 0.0
    said: int = 0
    stored: int = 0
    lacking: int = 0
    caught_up: float | None = None
    megabytes: float = 0.0


class Bench:
    """Runs trainings with mirrors.

    Args:
        work: An empty directory.
        server: An S3 server that runs.
        steps: Of each training.
        threads: That PyTorch may use.
    """

    def __init__(self, work: Path, server: SeaweedFS, steps: int, threads: int) -> None:
        self._work = work
        self._server = server
        self._steps = steps
        self._threads = threads
        self._model = make_model(work / "model")
        self._data = ensure_data("digits", work / "data")

    def once(self, kind: str, number: int, *, heal: bool) -> Seen:
        """One training with one kind of mirror; its files are removed."""
        place = self._work / f"{kind.replace(' ', '-')}-{number}"
        place.mkdir()
        with MIRRORS[kind](self._server, place) as made:
            seen = self._train(place, made)
            if made.uri is not None:
                made.heal()
                wait_for_the_process(place)
                seen.lacking = seen.stored - stored(made.uri)
                if heal:
                    seen.caught_up = catch_up(str(place / "store"), made.uri)
                    assert stored(made.uri) == seen.stored, kind
        shutil.rmtree(place)
        return seen

    def _train(self, place: Path, made: Mirror) -> Seen:
        settings = [
            f"model.path={self._model}",
            f"data.train_files=[{self._data}]",
            "data.batch_size=16",
            "data.max_prompt_length=32",
            "rollout.max_new_tokens=8",
            "reward.function=digits",
            f"storage.uri={place / 'store'}",
            f"storage.run={RUN}",
            "storage.mirror_on_exit=false",
            f"storage.mirrors={json.dumps([made.uri] if made.uri else [])}",
            f"trainer.log_dir={place / 'logs'}",
            f"trainer.total_steps={self._steps}",
            f"trainer.save_freq={SAVE_EVERY}",
        ]
        seen, times = Seen(), []
        with open(place / "errors", "w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer", *settings],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads), "COLUMNS": "400"},
            )
            assert process.stdout is not None
            times = [time.perf_counter() for line in process.stdout if line.startswith("step ")]
            code = process.wait()
            process.stdout.close()
            errors.seek(0)
            told = errors.read()
        if code != 0 or len(times) != self._steps:
            sys.exit(f"a training failed (exit code {code}):\n{told}")
        for step, (before, now) in enumerate(pairwise(times), start=1):
            (seen.plain if step % SAVE_EVERY else seen.saving).append(now - before)
        seen.whole = (times[-1] - times[0]) / (len(times) - 1)
        seen.said = told.count(" is behind: ")
        found = open_store(str(place / "store")).list(RUN)
        seen.stored = len(found)
        seen.megabytes = found[0].commit.size / 1e6
        return seen


def make_model(place: Path) -> Path:
    """A Qwen2 of 1.4 million parameters with random weights."""
    transformers = optional_module("transformers", "transformers", "making a model")
    tokenizer = byte_tokenizer()
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def stored(uri: str) -> int:
    """How many checkpoints a mirror has."""
    store = open_store(uri)
    return len(store.list(RUN)) if store.exists and store.runs() else 0


def wait_for_the_process(place: Path) -> None:
    """Wait until the process that mirrors has ended: it would be in the next training's way."""
    ends = time.monotonic() + PATIENCE
    while _is_mirroring(place):
        if time.monotonic() > ends:
            sys.exit(f"the process that mirrors {place} does not end")
        time.sleep(0.05)


def _is_mirroring(place: Path) -> bool:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if str(place / "logs").encode() in (process / "cmdline").read_bytes():
                    return True
    return False


def catch_up(source: str, target: str) -> float:
    """How long a mirror takes until it has all, in seconds."""
    begun = time.perf_counter()
    result = mirror(open_store(source), open_store(target))
    if not result.ok:
        sys.exit(f"{target} does not catch up: {result.failure or result.skipped}")
    return time.perf_counter() - begun


# What compares


@dataclass
class Row:
    """A kind of mirror over all rounds; ratios are to the training without one of the same round.

    Attributes:
        kind: Which.
        step, saving: Medians in seconds, without and with a save.
        step_ratio, saving_ratio, whole_ratio: Medians over the rounds.
        stored, lacking, said, caught_up: See :class:`Seen`; the last round's.
    """

    kind: str
    step: float
    step_ratio: float
    saving: float
    saving_ratio: float
    whole_ratio: float
    stored: int
    lacking: int
    said: int
    caught_up: float | None

    def line(self) -> str:
        """For people."""
        late = "" if self.caught_up is None else f"{self.caught_up:8.1f} s"
        return (
            f"{self.kind:<10} {self.step:7.3f} s {self.step_ratio:6.3f} {self.saving:9.3f} s "
            f"{self.saving_ratio:6.3f} {self.whole_ratio:8.3f} {self.stored:7} {self.lacking:8} "
            f"{self.said:5} {late}"
        )


HEAD = (
    f"{'mirror':<10} {'step':>9} {'ratio':>6} {'with save':>11} {'ratio':>6} {'overall':>8} "
    f"{'stored':>7} {'lacking':>8} {'said':>5}  caught up"
)


def compare(rounds: dict[str, list[Seen]]) -> list[Row]:
    """The rows of the table."""
    alone = rounds["no mirror"]
    rows = []
    for kind, found in rounds.items():

        def ratio(value: Callable[[Seen], float], found: list[Seen] = found) -> float:
            return statistics.median(value(s) / value(a) for s, a in zip(found, alone, strict=True))

        last = found[-1]
        rows.append(
            Row(
                kind,
                statistics.median(t for s in found for t in s.plain),
                ratio(lambda s: statistics.median(s.plain)),
                statistics.median(t for s in found for t in s.saving),
                ratio(lambda s: statistics.median(s.saving)),
                ratio(lambda s: s.whole),
                min(s.stored for s in found),
                max(s.lacking for s in found),
                max(s.said for s in found),
                last.caught_up,
            )
        )
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=36, help="of each training (default 36)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default 1)")
    parser.add_argument("--only", help="kinds of mirrors, beside none: down,slow")
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    given = parser.parse_args()
    kinds = [k for k in MIRRORS if k == "no mirror" or k in (given.only or ",".join(MIRRORS))]
    if os.geteuid() != 0 and "full" in kinds:
        print("a full mirror is left out: it needs root", file=sys.stderr)
        kinds.remove("full")
    reason = SeaweedFS.missing()
    if reason is not None:
        sys.exit(reason)
    os.environ.update(
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
        HF_HUB_OFFLINE="1",
    )
    rounds: dict[str, list[Seen]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        server = SeaweedFS(Path(name, "weed"))
        server.start()
        try:
            client(server).call_s3("create_bucket", Bucket="bench")
            bench = Bench(Path(name), server, given.steps, given.threads)
            bench.once("no mirror", -1, heal=False)  # what comes from the disk only once
            for number in range(given.rounds):
                for kind in kinds if number % 2 == 0 else reversed(kinds):
                    seen = bench.once(kind, number, heal=number == given.rounds - 1)
                    rounds[kind].append(seen)
                    print(f"round {number + 1}: {kind}: {seen}", file=sys.stderr, flush=True)
        finally:
            server.kill()
    rows = compare({kind: rounds[kind] for kind in kinds})
    size = rounds["no mirror"][0].megabytes
    print(f"{given.steps} steps, a checkpoint of {size:.0f} MB every {SAVE_EVERY}")
    print(HEAD)
    for row in rows:
        print(row.line())
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(r) for r in rows], indent=2), encoding="utf-8")
        print(f"written to {given.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
