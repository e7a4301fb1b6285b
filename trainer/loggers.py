"""TensorBoard and Weights & Biases behind one small interface.

Both are optional packages, imported when a logger starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ckptstore.errors import UsageError

_LOGIN_TIMEOUT = 30.0
"""Seconds that Weights & Biases may wait at a terminal for somebody to type a key."""


class Logger(Protocol):
    """Where metrics go beside the metrics file. Any call may raise anything."""

    def start(self, resumed_from: int | None) -> None:
        """Begin; steps beyond ``resumed_from`` will come again."""

    def log(self, step: int, life: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""

    def flush(self) -> None:
        """Hand on what is buffered."""

    def close(self) -> None:
        """End; nothing follows."""


class TensorBoard:
    """Event files in ``<log_dir>/tensorboard``; a resume hides the steps that come again."""

    def __init__(self, log_dir: Path) -> None:
        self._directory = log_dir / "tensorboard"
        self._writer: Any = None

    def start(self, resumed_from: int | None) -> None:
        """Open an event file; earlier ones count up to ``resumed_from``."""
        from torch.utils.tensorboard import SummaryWriter

        first = 0 if resumed_from is None else resumed_from + 1
        self._writer = SummaryWriter(str(self._directory), purge_step=first)

    def log(self, step: int, life: int, metrics: Mapping[str, float]) -> None:
        """Add a scalar for each metric, and the life as ``trainer/life``."""
        for name, value in (*metrics.items(), ("trainer/life", life)):
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write what is queued."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is queued and end."""
        self._writer.close()


class WeightsAndBiases:
    """One run in Weights & Biases over all lives; ``WANDB_MODE=offline`` keeps it on disk.

    The step is a metric of its own and the x axis of the others: the service's own step counter
    only grows, and would drop what a resumed run logs for steps that an earlier life had reached.
    """

    def __init__(
        self, log_dir: Path, project: str, run: str, run_id: str, config: Mapping[str, Any]
    ) -> None:
        self._options = {
            "project": project,
            "name": run,
            "id": run_id,
            "dir": str(log_dir),
            "config": dict(config),
            "resume": "allow",
        }
        self._run: Any = None

    def start(self, resumed_from: int | None) -> None:
        """Begin or continue the run."""
        del resumed_from
        wandb: Any = importlib.import_module("wandb")
        settings = wandb.Settings(login_timeout=_LOGIN_TIMEOUT)
        self._run = wandb.init(**self._options, settings=settings)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, life: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics under their step."""
        self._run.log({**metrics, "step": step, "life": life})

    def flush(self) -> None:
        """Nothing to do: its own process sends on what it is given."""

    def close(self) -> None:
        """End the run; waits for what is not sent yet."""
        self._run.finish()


def new_run_id() -> str:
    """An id for a run in Weights & Biases."""
    return secrets.token_hex(4)


def require(name: str) -> None:
    """See that the package of a logger is there.

    Raises:
        UsageError: it is not installed.
    """
    found = importlib.util.find_spec(name)
    # A directory `wandb/` that an earlier run left here looks like a package without a file.
    if found is None or found.origin is None:
        raise UsageError(
            f"the logger {name} needs the package {name}, which is not installed",
            hint=f"pip install {name}, or leave it out of trainer.loggers",
        )
