"""Where a training tells how it goes: console, metrics file, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptstore.errors import UsageError, from_os_error, translate_os_errors
from trainer.console import TrainerConsole
from trainer.loggers import Logger, TensorBoard, WeightsAndBiases, new_run_id, require
from trainer.metricsfile import MetricsFile, read_metrics

__all__ = ["Tracker", "read_metrics"]


class Tracker:
    """The metrics of a run, on rank 0.

    Nothing that goes wrong while it logs ends the training: each such thing is one warning. A
    logger that failed is left out from then on; the metrics file is tried again at each step.

    Args:
        log_dir: Made when missing; holds ``metrics.jsonl`` and the files of the loggers.
        run: Name of the run.
        life: The number of this start of the run.
        loggers: ``tensorboard``, ``wandb``; the metrics file is always written.
        project: Project in Weights & Biases.
        config: What is shown as the run's configuration there.
        run_ids: As an earlier life gave them out.
        console: Whether steps and notes are shown; warnings always are.

    Attributes:
        log_dir: Where the logs are.

    Raises:
        UsageError: a logger is unknown or its package is not installed.
        CkptError: ``log_dir`` cannot be made.
    """

    def __init__(
        self,
        log_dir: Path,
        run: str,
        life: int,
        loggers: Sequence[str],
        project: str,
        config: Mapping[str, Any],
        run_ids: Mapping[str, str] | None = None,
        *,
        console: bool = True,
    ) -> None:
        self.log_dir = log_dir
        self._life = life
        self._total: int | None = None
        self._console = TrainerConsole(console)
        self._run_ids = dict(run_ids or {})
        self._loggers: dict[str, Logger] = {}
        self._said: set[str] = set()
        for name in loggers:
            if name not in ("tensorboard", "wandb"):
                raise UsageError(
                    f"unknown logger {name!r}", hint="trainer.loggers takes tensorboard and wandb"
                )
            require(name)
            if name == "tensorboard":
                self._loggers[name] = TensorBoard(log_dir)
            else:
                run_id = self._run_ids.setdefault(name, new_run_id())
                self._loggers[name] = WeightsAndBiases(log_dir, project, run, run_id, config)
        with translate_os_errors(str(log_dir)):
            log_dir.mkdir(parents=True, exist_ok=True)
        self._file = MetricsFile(log_dir, life)

    @property
    def run_ids(self) -> dict[str, str]:
        """The ids of this run in services, for the checkpoint; a later life passes them in."""
        return dict(self._run_ids)

    def start(self, resumed_from: int | None, total_steps: int | None = None) -> None:
        """Begin; comes before the first ``log``.

        What was logged beyond ``resumed_from`` never became part of this run's history: those lines
        of ``metrics.jsonl`` (for a start from scratch all) move to
        ``metrics.discarded-<life>.jsonl``.

        Args:
            resumed_from: The step of the checkpoint that was loaded; ``None`` from scratch.
            total_steps: Length of the training, for the console.

        Raises:
            CkptError: the metrics file cannot be written; none of its lines is lost.
        """
        self._total = total_steps
        self._file.open(resumed_from)
        self._each("start", lambda logger: logger.start(resumed_from))

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Tell the metrics of a step.

        Args:
            step: Counted from 1; 0 is before training.
            metrics: Numbers (loggers and file), and texts such as digests (file only).
        """
        self._to_file(lambda: self._file.append(step, metrics))
        self._console.step(step, self._total, metrics)
        numbers = {k: float(v) for k, v in metrics.items() if not isinstance(v, str)}
        self._each("log", lambda logger: logger.log(step, self._life, numbers))

    def note(self, text: str) -> None:
        """A remark for the person at the console."""
        self._console.note(text)

    def warn(self, text: str, hint: str | None = None) -> None:
        """A warning, and what to do about it."""
        self._console.warn(text, hint)

    def flush(self) -> None:
        """Make what was logged survive a power failure."""
        self._to_file(self._file.sync)
        self._each("flush", lambda logger: logger.flush())

    def close(self) -> None:
        """Flush and end; ending again does nothing."""
        self._to_file(self._file.sync)
        self._to_file(self._file.close)
        self._each("close", lambda logger: logger.close())
        self._loggers.clear()

    def _to_file(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            reason = from_os_error(error, str(self._file.path))
            if str(reason) not in self._said:
                self._said.add(str(reason))
                self.warn(f"training goes on without its metrics on disk: {reason}", reason.hint)

    def _each(self, what: str, act: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except Exception as error:  # noqa: BLE001 - a service's client may raise anything
                del self._loggers[name]
                reason = str(error) or type(error).__name__
                self.warn(
                    f"{name} failed to {what} and is left out from here on: {reason}",
                    f"training goes on; {self._file.path} has all metrics",
                )
