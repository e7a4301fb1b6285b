"""A mirror beside a program that saves: a process of its own that can neither slow nor fail it.

The process has the lowest priority. It ends by itself: its standard input is a pipe that only the
program holds, and when that is closed (by the program's end, however it ended, SIGKILL included)
the process copies what is lacking then, and ends.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from ckptstore.errors import translate_os_errors
from ckptstore.maintenance.mirror.following import Follower
from ckptstore.maintenance.mirror.how import How
from ckptstore.maintenance.mirror.statusfile import MirrorStates, StatusFile, read_states
from ckptstore.store import open_store


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told, as JSON in its first argument.

    Attributes:
        source: URI of the store to copy from.
        targets: URIs of the stores to copy to.
        runs: Patterns of the runs.
        interval: Seconds between passes.
        status: The status file.
    """

    source: str
    targets: tuple[str, ...]
    runs: tuple[str, ...]
    interval: float
    status: str


class MirrorBeside:
    """Keeps mirrors in step from a process of its own, newest checkpoints first.

    Args:
        source: URI of the store to copy from.
        targets: URIs of the stores to copy to.
        directory: Where ``mirror.json`` (the state of each mirror) and ``mirror.log`` are kept.
        runs: Patterns of the runs; none is all.
        interval: Seconds between passes that :meth:`wake` does not ask for.

    Raises:
        CkptError: the process could not be started.
    """

    def __init__(
        self,
        source: str,
        targets: Sequence[str],
        directory: str | os.PathLike[str],
        *,
        runs: Sequence[str] = (),
        interval: float = 60.0,
    ) -> None:
        self.log = Path(directory, "mirror.log")
        self._status = Path(directory, "mirror.json")
        self._order = Order(
            source=source,
            targets=tuple(targets),
            runs=tuple(runs),
            interval=interval,
            status=str(self._status),
        )
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __name__, msgspec.json.encode(self._order).decode()]
        with translate_os_errors(str(self.log)), open(self.log, "ab") as output:
            self._status.unlink(missing_ok=True)
            return subprocess.Popen(  # noqa: S603 - this very module
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the program
            )

    @property
    def states(self) -> MirrorStates | None:
        """The mirrors after their last passes; ``None`` before the first has ended."""
        return read_states(self._status)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def wake(self) -> None:
        """A checkpoint has been committed: copy it now.

        A mirror that failed is tried again when its pause is over.
        """
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def revive(self) -> bool:
        """Start the process again if it has ended. Returns whether it had."""
        if self._process.poll() is None:
            return False
        self._close_pipe()
        self._process = self._start()
        return True

    def finish(self, timeout: float | None) -> bool:
        """Have it copy what is lacking now, and end.

        Args:
            timeout: Seconds to wait for that; it goes on by itself afterwards. ``None``: no end.

        Returns:
            Whether every mirror holds all that it is owed.
        """
        self._close_pipe()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        states = self.states
        if self._process.poll() is None or states is None:
            return False
        found = states.mirrors.values()
        return len(found) == len(self._order.targets) and all(s.is_in_step for s in found)

    def leave(self) -> None:
        """Have it copy what is lacking now, and end; without waiting for that."""
        self._close_pipe()

    def close(self) -> None:
        """Let it end by itself: it completes the file that it is copying."""
        with suppress(OSError):
            self._process.send_signal(signal.SIGTERM)
        self._close_pipe()

    def _close_pipe(self) -> None:
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()


def main(argument: str) -> int:
    """The process: mirrors until its standard input ends or SIGTERM comes. Returns 0."""
    order = msgspec.json.decode(argument, type=Order)
    _stand_back()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    logging.getLogger("botocore").setLevel(logging.WARNING)  # at each try: where its keys are from
    how = How(runs=order.runs, newest_first=True, threads=1)
    file = StatusFile(order.status, order.source)
    followers = [
        Follower(
            uri,
            partial(open_store, order.source),
            partial(open_store, uri),
            how,
            interval=order.interval,
            told=file.update,
        )
        for uri in order.targets
    ]

    def terminate(number: int, frame: object) -> None:
        del number, frame
        how.stop.set()
        for follower in followers:
            follower.wake()

    signal.signal(signal.SIGTERM, terminate)
    threading.Thread(target=_listen, args=(followers,), daemon=True).start()
    threads = [threading.Thread(target=follower.run) for follower in followers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def _stand_back() -> None:
    """Take only the time that nobody else wants: the processor's, and so the disk's."""
    os.nice(19)
    # Linux may share the processor among sessions first, and this process has one of its own: its
    # niceness would count among its own threads only.
    with suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
        group.write("19")


def _listen(followers: Sequence[Follower]) -> None:
    """Each line is a wish for a pass; the end is that of the program."""
    for _ in sys.stdin:
        for follower in followers:
            follower.wake()
    for follower in followers:
        follower.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
