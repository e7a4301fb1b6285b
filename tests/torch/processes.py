"""Running a function in several processes that are ranks of one group.

The processes are forked from a server that has imported torch once: a new one costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "ckptstore.torch",
        "tests.torch.support",
        "tests.torch.processes",
    ]
)


@dataclass
class Ended:
    """How a rank ended.

    Attributes:
        value: What its function returned.
        error: What it raised, as ``Type: text``.
        seconds: How long it took.
    """

    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 90.0
) -> list[Ended | None]:
    """Call ``function(*args)`` on ``size`` ranks of a gloo group.

    Returns:
        How each ended; ``None`` for one that was killed.
    """
    with tempfile.TemporaryDirectory() as place:
        pipes: list[Connection] = []
        workers = []
        for rank in range(size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            worker = _CONTEXT.Process(
                target=_work, args=(sender, f"{place}/group", rank, size, function, args)
            )
            worker.start()
            sender.close()
            pipes.append(receiver)
            workers.append(worker)
        try:
            ended = _collect(pipes, time.monotonic() + timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        return ended


def _collect(pipes: list[Connection], deadline: float) -> list[Ended | None]:
    ended: list[Ended | None] = [None] * len(pipes)
    left = dict(enumerate(pipes))
    while left:
        ready = wait(list(left.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(left)} have not ended in time")
        for rank, pipe in list(left.items()):
            if pipe in ready:
                try:
                    ended[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:  # it was killed
                    ended[rank] = None
                del left[rank]
    return ended


def values(ended: list[Ended | None]) -> list[Any]:
    """What the ranks returned; none may have failed."""
    failed = {r: "killed" if e is None else e.error for r, e in enumerate(ended)}
    problems = {rank: error for rank, error in failed.items() if error is not None}
    assert not problems, "\n".join(f"rank {rank}: {error}" for rank, error in problems.items())
    return [e.value for e in ended if e is not None]


def _work(
    pipe: Connection,
    meeting: str,
    rank: int,
    size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    begun = time.monotonic()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        outcome = Ended(function(*args))
    except BaseException as error:  # noqa: BLE001 - told to the parent
        text = f"{type(error).__name__}: {error}"
        if not hasattr(error, "hint"):
            text += "\n" + traceback.format_exc()
        outcome = Ended(error=text)
    outcome.seconds = time.monotonic() - begun
    pipe.send_bytes(pickle.dumps(outcome))  # torch's own pickler would share memory that ends now
    pipe.close()
    os.kill(os.getpid(), signal.SIGKILL)  # no waiting for others at the end
