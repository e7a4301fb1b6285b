"""Print what a training came to: the digests that it logged, and those of its newest checkpoint.

python tests/trainer/chaos_result.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ckptstore.store import open_store


def main() -> None:
    """Print a document that is the same for any two runs that are."""
    out = Path(sys.argv[1])
    lines = [json.loads(line) for line in (out / "logs/metrics.jsonl").read_text().splitlines()]
    facts = [
        {k: v for k, v in line.items() if k != "life" and not k.startswith("time/")}
        for line in lines
    ]
    newest = open_store(str(out / "store")).latest("run")
    assert newest is not None
    stored = {e.path: e.digest for e in newest.files if e.path != "trainer_state.json"}
    print(json.dumps({"facts": facts, "step": newest.step, "stored": stored}, sort_keys=True))


if __name__ == "__main__":
    main()
