"""One process, or the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ckptstore.errors import CkptError, TemporaryError
from trainer.checks import check_ranks
from trainer.comm import connect, disconnect, lost_others
from trainer.config import Config
from trainer.session import Session
from trainer.stopping import StopRequest


def quiet_libraries() -> None:
    """No progress bars and reports of transformers between a training's own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def train(
    config: Config,
    *,
    notes: Sequence[str] = (),
    dry_run: bool = False,
    stop: StopRequest | None = None,
) -> None:
    """Be one rank of a training.

    Args:
        config: The configuration.
        notes: What is to be told first.
        dry_run: Build everything, train nothing.
        stop: Where a wish to stop is left; by default signals leave it.

    Raises:
        CkptError: what a person has to see to.
    """
    quiet_libraries()
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by CUDA's libraries
        torch.use_deterministic_algorithms(True, warn_only=True)
    comm = connect(config.trainer.nccl_timeout)
    try:
        check_ranks(config, comm.size)
        session = Session(config, comm, notes=notes, dry_run=dry_run, stop=stop)
        try:
            if not dry_run:
                session.run()
        finally:
            session.close()
    except (CkptError, RuntimeError) as error:
        if isinstance(error, TemporaryError) or not lost_others(error):
            raise
        raise TemporaryError(
            f"rank {comm.rank} has lost another rank: {str(error).splitlines()[0]}",
            hint="what that rank wrote last says why; the same command again goes on from the "
            "newest checkpoint",
        ) from error
    finally:
        disconnect()
