"""Does all of it work on this machine's GPU? One script, a few minutes, no network.

    python -m benchmarks.gpu_check [--out DIR] [--large]

Trains a small model with PPO (bf16 and FSDP2 on a GPU), kills the training in the middle, resumes
it, and compares every metric and a digest of the whole state with a training that was not killed
(and, on a GPU, that did not keep its optimizer's state in host memory).
Then it saves a state of 1 GB (8 GB with ``--large``) from the device and says how long training was
kept waiting, when the checkpoint was durable, and that it loads back equal. Without a GPU the same
runs on the CPU. It needs torch, transformers, plotext and PyYAML: no Ray, no vLLM, no s3fs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ckptstore.torch import Checkpointer

STEPS = 12
KILL_AT = 7
OFFLOAD = "actor.offload_optimizer=true"


def settings(directory: Path, *, on_gpu: bool) -> list[str]:
    """The command line of the training."""
    return [
        f"storage.uri={directory}/checkpoints",
        f"trainer.log_dir={directory}/logs",
        "storage.run=check",
        "model.path=tiny",
        f"model.dtype={'bfloat16' if on_gpu else 'float32'}",
        "data.train_files=[digits]",
        "data.batch_size=64",
        "data.max_prompt_length=32",
        "rollout.max_new_tokens=8",
        "actor.mini_batch_size=32",
        "actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "reward.function=digits",
        f"trainer.total_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.log_digest=true",
    ]


def environment() -> dict[str, str]:
    """With what deterministic matrix products need on CUDA."""
    return {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def train(
    directory: Path, work: Path, *extra: str, on_gpu: bool, kill_at: int | None = None
) -> None:
    """Run the training; SIGKILL it once the metrics of a step are there."""
    command = [sys.executable, "-m", "trainer", *settings(directory, on_gpu=on_gpu), *extra]
    process = subprocess.Popen(command, cwd=work, env=environment())
    while kill_at is not None and process.poll() is None:
        if any(line["step"] >= kill_at for line in metrics(directory)):
            process.send_signal(signal.SIGKILL)
            process.wait()
            print(f"SIGKILL after step {kill_at}")
            return
        time.sleep(0.02)
    if process.wait() != 0:
        raise SystemExit(f"the training ended with exit code {process.returncode}")


def metrics(directory: Path) -> list[dict[str, Any]]:
    """What the training has logged so far."""
    try:
        text = (directory / "logs/metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def comparable(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The metrics that must be equal, by step."""
    return {
        line["step"]: {k: v for k, v in line.items() if not k.startswith("time/") and k != "life"}
        for line in lines
    }


def check_resume(root: Path, *, on_gpu: bool) -> dict[str, Any]:
    """Train, kill, resume, compare; the one that is killed rests its optimizer in host memory."""
    straight, killed = root / "straight", root / "killed"
    begun = time.perf_counter()
    train(straight, root, on_gpu=on_gpu)
    seconds = time.perf_counter() - begun
    train(killed, root, OFFLOAD, on_gpu=on_gpu, kill_at=KILL_AT)
    train(killed, root, OFFLOAD, on_gpu=on_gpu)
    wanted, found = comparable(metrics(straight)), comparable(metrics(killed))
    different = sorted(
        {k for step in wanted for k in wanted[step] if wanted[step][k] != found[step].get(k)}
    )
    steps = [line["time/step"] for line in metrics(straight)[1:]]
    return {
        "resume_exact": wanted.keys() == found.keys() and not different,
        "different": different,
        "seconds_per_step": sorted(steps)[len(steps) // 2],
        "training_seconds": seconds,
    }


def check_save(root: Path, device: torch.device, gigabytes: float) -> dict[str, Any]:
    """Save a large state from the device, change it at once, and load it back."""
    count = int(gigabytes * 1e9 / 4 / 16)
    tensors = {f"layer{i}": torch.randn(count, device=device) for i in range(16)}
    wanted = [float(t.double().sum()) for t in tensors.values()]
    stalls, durable = [], []
    checkpointer = Checkpointer(f"{root}/large", "state")
    for step in range(3):
        begun = time.perf_counter()
        pending = checkpointer.save(step, {"model": tensors}, wait=False)
        stalls.append(time.perf_counter() - begun)
        if step == 2:
            for tensor in tensors.values():
                tensor.zero_()  # what is stored must not change
        pending.result()
        durable.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    checkpointer.load({"model": tensors})
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    load = time.perf_counter() - begun
    checkpointer.close()
    return {
        "gigabytes": gigabytes,
        "stall_first_seconds": stalls[0],
        "stall_seconds": stalls[-1],
        "durable_seconds": durable[-1],
        "durable_gigabytes_per_second": gigabytes / durable[-1],
        "load_verified_gigabytes_per_second": gigabytes / load,
        "load_equal": [float(t.double().sum()) for t in tensors.values()] == wanted,
    }


def main() -> int:
    """Check, print, and say by the exit code whether all was right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to work, and to leave results.json")
    parser.add_argument("--large", action="store_true", help="save 8 GB instead of 1 GB")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    root = options.out or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    root.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "torch": str(torch.__version__),
    }
    try:
        results |= check_resume(root, on_gpu=on_gpu)
        results |= check_save(root, device, 8.0 if options.large else 1.0)
    finally:
        for name in ("straight", "killed", "large"):
            shutil.rmtree(root / name, ignore_errors=True)
    for name, value in results.items():
        print(f"{name:<36} {value:.3f}" if isinstance(value, float) else f"{name:<36} {value}")
    (root / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    return 0 if results["resume_exact"] and results["load_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
