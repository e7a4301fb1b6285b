"""The loop in examples/fsdp2_loop.py, which the README shows, does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ckptstore

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_loop.py"


def run(store: Path, ranks: int) -> str:
    """The example as a person would start it."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(EXAMPLE), str(store)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_saves_with_two_ranks_and_goes_on_with_one(tmp_path: Path) -> None:
    store = tmp_path / "store"
    run(store, 2)
    commits = ckptstore.open_store(str(store)).list("my-run")
    assert [c.step for c in commits] == [50, 100, 150, 200]
    assert "resumed from step 200" in run(store, 1)
