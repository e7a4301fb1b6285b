"""Running trainings as processes of their own, and what they leave."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptstore.reading import Checkpoint
from ckptstore.store import Store, open_store

ROOT = Path(__file__).parents[2]
PATIENCE = 150.0
"""Seconds after which something that did not happen is a failure."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "400",
    "RAY_AUTH_MODE": "disabled",  # else it writes a file with a token
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",  # it is read when vLLM is imported, which a starter does early
}

REWARDS = '''
import os
import random
import signal
import time

import numpy as np
import torch

calls = 0


def noisy(prompt, response, answer):
    """Draws from every generator there is."""
    gate(prompt, response, answer)
    digits = sum(c.isdigit() for c in response)
    return digits + random.random() + float(np.random.rand()) + float(torch.rand(()))


def gate(prompt, response, answer):
    """At the call that GATE names it says that it is there, and waits to be let through."""
    global calls
    number, _, word = os.environ.get("GATE", "0:").partition(":")
    calls += word in prompt
    if int(number) and calls == int(number) and word in prompt:
        open("reached", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    return float(len(response))


step = torch.optim.AdamW.step
updates = 0


def signalling_step(self, *args, **kwargs):
    """At the update that SIGNAL_AT_UPDATE names it asks its own process to end."""
    global updates
    updates += 1
    number, _, name = os.environ.get("SIGNAL_AT_UPDATE", "0:").partition(":")
    if updates == int(number):
        os.kill(os.getpid(), getattr(signal, name))
    return step(self, *args, **kwargs)


torch.optim.AdamW.step = signalling_step
'''


def until(condition: Callable[[], object], what: str, pause: float = 0.005) -> None:
    """Wait for something to happen."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(pause)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def rank_variables(count: int) -> list[dict[str, str]]:
    """What torchrun tells each of its processes."""
    common = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@dataclass
class Ended:
    """How a training ended: its exit code (negative: the signal), and what it wrote."""

    code: int
    text: str

    def ok(self, *words: str) -> Ended:
        """It went well, and said this."""
        return self.failed(0, *words)

    def failed(self, code: int, *words: str) -> Ended:
        """It ended with this exit code, and said this, without a traceback."""
        assert self.code == code, f"exit code {self.code}:\n{self.text}"
        assert "Traceback" not in self.text, self.text
        flat = " ".join(self.text.split())
        for word in words:
            assert word in flat, f"no {word!r} in:\n{self.text}"
        return self


def needs(package: str) -> pytest.MarkDecorator:
    """Skips tests where a package is missing, unless CKPT_REQUIRE_TOOLS says that all must run."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(
        missing and os.environ.get("CKPT_REQUIRE_TOOLS") != "1", reason=f"{package} is missing"
    )


class Starter:
    """Starts trainings by forking a process that has imported everything already.

    Args:
        modules: What it imports besides.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.starter", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
        )
        self._lock = threading.Lock()
        self._running: dict[int, Running] = {}

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request and take the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(
        self,
        arguments: list[str],
        directory: Path,
        env: Mapping[str, str],
        entry: str = "trainer.__main__:main",
    ) -> Running:
        """Start a training, or another function of arguments that gives an exit code."""
        output = directory / f"output-{time.monotonic_ns()}.txt"
        pid = self.ask(
            {
                "start": {
                    "arguments": arguments,
                    "directory": str(directory),
                    "env": dict(env),
                    "output": str(output),
                    "entry": entry,
                }
            }
        )
        running = self._running[pid] = Running(self, pid, output)
        return running

    def close(self) -> None:
        """End whatever still runs."""
        for running in self._running.values():
            running.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


@dataclass
class Running:
    """A training that has been started."""

    starter: Starter
    pid: int
    output: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; ``None`` while it runs."""
        if self.code is None:
            self.code = self.starter.ask({"poll": self.pid})
        return self.code

    @property
    def text(self) -> str:
        """What it has written."""
        return self.output.read_text() if self.output.exists() else ""

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Wait for its end."""
        until(lambda: self.poll() is not None, f"the end of a training:\n{self.text}")
        assert self.code is not None
        return Ended(self.code, self.text)

    def kill(self) -> Ended:
        """SIGKILL."""
        self.send(signal.SIGKILL)
        return self.wait()

    def says(self, words: str) -> None:
        """Wait until it has written this."""
        until(lambda: words in self.text or self.poll() is not None, words)
        assert words in self.text, self.text


@dataclass
class Lab:
    """What all trainings of a test session share."""

    starter: Starter
    model: Path
    data: Path
    few: Path
    rewards: Path

    def base(self) -> list[str]:
        """A configuration whose steps take a tenth of a second."""
        return [
            f"model.path={self.model}",
            f"data.train_files=[{self.data}]",
            "data.batch_size=12",
            "data.max_prompt_length=32",
            "rollout.max_new_tokens=4",
            "actor.optim.lr=1e-3",
            "critic.optim.lr=1e-3",
            "reward.function=digits",
            "storage.uri=store",
            "storage.run=run",
            "trainer.total_steps=12",
            "trainer.save_freq=5",
            "trainer.log_digest=true",
        ]


@dataclass
class Training:
    """A directory in which a training runs, life after life.

    Attributes:
        directory: Its working directory.
        settings: What all its lives have in common, beside :meth:`Lab.base`.
        place: Where its store is, when that is not in its directory.
    """

    lab: Lab
    directory: Path
    settings: list[str] = field(default_factory=list)
    place: Path | str | None = None

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)

    def arguments(self, *settings: str) -> list[str]:
        """The command line of a life."""
        return [*self.lab.base(), *self.settings, *settings]

    def start(
        self, *settings: str, env: Mapping[str, str] | None = None, directory: Path | None = None
    ) -> Running:
        """Start a life, in its own directory unless another one is given."""
        arguments = self.arguments(*settings)
        return self.lab.starter.start(arguments, directory or self.directory, env or {})

    def run(self, *settings: str, env: Mapping[str, str] | None = None) -> Ended:
        """A whole life."""
        return self.start(*settings, env=env).wait()

    def start_ranks(self, count: int, *settings: str) -> list[Running]:
        """Start a life of several processes, with the variables that torchrun sets."""
        return [self.start(*settings, env=env) for env in rank_variables(count)]

    def run_ranks(self, count: int, *settings: str) -> list[Ended]:
        """A whole life of several processes."""
        return [running.wait() for running in self.start_ranks(count, *settings)]

    def killed(self, after: int, pause: float, *settings: str) -> None:
        """A life that is killed some time after a step was logged."""
        running = self.start(*settings)
        self.wait_for_step(after, running)
        time.sleep(pause)
        assert running.kill().code == -signal.SIGKILL, running.text

    def wait_for_step(self, step: int, *running: Running) -> None:
        """Wait until a step is in the metrics, written by a life that still runs."""

        def there() -> bool:
            assert all(r.poll() is None for r in running), running[0].text
            return any(line["step"] >= step for line in self.lines())

        until(there, f"step {step}")

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.directory / "logs" / "run" / "metrics.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the metrics file that are whole."""
        if not self.metrics.exists():
            return []
        whole = self.metrics.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.split("\n") if line]

    def facts(self, *without: str) -> list[dict[str, Any]]:
        """The lines, but for what no two runs have in common."""
        skipped = ("time/", *without)
        return [
            {k: v for k, v in line.items() if k != "life" and not k.startswith(skipped)}
            for line in self.lines()
        ]

    @property
    def store(self) -> Store:
        """The store."""
        return open_store(str(self.place or self.directory / "store"))

    def commits(self, run: str = "run") -> list[Checkpoint]:
        """Its checkpoints, oldest first."""
        return sorted(self.store.list(run), key=lambda c: c.seq)

    def steps(self, run: str = "run") -> list[int]:
        """The steps of its checkpoints, oldest first."""
        return [c.step for c in self.commits(run)]

    def stored(self) -> dict[str, str]:
        """What the newest checkpoint holds, by digests, but for what no two runs have in common."""
        newest = self.commits()[-1]
        return {e.path: str(e.digest) for e in newest.files if e.path != "trainer_state.json"}

    def same_as(self, other: Training, steps: int) -> None:
        """This training and another one are equal to the last bit."""
        assert [line["step"] for line in self.lines()] == list(range(1, steps + 1))
        for ours, theirs in zip(self.facts(), other.facts(), strict=True):
            assert ours == theirs
        assert self.stored() == other.stored()


def unfinished_save(training: Training, run: str = "run") -> bool:
    """Whether a save is under way: it has a lease and a directory, and no record."""
    root = training.directory / "store" / run
    for lease in sorted((root / "leases").glob("*-step-*")):
        name = lease.name.partition(".")[0]
        if (root / name).is_dir() and not (root / "commits" / f"{name}.json").exists():
            return True
    return False


def stop_in_a_save(training: Training, running: Running) -> None:
    """SIGSTOP a training while it saves."""
    deadline = time.monotonic() + PATIENCE
    while running.poll() is None and time.monotonic() < deadline:
        if unfinished_save(training):
            running.send(signal.SIGSTOP)
            if unfinished_save(training):
                return
            running.send(signal.SIGCONT)
        time.sleep(0.0005)
    raise AssertionError(f"it was never caught in a save:\n{running.text}")


def chances(seed: int) -> random.Random:
    """Chance that is the same each time."""
    return random.Random(seed)
