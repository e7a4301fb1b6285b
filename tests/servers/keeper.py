"""``python -m tests.servers.keeper PID COMMAND…``: a server that ends when its owner is gone.

Prints the server's process id. A test run that is killed cannot end its servers; this does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def main() -> int:
    if os.fork():
        os._exit(0)  # nobody has to wait for the server
    owner, command = int(sys.argv[1]), sys.argv[2:]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    print(server.pid, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while server.poll() is None:
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            server.send_signal(signal.SIGKILL)
        time.sleep(0.2)
    return server.returncode


if __name__ == "__main__":
    sys.exit(main())
