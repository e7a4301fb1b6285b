"""Killing a process at a storage operation of one's choice, for crash tests.

Two granularities: the operations of the backend protocol, and, on a file system, every system call
that changes something (the backend's own steps: the temporary file, its fsync, the link, …).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ckptstore.errors import CkptError
from ckptstore.testing.hooks import Phase

CHANGING_CALLS = (
    "mkdir",
    "open",
    "pwrite",
    "write",
    "ftruncate",
    "fsync",
    "link",
    "symlink",
    "rename",
    "unlink",
    "rmdir",
)
"""Names in ``os`` that change a file system (``open`` only when it creates)."""


class Countdown:
    """Sends a signal to this process when it has counted to zero.

    Args:
        count: How many operations are still let through; negative never ends.
        number: The signal.
    """

    def __init__(self, count: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.left = count
        self.number = number

    def tick(self) -> None:
        """One operation is about to happen (or has)."""
        if self.left == 0:
            self.left = -1
            os.kill(os.getpid(), self.number)
        self.left -= 1

    def hook(self, operation: str, key: str, phase: Phase) -> None:
        """A hook for :class:`HookedBackend` that counts both phases of each operation."""
        del operation, key, phase
        self.tick()

    def install(self) -> None:
        """Count every changing system call of this process from now on.

        For a child process only: it replaces functions of ``os`` and never puts them back.
        """
        for name in CHANGING_CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            creates = name != "open" or (len(args) > 1 and args[1] & os.O_CREAT)
            if creates:
                self.tick()
            return call(*args, **kwargs)

        return counted


def start_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child; returns its process id.

    The child ends without unwinding into the caller: with 0 when ``work`` returned, with the exit
    code of the error when it raised one of ours, else with a traceback and 1.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except CkptError as error:
            code = error.exit_code
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        except BaseException:  # noqa: BLE001 - it is printed, and the process ends
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def run_in_child(work: Callable[[], object]) -> int:
    """:func:`start_child`, and wait for its end; returns the wait status."""
    return os.waitpid(start_child(work), 0)[1]
