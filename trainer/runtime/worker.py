"""A rank of a training as a Ray actor."""

from __future__ import annotations

import io
import logging
import os
import queue
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from ckptstore.errors import CkptError
from trainer.config import Config
from trainer.optional import optional_module
from trainer.stopping import StopRequest

_TOGETHER = 200
"""Pieces of output sent at once."""

Text = tuple[str, str]
"""``stdout`` or ``stderr``, and what was written there."""


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
        node: The host's name.
        address: Its IP address, as the cluster knows it.
        port: One that was free a moment ago.
        pid: The process.
    """

    node: str
    address: str
    port: int
    pid: int


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    Attributes:
        error: In words, with the exit code that belongs to it.
        lost_others: Whether all it says is that another rank is gone.
    """

    error: CkptError
    lost_others: bool


class Worker:
    """The actor. Its methods run in threads: what it writes and a stop go past the training.

    Args:
        config: The configuration.
        rank, size: Its number, and how many there are.
        terminals: Which of the driver's streams are terminals.
    """

    def __init__(self, config: Config, rank: int, size: int, terminals: Sequence[str]) -> None:
        self._config = config
        self._rank = rank
        self._size = size
        self._terminals = terminals
        self._texts: queue.SimpleQueue[Text | None] = queue.SimpleQueue()
        self._reason: str | None = None
        self._stop: StopRequest | None = None

    def place(self) -> Place:
        """Where it is."""
        ray = optional_module("ray", "ray", "runtime=ray")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return Place(socket.gethostname(), ray.util.get_node_ip_address(), port, os.getpid())

    def run(
        self,
        first: Place,
        directory: str,
        environment: Mapping[str, str],
        notes: Sequence[str],
        dry_run: bool,
    ) -> Failure | None:
        """Be a rank until training ends.

        Args:
            first: Where rank 0 is.
            directory: The driver's, where relative paths begin; it may be missing on this node.
            environment: Variables of the driver's that count here too.
            notes: What is to be told first.
            dry_run: Build everything, train nothing.

        Returns:
            What went wrong, if anything.
        """
        with suppress(OSError):
            os.chdir(directory)
        os.environ.update(environment)
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._size),
            LOCAL_RANK="0",  # of the devices that this actor sees, which are its own
            MASTER_ADDR=first.address,
            MASTER_PORT=str(first.port),
        )
        sys.stdout = _Stream("stdout", self._texts, "stdout" in self._terminals)
        sys.stderr = _Stream("stderr", self._texts, "stderr" in self._terminals)
        logging.basicConfig(
            format="%(levelname)s: %(message)s",
            level=logging.WARNING,
            stream=sys.stderr,
            force=True,
        )
        from trainer.comm import lost_others

        try:
            self._train(notes, dry_run=dry_run)
        except CkptError as error:
            return Failure(error, lost_others(error))
        except Exception as error:  # noqa: BLE001 - the driver tells it
            lost = lost_others(error)
            if not lost:
                traceback.print_exc()
            told = str(error).partition("\n")[0]
            return Failure(CkptError(f"{type(error).__name__}: {told}"), lost)
        finally:
            self._texts.put(None)
        return None

    def _train(self, notes: Sequence[str], *, dry_run: bool) -> None:
        from trainer.runtime import local

        self._stop = StopRequest(self._config.trainer)  # in a thread: no signal gets here
        self._stop.reason = self._stop.reason or self._reason
        local.train(self._config, notes=notes, dry_run=dry_run, stop=self._stop)

    def stop(self, reason: str) -> None:
        """Ask for a stop, as a signal does."""
        self._reason = reason
        if self._stop is not None:
            self._stop.reason = self._stop.reason or reason

    def texts(self) -> list[Text] | None:
        """What was written since, as soon as there is something; ``None`` is the end of it."""
        found = [self._texts.get()]
        while found[-1] is not None and len(found) < _TOGETHER and not self._texts.empty():
            found.append(self._texts.get())
        texts = [text for text in found if text is not None]
        if found[-1] is None:
            if not texts:
                return None
            self._texts.put(None)
        return texts


class _Stream(io.TextIOBase):
    """A stream of text that the driver writes out."""

    def __init__(self, name: str, texts: queue.SimpleQueue[Text | None], terminal: bool) -> None:
        super().__init__()
        self._name = name
        self._texts = texts
        self._terminal = terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def isatty(self) -> bool:
        return self._terminal

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._texts.put((self._name, text))
        return len(text)


def write_texts(texts: Sequence[Text], streams: Mapping[str, TextIO]) -> None:
    """Write on the driver what a worker wrote."""
    from trainer.console import write

    for name, text in texts:
        write(streams[name], text)
