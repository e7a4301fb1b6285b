"""Runs, inside User-Mode Linux, the commands that ``nfs.py`` leaves in a folder.

``N.json`` holds a command; its output goes to ``N.out`` and its exit status to ``N.status``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    running: dict[Path, subprocess.Popen[bytes]] = {}
    (folder / "ready").touch()
    while True:
        for job in sorted(folder.glob("*.json")):
            status = job.with_suffix(".status")
            if job not in running and not status.exists():
                running[job] = _start(job)
            elif job in running and running[job].poll() is not None:
                temporary = status.with_suffix(".new")
                temporary.write_text(str(running.pop(job).returncode))
                temporary.rename(status)
        time.sleep(0.1)


def _start(job: Path) -> subprocess.Popen[bytes]:
    said = json.loads(job.read_text())
    with open(job.with_suffix(".out"), "wb") as out:
        return subprocess.Popen(
            said["command"],
            cwd=said["cwd"],
            env=said["environment"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "jobs")
