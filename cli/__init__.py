"""``ckpt``: the command line of ckptstore."""

from __future__ import annotations

import os
import signal
import sys

_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _handled and os.path.basename(sys.argv[0]) == "ckpt":
    # An interrupt while modules are still being imported ends the process without a traceback;
    # the command that then runs takes interrupts itself (cli.options.command). Where a shell has
    # them ignored, for a background job, they stay ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
