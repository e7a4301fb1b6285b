"""The Ray runtime: the driver that starts a worker for each rank, and looks after them."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import CancelledError, CkptError, TemporaryError, UsageError, printable
from trainer.config import Config, RayConfig
from trainer.console import TrainerConsole
from trainer.optional import optional_module
from trainer.runtime.worker import Failure, Place, Worker, write_texts
from trainer.stopping import SIGNALS, StopRequest

_POLL = 0.2
"""Seconds between looks at what signals have left."""

_REACH_TIMEOUT = 5.0
"""Seconds to reach a cluster's head: Ray itself tries for minutes and says nothing."""

_OWN_CLUSTER_TIMEOUT = 20.0
"""Seconds to be given what a cluster that was started for this has, or does not have."""

_CAUSE_TIMEOUT = 10.0
"""Seconds for the rank that failed to say why, after another has missed it."""

_THREADS = 4
"""Of a worker: the training, its output, a stop, and one to spare."""

_OPTIONS = "they come from ray.address and ray.init"

_PASSED_ON = ("TERM", "COLORTERM", "NO_COLOR")
"""Variables that say how a terminal is written to."""


@dataclass(frozen=True)
class _Member:
    """A rank: its actor, and where it is."""

    rank: int
    actor: Any
    place: Place


def train(config: Config, *, notes: Sequence[str] = (), dry_run: bool = False) -> None:
    """Train on Ray actors, one a rank, and wait for them. This process needs no GPU.

    SIGTERM and SIGUSR1 are passed on: the workers save and end.

    Args:
        config: The configuration.
        notes: What is to be told first.
        dry_run: Build everything, train nothing.

    Raises:
        UsageError: Ray is not installed, or its options cannot be.
        TemporaryError: the cluster does not answer or has no room, or a worker was lost.
        CkptError: what a worker raised.
    """
    ray = optional_module("ray", "ray", "runtime=ray")
    cluster = _Cluster(ray, config)
    with _former_handlers():
        cluster.connect()
        try:
            stop = StopRequest(config.trainer)
            cluster.follow(cluster.start(stop), stop, notes, dry_run=dry_run)
        finally:
            cluster.leave()


class _Cluster:
    """Ray, and what this training has taken of it."""

    def __init__(self, ray: Any, config: Config) -> None:
        self._ray = ray
        self._config = config
        self._options: RayConfig = config.ray
        self._address = config.ray.address or os.environ.get("RAY_ADDRESS")
        self._group: Any = None
        self._actors: list[Any] = []

    # Joining

    def connect(self) -> None:
        """Join the cluster, or start one here."""
        defaults: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address is None:
            defaults["include_dashboard"] = False
        else:
            _require_reachable(self._address)
        try:
            self._ray.init(self._options.address, **{**defaults, **self._options.init})
        except (TypeError, ValueError) as e:
            raise UsageError(f"Ray refuses its options: {_first_line(e)}", hint=_OPTIONS) from e
        except (OSError, RuntimeError, self._ray.exceptions.RayError) as e:
            if "nknown keyword" in str(e):
                raise UsageError(f"Ray refuses its options: {_first_line(e)}", hint=_OPTIONS) from e
            raise TemporaryError(
                f"Ray does not start: {_first_line(e)}",
                hint="`ray status` tells whether a cluster runs, `ray stop` ends what is left of "
                "one here",
            ) from e
        except SystemExit as e:  # what Ray does when it cannot register with the cluster
            raise TemporaryError(
                f"Ray cannot register with the cluster at {self._address or 'this machine'}",
                hint="do its version and its token (RAY_AUTH_MODE) fit? `ray status` there",
            ) from e

    def start(self, stop: StopRequest) -> list[_Member]:
        """Place the actors, and learn where they are."""
        util = self._ray.util
        options, size = self._options, self._options.workers
        bundle = {"CPU": options.cpus_per_worker, "GPU": options.gpus_per_worker}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if not bundle:
            raise UsageError("ray.cpus_per_worker and ray.gpus_per_worker are both 0")
        limit = options.init_timeout
        if self._address is None:
            limit = min(limit, _OWN_CLUSTER_TIMEOUT)
        deadline = time.monotonic() + limit
        try:
            self._group = util.placement_group([bundle] * size, strategy=options.placement)
        except ValueError as error:
            raise UsageError(f"Ray refuses the workers: {_first_line(error)}") from error
        if not self._wait([self._group.ready()], deadline, stop):
            raise self._no_room()
        terminals = [n for n in ("stdout", "stderr") if getattr(sys, n).isatty()]
        self._actors = [
            self._ray.remote(Worker)
            .options(
                num_cpus=options.cpus_per_worker,
                num_gpus=options.gpus_per_worker,
                max_concurrency=_THREADS,
                scheduling_strategy=util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, rank
                ),
            )
            .remote(self._config, rank, size, terminals)
            for rank in range(size)
        ]
        places = [actor.place.remote() for actor in self._actors]
        if not self._wait(places, deadline, stop):
            raise TemporaryError(
                f"the workers have not started within {limit:g} s",
                hint="ray.init_timeout sets the limit; Ray's logs, in /tmp/ray/session_latest/logs "
                "on the nodes, tell what they wait for",
            )
        try:
            found = self._ray.get(places)
        except self._ray.exceptions.RayError as error:
            raise CkptError(
                f"a worker does not start: {_last_line(error)}",
                hint="is the same version of this package installed on every node?",
            ) from error
        return [
            _Member(rank, actor, place)
            for rank, (actor, place) in enumerate(zip(self._actors, found, strict=True))
        ]

    def _wait(self, refs: Sequence[Any], deadline: float, stop: StopRequest) -> bool:
        """Whether all are there in time. Raises :class:`CancelledError` when a stop comes."""
        while True:
            ready, _ = self._ray.wait(list(refs), num_returns=len(refs), timeout=_POLL)
            if len(ready) == len(refs):
                return True
            if stop.reason is not None:
                raise CancelledError(f"{stop.reason} before the workers had started")
            if time.monotonic() > deadline:
                return False

    def _no_room(self) -> TemporaryError:
        options, ray = self._options, self._ray
        total, free = ray.cluster_resources(), ray.available_resources()
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        return TemporaryError(
            f"the cluster has no room for {options.workers} workers with "
            f"{options.cpus_per_worker:g} CPUs and {options.gpus_per_worker:g} GPUs each "
            f"(ray.placement={options.placement}): it has {total.get('CPU', 0):g} CPUs and "
            f"{total.get('GPU', 0):g} GPUs on {nodes} nodes, of which {free.get('CPU', 0):g} CPUs "
            f"and {free.get('GPU', 0):g} GPUs are free",
            hint="ask for less (ray.workers, ray.cpus_per_worker, ray.gpus_per_worker), or wait "
            "longer for others to end (ray.init_timeout)",
        )

    # Training

    def follow(
        self, members: Sequence[_Member], stop: StopRequest, notes: Sequence[str], *, dry_run: bool
    ) -> None:
        """Let them train, show what they write, pass a stop on, and raise what went wrong."""
        ray = self._ray
        told = (members[0].place, os.getcwd(), _environment(), notes, dry_run)
        runs = {m.actor.run.remote(*told): m for m in members}
        texts = {m.actor.texts.remote(): m for m in members}
        failures: dict[int, Failure] = {}
        asked, deadline = False, float("inf")
        while (runs or texts) and time.monotonic() < deadline:
            ready, _ = ray.wait([*runs, *texts], timeout=_POLL)
            for ref in ready:
                if ref in texts:
                    self._show(ref, texts)
                    continue
                member = runs.pop(ref)
                failure = self._outcome(ref, member)
                if failure is not None:
                    failures[member.rank] = failure
                    known = not all(f.lost_others for f in failures.values())
                    deadline = time.monotonic() + (1.0 if known else _CAUSE_TIMEOUT)
            if stop.reason is not None and runs and not asked:
                asked = True
                told_to = [member.actor.stop.remote(stop.reason) for member in runs.values()]
                ray.wait(told_to, num_returns=len(told_to), timeout=_CAUSE_TIMEOUT)
                TrainerConsole().note(f"{stop.reason}: the workers have been told")
        if failures:
            raise _cause(failures, members)

    def _show(self, ref: Any, texts: dict[Any, _Member]) -> None:
        """Write out what a worker wrote, and ask for more."""
        member = texts.pop(ref)
        try:
            found = self._ray.get(ref)
        except self._ray.exceptions.RayError:
            return  # it is gone, and its run says so
        if found is not None:
            write_texts(found, {"stdout": sys.stdout, "stderr": sys.stderr})
            texts[member.actor.texts.remote()] = member

    def _outcome(self, ref: Any, member: _Member) -> Failure | None:
        try:
            outcome: Failure | None = self._ray.get(ref)
        except self._ray.exceptions.RayActorError:
            place = member.place
            error = TemporaryError(
                f"rank {member.rank} on {printable(place.node)} (process {place.pid}) is gone: it "
                "was killed, or it crashed",
                hint="the kernel's log on that node tells of a lack of memory, Ray's logs there of "
                "a crash; the same command again goes on from the newest checkpoint",
            )
            error.on_all_ranks = True  # the rank is named
            return Failure(error, lost_others=False)
        except self._ray.exceptions.RayError as error:
            return Failure(CkptError(f"Ray: {_last_line(error)}"), lost_others=False)
        return outcome

    # Leaving

    def leave(self) -> None:
        """End what still runs, and give everything back."""
        with suppress(self._ray.exceptions.RayError):
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()


def _cause(failures: Mapping[int, Failure], members: Sequence[_Member]) -> CkptError:
    """The failure that explains the others, with its rank and node."""
    rank = min(failures, key=lambda r: (failures[r].lost_others, r))
    error = failures[rank].error
    if error.on_all_ranks:
        return error
    told = copy.copy(error)
    told.args = (f"rank {rank} on {printable(members[rank].place.node)}: {error}",)
    return told


def _require_reachable(address: str) -> None:
    """Raises :class:`TemporaryError` when nothing answers at ``HOST:PORT``."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray looks for itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT).close()
    except OSError as error:
        raise TemporaryError(
            f"no Ray cluster answers at {printable(address)}: {error.strerror or error}",
            hint="ray.address and RAY_ADDRESS name it; `ray start --head` starts one there",
        ) from error


def _environment() -> dict[str, str]:
    """How the workers are to write for this terminal."""
    found = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**found, "COLUMNS": str(shutil.get_terminal_size().columns)}


@contextmanager
def _former_handlers() -> Iterator[None]:
    """Bring the signal handlers back that Ray and a training put others in place of."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(error).__name__)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[-1] if lines else type(error).__name__)
