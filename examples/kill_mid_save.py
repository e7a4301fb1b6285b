"""Run a command and SIGKILL it in the middle of a save: what a preempted machine does to it.

    python examples/kill_mid_save.py STORE/RUN --after-step 30 -- ckpt-train --config …

A save has a lease from its beginning and a record at its end. When a lease of a step after the
given one is there, the process is stopped; if the record is not there yet it is killed, else it
goes on until the next save.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def step_of(name: str) -> int:
    """The step in ``00003-step-00000030-abcdefgh…``."""
    return int(name.split("-")[2])


def unfinished_save(run: Path, after_step: int) -> str | None:
    """The name of a save that has begun and has no record."""
    try:
        leases = sorted(os.listdir(run / "leases"))
    except FileNotFoundError:
        return None
    for lease in leases:
        name = lease.partition(".")[0]
        begun = name.count("-") == 3 and (run / name).is_dir()
        if begun and step_of(name) > after_step and not (run / f"commits/{name}.json").exists():
            return name
    return None


def main() -> int:
    """Run, and kill. Returns 0 when the command was killed in the middle of a save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--after-step", type=int, default=0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    process = subprocess.Popen(options.command)
    while process.poll() is None:
        if unfinished_save(options.run, options.after_step) is not None:
            process.send_signal(signal.SIGSTOP)
            name = unfinished_save(options.run, options.after_step)
            if name is not None:
                process.kill()
                process.wait()
                print(f"SIGKILL in the middle of saving step {step_of(name)} ({name})", flush=True)
                return 0
            process.send_signal(signal.SIGCONT)
        time.sleep(0.0005)
    print("the command ended before it could be killed in a save", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
