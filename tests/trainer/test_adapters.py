"""Training adapters (LoRA): exact resumes, what is stored, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.trainer.support import Lab, Training, needs
from trainer.config import LoraConfig, ModelConfig
from trainer.models import adapters_of, add_adapters, full_weights, load_policy

pytestmark = needs("peft")

Make = Callable[..., Training]

LORA = ("model.lora.rank=4", "actor.optim.lr=1e-2", "trainer.total_steps=6", "trainer.save_freq=2")


def test_after_a_kill_adapters_go_on_bit_for_bit(training: Make, whole: Make) -> None:
    killed = training("killed", *LORA)
    killed.killed(4, 0.05)
    killed.run().ok("resumed from step")
    killed.same_as(whole(*LORA), 6)


def test_only_adapters_are_stored_and_the_base_is_known(whole: Make) -> None:
    newest = whole(*LORA).commits()[-1]
    paths = {entry.path for entry in newest.files}
    assert "actor/adapters/.metadata" in paths
    assert not any(path.startswith("actor/model/") for path in paths)
    sizes = {e.path: e.size for e in newest.files}
    assert sizes["actor/adapters/__0_0.distcp"] < sizes["critic/model/__0_0.distcp"] / 2


def test_adapters_and_whole_models_do_not_mix(whole: Make, training: Make, lab: Lab) -> None:
    store = whole(*LORA).directory / "store"
    other = training("other", f"trainer.resume_from={store}/run@latest", "trainer.total_steps=8")
    other.run().failed(2, "holds adapters (LoRA) for the actor")
    reverse = training("reverse", "trainer.total_steps=2")
    reverse.run().ok()
    reverse.run("model.lora.rank=4", "trainer.total_steps=4").failed(2, "trains adapters (LoRA)")


def test_another_base_is_told(training: Make, lab: Lab) -> None:
    first = training("first", *LORA)
    first.run("trainer.stop_at_step=2").ok()
    model = load_policy(lab.model, ModelConfig())
    with torch.no_grad():
        next(model.parameters()).add_(0.5)
    other = first.directory / "other"
    for file in lab.model.iterdir():
        other.mkdir(exist_ok=True)
        (other / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(other)  # type: ignore[operator]
    first.run(f"model.path={other}").ok("the base", "is not the one it was")


def test_pushed_weights_are_the_base_plus_the_adapter_and_leave_it_alone(lab: Lab) -> None:
    base = load_policy(lab.model, ModelConfig())
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = add_adapters(load_policy(lab.model, ModelConfig()), LoraConfig(rank=3, alpha=6.0), 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in adapters_of(model).items():
            if "lora_B" in name:
                tensor.normal_()
    pushed = dict(full_weights(model))
    assert pushed.keys() == before.keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert torch.equal(pushed[name], before[name] + 2.0 * (b @ a))
    assert not torch.equal(pushed[name], before[name])
    assert torch.equal(layer.base_layer.weight, before[name])


def test_adapters_follow_from_the_seed_alone(lab: Lab) -> None:
    def made(seed: int) -> dict[str, torch.Tensor]:
        torch.rand(seed + 1)  # whatever was drawn before
        model = load_policy(lab.model, ModelConfig())
        return adapters_of(add_adapters(model, LoraConfig(rank=2), seed))

    first, again, other = made(0), made(0), made(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
