"""What the vLLM engine does, told as JSON by a process of its own; see ``test_vllm.py``."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ckptstore.errors import CkptError
from trainer import models
from trainer.comm import connect
from trainer.config import ModelConfig, RolloutConfig
from trainer.rng import rng_state
from trainer.rollout.base import Response, Sampling
from trainer.rollout.vllm import VllmRollout

LONG = [3, *range(5, 150)]
"""More tokens than a block of the cache has: 128 on a CPU."""

PROMPTS = ([7, 8, 9], LONG, [*LONG, 11], [250] * 140)
KEYS = (2**63 - 1, 1, 2, 3)
END = 257


def weights(model: nn.Module, without: str = "", foreign: str = "") -> Iterator[tuple[str, Tensor]]:
    """A model's weights, perhaps not all, perhaps one too many."""
    for name, tensor in models.state_of(model).items():
        if name != without:
            yield name, tensor.detach()
    if foreign:
        yield foreign, torch.zeros(1)


def changed(model: nn.Module, seed: int) -> None:
    """Move every weight, biases too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def difference(model: nn.Module, responses: Sequence[Response], temperature: float) -> float:
    """How far log-probabilities are at most from those that transformers computes."""
    worst = 0.0
    for prompt, response in zip(PROMPTS, responses, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *response.tokens]])).logits[0]
        scores = (logits / (temperature or 1.0)).log_softmax(-1)[len(prompt) - 1 : -1]
        ours = scores.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        worst = max(worst, float((ours - torch.tensor(response.logprobs)).abs().max()))
    return worst


def refusal(call: Callable[[], object]) -> list[Any]:
    """The error that a call raises, in words, and its exit code."""
    try:
        call()
    except CkptError as error:
        return [str(error), error.exit_code]
    return ["", 0]


def main(arguments: Sequence[str]) -> int:
    """Try the engine on a model like that in a directory, and write ``told.json`` here.

    Its output layer is tied to its embeddings.
    """
    path, model = Path("tied"), ModelConfig()
    form = transformers.AutoConfig.from_pretrained(arguments[0])
    form.tie_word_embeddings = True
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(form).save_pretrained(path)
    connect(60)
    cpu = torch.device("cpu")
    policy = models.load_policy(path, model)
    random.seed(7)
    torch.manual_seed(7)
    state = rng_state()
    told: dict[str, Any] = {}

    def engine(max_length: int, path: Path = path) -> VllmRollout:
        config = RolloutConfig(engine="vllm", max_num_seqs=8, temperature=0.7)
        return VllmRollout(
            path, model, config, cpu, eos=END, max_length=max_length, seed=3, ranks=1
        )

    def drawn(temperature: float = 0.7, **options: Any) -> list[Response]:
        return rollout.generate(PROMPTS, KEYS, Sampling(6, temperature, **options))

    told["too long"] = refusal(lambda: engine(100_000))
    rollout = engine(160)
    told["version at first"] = rollout.version
    told["environment"] = [os.environ[n] for n in ("DO_NOT_TRACK", "VLLM_CPU_KVCACHE_SPACE")]
    rollout.load_weights(weights(policy), 0)
    first = drawn()
    told["generators"] = rng_state() == state
    told["again"] = drawn() == first
    alike = rollout.generate([LONG, LONG, LONG], [5, 5, 6], Sampling(6, 0.7))
    told["by key"] = [r.tokens == alike[0].tokens for r in alike]
    told["lengths"] = [len(r.tokens) for r in first]
    told["greedy"] = difference(policy, drawn(0.0), 0.0)
    changed(policy, 1)
    told["not pushed"] = difference(policy, drawn(), 0.7)
    rollout.load_weights(weights(policy), 1)
    told["version"] = rollout.version
    told["pushed"] = difference(policy, drawn(), 0.7)
    told["greedy, pushed"] = difference(policy, drawn(0.0), 0.0)
    told["top_k 1"] = [r.tokens for r in drawn(top_k=1)] == [r.tokens for r in drawn(0.0)]
    chosen = drawn(0.0)[0].tokens
    rollout._eos = chosen[2]
    told["ended"] = drawn(0.0)[0].tokens == chosen[: chosen.index(chosen[2]) + 1]
    layer = "model.layers.1.mlp.up_proj.weight"
    told["misses"] = refusal(lambda: rollout.load_weights(weights(policy, without=layer), 3))
    told["version after"] = rollout.version
    told["too many"] = refusal(lambda: rollout.load_weights(weights(policy, foreign="x.y"), 3))
    form.num_attention_heads = form.num_key_value_heads = 4
    form.save_pretrained("small")
    told["small heads"] = refusal(lambda: engine(160, Path("small")))
    Path("told.json").write_text(json.dumps(told))
    return 0
