"""NFS for real: a server and two clients inside User-Mode Linux.

The kernel of a test machine often has no NFS, and a container may not mount it. User-Mode Linux is
a kernel that runs as an ordinary process, with the host's files as its own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckptstore.ids import random_letters
from tests.servers.process import Server

REPOSITORY = Path(__file__).parents[2]

_PROGRAMS = {
    "linux.uml": "user-mode-linux",
    "modprobe": "kmod",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "mount.nfs": "nfs-common",
    "rpc.nfsd": "nfs-kernel-server",
    "rpcbind": "rpcbind",
}
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

INSIDE = "CKPT_NFS_MOUNTS"
"""The variable that tells tests inside where the clients' mounts are."""


@dataclass(frozen=True)
class Outcome:
    """How a command inside ended.

    Attributes:
        status: Its exit status.
        output: What it printed.
    """

    status: int
    output: str


class NFS(Server):
    """A kernel with an NFS server, and two clients for each version of the protocol.

    Its disks end with it: ``start`` after ``stop`` begins with empty ones.
    """

    name: ClassVar[str] = "NFS in User-Mode Linux"

    @classmethod
    def missing(cls) -> str | None:
        lacking = {p for name, p in _PROGRAMS.items() if shutil.which(name, path=_PATH) is None}
        if lacking:
            return f"install {' '.join(sorted(lacking))} (`make servers` does it, as root)"
        if subprocess.run([*_contained(), "true"], capture_output=True, check=False).returncode:
            return "`unshare --pid` is not allowed here (run as root)"
        return None

    def start(self) -> None:
        (self.folder / "jobs").mkdir(parents=True, exist_ok=True)
        (self.folder / "jobs/ready").unlink(missing_ok=True)
        disks = self._disks()
        arguments = [str(self.folder), sys.executable, "xfs" if len(disks) > 2 else ""]
        here = f'"{self.folder}/init"'
        script = self.folder / "init"
        script.write_text(
            "#!/bin/sh\nexec "
            + shlex.join(["sh", f"{REPOSITORY}/tests/servers/nfs_boot.sh", *arguments])
            + "\n"
        )
        script.chmod(0o755)
        self.launch(
            "kernel",
            [
                "env",
                f"--chdir={self.folder}",  # disks are named from there: no space may be in a name
                *_contained(),
                "linux.uml",
                "mem=1536M",
                "uml_dir=uml/",
                "rootfstype=hostfs",
                "rootflags=/",
                "rw",
                f"init={here}",
                "con=null",
                "con0=null,fd:1",
                "quiet",
                *(f"ubd{i}={disk.name}" for i, disk in enumerate(disks)),
            ],
            {"PATH": f"{_PATH}:{os.environ.get('PATH', '')}"},
        )
        try:
            self.wait_until((self.folder / "jobs/ready").exists, "kernel")
        except RuntimeError as error:
            log = self.folder / "boot.log"
            said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            self.kill()
            raise RuntimeError(f"{error}\n{said}") from None
        finally:
            for disk in disks:  # the kernel has them open; with it they are gone
                disk.unlink()

    def _disks(self) -> list[Path]:
        """Sparse images: an ext4, a small ext4, and an XFS if it can be made."""
        made = []
        for name, size, make in (
            ("ext4", "2G", ["mkfs.ext4", "-q", "-F"]),
            ("small", "24M", ["mkfs.ext4", "-q", "-F"]),
            ("xfs", "1G", ["mkfs.xfs", "-q"]),
        ):
            image = self.folder / name
            program = shutil.which(make[0], path=_PATH)
            if program is None:
                continue
            subprocess.run(["truncate", "-s", size, image], check=True)
            subprocess.run([program, *make[1:], image], check=True, stdout=subprocess.DEVNULL)
            made.append(image)
        return made

    def run(self, command: Sequence[str], *, seconds: float) -> Outcome:
        """Run a command inside, in the repository, and wait for its end.

        Raises:
            RuntimeError: it took too long, or the kernel died; the message shows what it printed.
        """
        job = self.folder / "jobs" / f"{time.time_ns()}-{random_letters()}.json"
        temporary = job.with_suffix(".new")
        temporary.write_text(
            json.dumps(
                {
                    "command": list(command),
                    "cwd": str(REPOSITORY),
                    "environment": {
                        **{k: v for k, v in os.environ.items() if k.startswith("CKPTSTORE_TEST")},
                        "PATH": f"{Path(sys.executable).parent}:{_PATH}",
                        "HOME": "/mnt/tmp",
                        "TMPDIR": "/mnt/tmp",
                        "LANG": "C.UTF-8",
                        "PYTHONPATH": str(REPOSITORY),
                        "PYTHONDONTWRITEBYTECODE": "1",
                        "OMP_NUM_THREADS": "1",
                        INSIDE: "/mnt/nfs",
                    },
                }
            )
        )
        temporary.rename(job)
        out, status = job.with_suffix(".out"), job.with_suffix(".status")
        end = time.monotonic() + seconds
        while not status.exists():
            if not self.alive("kernel") or time.monotonic() > end:
                why = "took too long" if self.alive("kernel") else "ended with its kernel"
                said = out.read_text(errors="replace") if out.exists() else ""
                self.kill()  # what hangs in it is not told apart: the next test starts a new one
                self.save(started=None)
                raise RuntimeError(f"{' '.join(command)} {why}:\n{said[-20000:]}")
            time.sleep(0.1)
        return Outcome(int(status.read_text()), out.read_text(errors="replace"))

    def pytest(self, *arguments: str, seconds: float = 170) -> Outcome:
        """Run tests inside."""
        options = ("-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "--durations=5")
        return self.run(
            [sys.executable, "-m", "pytest", *options, *arguments],
            seconds=seconds,
        )


def _contained() -> list[str]:
    """A namespace of processes: with its first process all of the kernel's processes end."""
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *own, "--pid", "--fork", "--kill-child"]
