"""Write ``verl_numbers.json``: inputs, and what verl's own functions make of them.

verl is no dependency of this project. To run this, make an environment of its own and, from the
root of the repository, run it there:

    pip install verl==0.9.1 torch
    python -m tests.trainer.make_verl_numbers

verl's functions are called as they are. A newer verl may give the same numbers; the version that
gave them is recorded with them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OUT = Path(__file__).with_name("verl_numbers.json")
SETTINGS = {
    "gamma": 0.97,
    "lam": 0.9,
    "clip_ratio": 0.2,
    "clip_value": 0.3,
    "kl_coef": 0.05,
    "batch_num_tokens": 40,
    "kl_coef_start": 0.2,
    "kl_target": 0.5,
    "kl_horizon": 1000.0,
}
KL_UPDATES = [(0.1, 32), (0.5, 32), (0.53, 128), (4.0, 128), (-1.0, 64)]
WARMUP, TOTAL, MIN_RATIO = 3, 12, 0.1
# A full row, two shorter ones, a row of one token, and one with a gap as a tool's output leaves it.
MASK = [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 1, 1],
]


def numbers(value: Any) -> Any:
    """A tensor (or number) as plain numbers, with the 9 digits that name a float32."""
    if isinstance(value, Tensor):
        return numbers(value.detach().tolist())
    if isinstance(value, dict):
        return {k: numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [numbers(v) for v in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def inputs() -> dict[str, Any]:
    """Seeded, as decimals that are short to read."""
    generator = torch.Generator().manual_seed(20240607)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    logprobs = -normal(5, 6).abs() - 1.0
    logprobs[0, 1] = -6.0
    ref_logprobs = logprobs + normal(5, 6, scale=0.3)
    # Two tokens far from the reference, for k3's clamps.
    ref_logprobs[0, 1] = -1.5
    ref_logprobs[1, 2] = -35.0
    old_values = normal(5, 6)
    real = {
        "logits": normal(5, 6, 4, scale=2.0),
        "logprobs": logprobs,
        "old_logprobs": logprobs + normal(5, 6, scale=0.3),
        "ref_logprobs": ref_logprobs,
        "rewards": normal(5, 6),
        "old_values": old_values,
        "values": old_values + normal(5, 6, scale=0.5),
        "returns": old_values + normal(5, 6),
        "advantages": normal(5, 6),
    }
    decimals = {name: torch.round(value, decimals=4).tolist() for name, value in real.items()}
    tokens = torch.randint(0, 4, (5, 6), generator=generator).tolist()
    return decimals | {"mask": MASK, "tokens": tokens}


def outputs(given: dict[str, Tensor]) -> dict[str, Any]:
    """What verl's functions return for the inputs, by the functions' names."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    functional = importlib.import_module("verl.utils.torch_functional")
    config = importlib.import_module("verl.workers.config")
    mask, old, tokens = given["mask"], given["old_logprobs"], SETTINGS["batch_num_tokens"]
    out: dict[str, Any] = {}

    out["logprobs_from_logits_naive"] = functional.logprobs_from_logits_naive(
        given["logits"], given["tokens"]
    )
    out["entropy_from_logits"] = functional.entropy_from_logits(given["logits"])
    out["compute_entropy_loss"] = core.compute_entropy_loss(given["logits"], mask)
    out["masked_whiten"] = functional.masked_whiten(given["advantages"], mask)
    out["agg_loss"] = core.agg_loss(
        given["advantages"], mask, "token-mean", batch_num_tokens=tokens
    )
    out["compute_rewards"] = core.compute_rewards(
        given["rewards"], given["logprobs"], given["ref_logprobs"], SETTINGS["kl_coef"]
    )
    for name in ("k1", "abs", "k2", "k3"):
        out[f"kl_penalty {name}"] = core.kl_penalty(given["logprobs"], given["ref_logprobs"], name)
    advantages, returns = core.compute_gae_advantage_return(
        given["rewards"], given["old_values"], mask, SETTINGS["gamma"], SETTINGS["lam"]
    )
    out["compute_gae_advantage_return"] = {"advantages": advantages, "returns": returns}

    # A lower bound so low that verl's dual clip, which plain PPO lacks, never applies.
    actor = config.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=SETTINGS["clip_ratio"],
        clip_ratio_low=SETTINGS["clip_ratio"],
        clip_ratio_high=SETTINGS["clip_ratio"],
        clip_ratio_c=1e9,
    )
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=tokens)
    logprobs = given["logprobs"].clone().requires_grad_()
    loss, metrics = core.compute_policy_loss_vanilla(
        old, logprobs, given["advantages"], mask, "token-mean", actor
    )
    loss.backward()
    out["compute_policy_loss_vanilla"] = {"loss": loss, "gradient": logprobs.grad, **metrics}

    values = given["values"].clone().requires_grad_()
    loss, fraction = core.compute_value_loss(
        values,
        given["returns"],
        given["old_values"],
        mask,
        SETTINGS["clip_value"],
        batch_num_tokens=tokens,
    )
    loss.backward()
    out["compute_value_loss"] = {"loss": loss, "gradient": values.grad, "clipfrac": fraction}

    controller = core.AdaptiveKLController(
        SETTINGS["kl_coef_start"], SETTINGS["kl_target"], SETTINGS["kl_horizon"]
    )
    coefs = []
    for current, samples in KL_UPDATES:
        controller.update(current, samples)
        coefs.append(float(controller.value))
    out["AdaptiveKLController"] = {"updates": [list(u) for u in KL_UPDATES], "coefs": coefs}

    out["get_constant_schedule_with_warmup"] = _rates(
        functional.get_constant_schedule_with_warmup, WARMUP
    )
    out["get_cosine_schedule_with_warmup"] = _rates(
        functional.get_cosine_schedule_with_warmup, WARMUP, TOTAL, MIN_RATIO
    )
    return out


def _rates(schedule: Any, *args: float) -> list[float]:
    """The learning rate, of peak 1, of each optimizer step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = schedule(optimizer, *args)
    rates = []
    for _ in range(TOTAL + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def main() -> None:
    """Run verl and write the file."""
    given = inputs()
    found = outputs({name: torch.tensor(value) for name, value in given.items()})
    content: dict[str, dict[str, Any]] = {
        "origin": {
            "package": "verl",
            "version": importlib.metadata.version("verl"),
            "torch": importlib.metadata.version("torch"),
            "functions": "verl/trainer/ppo/core_algos.py and verl/utils/torch_functional.py",
            "made_by": "python -m tests.trainer.make_verl_numbers (see there)",
        },
        "settings": SETTINGS
        | {"warmup_steps": WARMUP, "total_steps": TOTAL, "min_ratio": MIN_RATIO},
        "inputs": given,
        "outputs": numbers(found),
    }
    sections = (
        f' "{name}": {{\n'
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in section.items())
        + "\n }"
        for name, section in content.items()
    )
    OUT.write_text("{\n" + ",\n".join(sections) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
