"""A foreign judge: ckpt-chaos kills a training at its file operations, resumes it and compares.

It counts every file that is made, renamed or removed below a directory in a run without faults,
then kills a fresh run at some of them (``before`` the operation, with the file ``torn``, or by
SIGTERM), starts the same command again, and judges whether it resumed from the newest checkpoint
that was complete and ended as the run without faults did.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import FULL
from tests.trainer.support import ENVIRONMENT, ROOT, Lab, needs

CHAOS = Path(sys.executable).parent / "ckpt-chaos"

pytestmark = [
    needs("ckpt_chaos"),
    pytest.mark.timeout(1800),
]

VERDICTS = re.compile(r"\b(PASS|HARD_FAIL|SILENT_DIVERGENCE|LOST_WORK|CONTROL_FAIL)\b")


def chaos(
    lab: Lab, work: Path, points: int, *settings: str, modes: str, script: tuple[str, ...]
) -> tuple[int, Counter[str], str]:
    """Judge a training; returns the exit code, the points of each verdict, and what was said."""
    result = f"{sys.executable} {Path(__file__).with_name('chaos_result.py')} {{out}}"
    command = [
        *(str(CHAOS), "run", "--work", str(work), "--max-points", str(points), "--modes", modes),
        *("--checkpoint-glob", "{out}/store/run/commits/*step-*.json", "--ckpt-ignore-size"),
        *("--step-regex", r"resumed from step (\d+)", "--result-cmd", result),
        *("--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL", "--grace", "30"),
        *("--timeout", "120", "--", sys.executable, *script, *lab.base()),
        *("storage.uri={out}/store", "trainer.log_dir={out}/logs", "storage.async_save=false"),
        *("storage.threads=1", "trainer.total_steps=6", "trainer.save_freq=2", *settings),
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=work.parent,
        env={**os.environ, **ENVIRONMENT, "CKPTSTORE_ID_SEED": "chaos", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    said = done.stdout + done.stderr
    rows = [line for line in said.splitlines() if re.search(r"#\d+ |no crash", line)]
    found = Counter(m[0] for line in rows if (m := VERDICTS.search(line)))
    return done.returncode, found, said


def test_every_point_passes(lab: Lab, tmp_path: Path) -> None:
    points = 14 if FULL else 4
    code, verdicts, said = chaos(
        lab, tmp_path / "work", points, modes="before,torn,term", script=("-m", "trainer")
    )
    assert code == 0, said
    assert set(verdicts) == {"PASS"}, said
    # One is the run without faults. Nothing here can be torn: all is written under other names.
    assert verdicts["PASS"] > points * 2 // 3, said


@pytest.mark.skipif(not FULL, reason="a minute: that the judge can see anything")
def test_a_trainer_that_does_not_resume_is_seen(lab: Lab, tmp_path: Path) -> None:
    code, verdicts, said = chaos(
        *(lab, tmp_path / "work", 3, "trainer.resume_mode=none"),
        modes="before",
        script=("-m", "trainer"),
    )
    assert code != 0
    assert verdicts["LOST_WORK"] > 0, said


@pytest.mark.skipif(not FULL, reason="minutes: that the judge can see anything")
def test_records_written_in_place_are_seen(lab: Lab, tmp_path: Path) -> None:
    broken = str(Path(__file__).with_name("chaos_in_place.py"))
    code, verdicts, said = chaos(lab, tmp_path / "work", 12, modes="torn", script=(broken,))
    assert code != 0
    assert verdicts["HARD_FAIL"] > 0, said
