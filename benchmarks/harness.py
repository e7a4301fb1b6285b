"""Timing things side by side: our figure, a peer's, and their ratio from the same run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Result:
    """One comparison.

    Attributes:
        name: What was measured.
        unit: ``GB/s`` (more is better), ``s`` or ``MB`` (less is better).
        ours: Median of the rounds.
        peers: Each peer's median, by name.
    """

    name: str
    unit: str
    ours: float
    peers: dict[str, float]

    def line(self) -> str:
        """For people."""
        text = f"{self.name:<34} {self.ours:9.3f} {self.unit:<5}"
        for peer, value in self.peers.items():
            text += f"   {peer} {value:.3f} ({self.ours / value:.2f}x)"
        return text


def alternate(rounds: int, *calls: Callable[[], float]) -> list[float]:
    """The median of each call, the calls taken in turn so that drift hits all of them alike."""
    values: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for found, call in zip(values, calls, strict=True):
            found.append(call())
    return [statistics.median(found) for found in values]


def seconds(command: Sequence[str | os.PathLike[str]]) -> float:
    """How long a command takes. It must succeed."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def peak_megabytes(command: Sequence[str | os.PathLike[str]]) -> float:
    """The most memory a command has resident, in MB.

    A child of ours would begin with *our* peak (Linux carries it over an exec), so a small process
    in between starts the command and tells its peak.
    """
    watcher = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    told = subprocess.run(
        [sys.executable, "-c", watcher, *command], check=True, capture_output=True, text=True
    )
    return int(told.stdout) / 1000


def drop_caches() -> bool:
    """Empty the page cache, where this process may; whether it could."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError:
        return False
    return True


def report(results: Sequence[Result], out: Path | None) -> None:
    """Print the results, and write them as JSON."""
    for result in results:
        print(result.line())
    if out is not None:
        out.write_text(json.dumps([asdict(r) for r in results], indent=2), encoding="utf-8")
        print(f"written to {out}", file=sys.stderr)
