"""Saving and loading a training state, beside torch.distributed.checkpoint and safetensors.

One process, CPU tensors, one local disk; ``make bench`` runs it. Each saver runs in processes of
its own, since what the first save costs (memory that the process does not have yet) comes once.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.harness import Result, alternate, drop_caches, report
from ckptstore.torch import Checkpointer

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

RUN = "bench"
STEADY = 3
"""Saves after the first one in a process."""


def make_state(size: float) -> dict[str, torch.Tensor]:
    """About ``size`` GB of float32 in 62 tensors, shaped as those of a small language model."""
    width = int(1536 * (size / 1.07) ** 0.5) // 16 * 16
    state = {"embedding": torch.empty(32_000 * width // 1536, width)}
    for layer in range(20):
        state[f"layers.{layer:02}.up"] = torch.empty(width, 2 * width)
        state[f"layers.{layer:02}.down"] = torch.empty(2 * width, width)
        state[f"layers.{layer:02}.norm"] = torch.empty(width)
    state["head"] = torch.empty(19_000 * width // 1536, width)
    for number, tensor in enumerate(state.values()):
        torch.arange(tensor.numel(), out=tensor.view(-1)).mul_(1.0 + number)
    return state


class Saver(ABC):
    """One way to save and load.

    Args:
        place: An empty directory.
    """

    def __init__(self, place: Path) -> None:
        self.place = place

    def prepare(self, state: dict[str, torch.Tensor]) -> None:
        """What a training loop can do before its first step."""
        del state

    def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """Save, durably."""
        self.begin(step, state)()

    @abstractmethod
    def begin(self, step: int, state: dict[str, torch.Tensor]) -> Callable[[], object]:
        """Begin a save in the background; what is returned waits for its end."""

    @abstractmethod
    def load(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """Load into ``state``, in place."""

    def remove(self, step: int) -> None:
        """Remove what a step saved."""
        shutil.rmtree(self.place / str(step), ignore_errors=True)

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of everything."""


class Ours(Saver):
    """Durable, with a digest of every block."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self._checkpointer = Checkpointer(str(place), RUN)

    def prepare(self, state: dict[str, torch.Tensor]) -> None:
        """See :class:`Saver`."""
        self._checkpointer.reserve({"model": state})

    def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """See :class:`Saver`."""
        self._checkpointer.save(step, {"model": state})

    def begin(self, step: int, state: dict[str, torch.Tensor]) -> Callable[[], object]:
        """See :class:`Saver`."""
        self._checkpointer.save(step, {"model": state}, wait=False)
        return self._checkpointer.wait

    def load(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """See :class:`Saver`."""
        self._checkpointer.load({"model": state}, self._checkpointer.store.get(RUN, step=step))

    def remove(self, step: int) -> None:
        """See :class:`Saver`."""
        store = self._checkpointer.store
        checkpoint = store.get(RUN, step=step)
        store.delete(checkpoint, grace=0, force=True)
        shutil.rmtree(checkpoint.path or "", ignore_errors=True)

    def close(self) -> None:
        """See :class:`Saver`."""
        self._checkpointer.close()


class Dcp(Saver):
    """torch.distributed.checkpoint with its default stager, two writing threads and fsync."""

    def _writer(self, step: int) -> Any:
        return dcp.FileSystemWriter(self.place / str(step), thread_count=2, sync_files=True)

    def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """See :class:`Saver`."""
        dcp.save({"model": state}, storage_writer=self._writer(step), no_dist=True)

    def begin(self, step: int, state: dict[str, torch.Tensor]) -> Callable[[], object]:
        """See :class:`Saver`."""
        future = dcp.async_save({"model": state}, storage_writer=self._writer(step), no_dist=True)
        wait: Callable[[], object] = future.result
        return wait

    def load(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """See :class:`Saver`."""
        reader = dcp.FileSystemReader(self.place / str(step))
        dcp.load({"model": state}, storage_reader=reader, no_dist=True)


class Safetensors(Saver):
    """One file, and an fsync; nothing is saved in the background."""

    def _path(self, step: int) -> Path:
        return self.place / str(step) / "model.safetensors"

    def begin(self, step: int, state: dict[str, torch.Tensor]) -> Callable[[], object]:
        """See :class:`Saver`."""
        path = self._path(step)
        path.parent.mkdir()
        save_file(state, path)
        with path.open("rb") as f:
            os.fsync(f.fileno())
        return lambda: None

    def load(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """See :class:`Saver`."""
        with safe_open(self._path(step), framework="pt") as f:
            for key, tensor in state.items():
                tensor.copy_(f.get_tensor(key))


SAVERS: dict[str, type[Saver]] = {"ours": Ours, "dcp": Dcp, "safetensors": Safetensors}


# What runs in a process of its own


def resident(kind: str) -> float:
    """Megabytes of this process: ``VmRSS`` now, or ``VmHWM`` since :func:`reset_peak`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(kind)


def reset_peak() -> None:
    """Begin a new peak."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def background(saver: Saver, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """The first save of a process, and those after it."""
    stalls, wholes = [], []
    for step in range(1 + STEADY):
        begun = time.perf_counter()
        wait = saver.begin(step, state)
        stalls.append(time.perf_counter() - begun)
        wait()
        wholes.append(time.perf_counter() - begun)
        saver.remove(step)
    return {
        "first": stalls[0],
        "steady": statistics.median(stalls[1:]),
        "durable": statistics.median(wholes[1:]),
    }


def prepared(saver: Saver, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """The first save after what can be prepared has been."""
    saver.prepare(state)
    begun = time.perf_counter()
    wait = saver.begin(0, state)
    stall = time.perf_counter() - begun
    wait()
    return {"first": stall}


def synchronous(saver: Saver, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """Saves that are waited for."""
    found = []
    for step in range(STEADY):
        found.append(seconds_of(lambda step=step: saver.save(step, state)))  # type: ignore[misc]
        saver.remove(step)
    return {"durable": statistics.median(found)}


def memory(saver: Saver, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """The most memory of 20 saves over that of the state, in shares of the state's size."""
    gc.collect()
    size = sum(t.nbytes for t in state.values()) / 1e6
    before = resident("VmRSS")
    peaks = []
    for step in range(20):
        reset_peak()
        saver.begin(step, state)()
        saver.remove(step)
        peaks.append((resident("VmHWM") - before) / size)
    return {"early": max(peaks[:3]), "late": max(peaks[3:])}


def beside_training(saver: Saver, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """How much longer a step of training takes while a save is written."""
    weights, data = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def steps(until: Callable[[], bool]) -> float:
        begun, count = time.perf_counter(), 0
        while not until() or count < 20:
            torch.mm(weights, data)
            count += 1
        return (time.perf_counter() - begun) / count

    saver.begin(0, state)()
    saver.remove(0)
    ratios = []
    for step in range(1, 1 + STEADY):
        ends = time.perf_counter() + 1.0
        alone = steps(lambda ends=ends: time.perf_counter() > ends)  # type: ignore[misc]
        waiter = threading.Thread(target=saver.begin(step, state))
        waiter.start()
        ratios.append(steps(lambda waiter=waiter: not waiter.is_alive()) / alone)  # type: ignore[misc]
        waiter.join()
        saver.remove(step)
    return {"slowdown": statistics.median(ratios)}


TASKS: dict[str, Callable[[Saver, dict[str, torch.Tensor]], dict[str, float]]] = {
    "background": background,
    "prepared": prepared,
    "synchronous": synchronous,
    "memory": memory,
    "beside": beside_training,
}


def child(task: str, saver: str, size: float, place: Path) -> None:
    """Do one task and print what it came to."""
    warnings.simplefilter("ignore")
    one = SAVERS[saver](place)
    print(json.dumps(TASKS[task](one, make_state(size))))
    one.close()


# What compares


class Bench:
    """Runs tasks in processes of their own.

    Args:
        work: Where to work.
        size: Of the state, in GB.
        rounds: How often, the savers taken in turn.
    """

    def __init__(self, work: Path, size: float, rounds: int) -> None:
        self._work = work
        self._size = size
        self._rounds = rounds

    def task(self, task: str, *savers: str, rounds: int = 0) -> dict[str, dict[str, float]]:
        """The medians of each saver."""
        found: dict[str, list[dict[str, float]]] = {saver: [] for saver in savers}
        for _ in range(rounds or self._rounds):
            for saver in savers:
                found[saver].append(self._once(task, saver))
                print(task, saver, found[saver][-1], file=sys.stderr, flush=True)
        return {
            saver: {key: statistics.median(one[key] for one in all_) for key in all_[0]}
            for saver, all_ in found.items()
        }

    def _once(self, task: str, saver: str) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=self._work) as place:
            own = [sys.executable, "-m", "benchmarks.torch_save", "--dir", place]
            what = ["--size", str(self._size), "--child", task, saver]
            told = subprocess.run([*own, *what], check=True, capture_output=True, text=True)
        result: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
        return result

    def saving(self) -> list[Result]:
        """Stalls, durable saves, memory, and what training notices of it."""
        apart = self.task("background", "ours", "dcp")
        ours, peer = apart["ours"], apart["dcp"]
        ready = self.task("prepared", "ours")["ours"]
        waited = self.task("synchronous", "ours", "dcp", "safetensors")
        held = self.task("memory", "ours", "dcp", rounds=1)  # the same in every round
        beside = self.task("beside", "ours", "dcp")
        others = {"dcp.save": waited["dcp"]["durable"]}
        others["safetensors + fsync"] = waited["safetensors"]["durable"]
        name = "dcp.async_save"
        return [
            Result("stall, first save", "s", ours["first"], {name: peer["first"]}),
            Result("  with reserve() at the start", "s", ready["first"], {name: peer["first"]}),
            Result("stall, later saves", "s", ours["steady"], {name: peer["steady"]}),
            Result("background save until durable", "s", ours["durable"], {name: peer["durable"]}),
            Result("save and wait", "s", waited["ours"]["durable"], others),
            Result("extra memory", "state", held["ours"]["early"], {name: held["dcp"]["early"]}),
            Result("  after 20 saves", "state", held["ours"]["late"], {name: held["dcp"]["late"]}),
            Result(
                "a training step beside a save",
                "times",
                beside["ours"]["slowdown"],
                {name: beside["dcp"]["slowdown"]},
            ),
        ]

    def loading(self) -> list[Result]:
        """Loading in place."""
        state = make_state(self._size)
        savers = {name: kind(self._work / name) for name, kind in SAVERS.items()}
        for name, saver in savers.items():
            (self._work / name).mkdir(exist_ok=True)
            saver.save(1, state)
        found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}

        def load(saver: Saver, *, cold: bool) -> float:
            if cold:
                drop_caches()
            return seconds_of(lambda: saver.load(1, found))

        for name, saver in savers.items():
            load(saver, cold=False)
            wrong = [key for key in state if not torch.equal(state[key], found[key])]
            assert not wrong, (name, wrong)
        results = []
        for cold in (False, True):
            if cold and not drop_caches():
                continue
            calls = [lambda s=s, cold=cold: load(s, cold=cold) for s in savers.values()]
            ours, *others = alternate(self._rounds, *calls)
            peers = dict(zip(["dcp.load", "safetensors"], others, strict=True))
            name = f"load in place (verified), {'cold' if cold else 'warm'}"
            results.append(Result(name, "s", ours, peers))
        for saver in savers.values():
            saver.close()
        return results


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1.07, help="GB of state (default 1.07)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--child", nargs=2, metavar=("TASK", "SAVER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        task, saver = given.child
        child(task, saver, given.size, given.dir)
        return
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=given.dir) as place:
        bench = Bench(Path(place), given.size, given.rounds)
        report([*bench.saving(), *bench.loading()], given.json)


if __name__ == "__main__":
    main()
