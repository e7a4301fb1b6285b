"""The models: loaded, sharded over the ranks, and given out as states and as weights to push."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ckptstore.errors import NotFoundError, UsageError, printable
from trainer.config import LoraConfig, ModelConfig
from trainer.optional import optional_module

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ValueModel(nn.Module):
    """A critic: a language model's backbone with one number a token instead of logits.

    The head starts at zero, so that every value starts at zero.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Values [B, T] of tokens [B, T]: what the rewards after each token will come to."""
        hidden = self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        # A copy, not a view: FSDP's hooks are on what is returned.
        return torch.squeeze_copy(self.head(hidden), -1).float()


def load_tokenizer(path: str | os.PathLike[str], config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's directory; it has a token for padding.

    Raises:
        UsageError: there is none, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise _unusable(path, "tokenizer", error) from error
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer in {printable(str(path))} has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(path: str | os.PathLike[str], config: ModelConfig) -> PretrainedConfig:
    """The architecture that a model's directory describes. Raises :class:`UsageError`."""
    from transformers import AutoConfig

    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise _unusable(path, "configuration", error) from error
    return found


def load_policy(
    path: str | os.PathLike[str], config: ModelConfig, *, weights: bool = True
) -> nn.Module:
    """A causal language model in float32.

    Args:
        path: Its directory.
        config: How it is used.
        weights: Whether to read its weights; without, they are random (and loaded later).

    Raises:
        NotFoundError: there is no such directory.
        UsageError: it holds no model that transformers knows.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, path, config, weights=weights)


def load_critic(
    path: str | os.PathLike[str], config: ModelConfig, *, weights: bool = True
) -> ValueModel:
    """A critic on the backbone of a model; see :func:`load_policy`."""
    from transformers import AutoModel

    backbone = _load(AutoModel, path, config, weights=weights)
    architecture: Any = backbone.config
    return ValueModel(backbone, architecture.hidden_size)


def _load(
    kind: Any, path: str | os.PathLike[str], config: ModelConfig, *, weights: bool
) -> nn.Module:
    if not Path(path).is_dir():
        raise NotFoundError(
            f"there is no model directory {printable(str(path))}",
            hint="give a directory with a Hugging Face model, or one of tiny and smollm2",
        )
    # Building a model draws random numbers, whose number differs when weights are read.
    model: nn.Module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if weights:
            try:
                model, info = kind.from_pretrained(
                    path,
                    dtype=torch.float32,
                    trust_remote_code=config.trust_remote_code,
                    local_files_only=True,
                    output_loading_info=True,
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise _unusable(path, "model", error) from error
            if info["missing_keys"]:  # transformers would go on with random weights
                raise UsageError(
                    f"the model in {printable(str(path))} lacks the weights "
                    f"{min(info['missing_keys'])} (and {len(info['missing_keys']) - 1} others)"
                )
        else:
            model = kind.from_config(
                load_config(path, config),
                dtype=torch.float32,
                trust_remote_code=config.trust_remote_code,
            )
    model.train(False)  # dropout would make an update differ from what was sampled
    if config.activation_checkpointing:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def _unusable(path: str | os.PathLike[str], what: str, error: Exception) -> UsageError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return UsageError(f"{printable(str(path))} holds no usable {what}: {printable(first)}")


def shard(model: nn.Module, mesh: DeviceMesh, dtype: str) -> nn.Module:
    """Shard a model's parameters over the ranks, layer by layer (FSDP2).

    Parameters stay in float32 and are cast to ``dtype`` for the computation; gradients are reduced
    in float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated layers, which are the elements of the longest module list."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if lists:
        yield from max(lists, key=len)


def add_adapters(model: nn.Module, config: LoraConfig, seed: int) -> nn.Module:
    """Freeze a model and give its linear layers adapters that learn (LoRA).

    See Hu et al. 2021, https://arxiv.org/abs/2106.09685. The adapters change nothing at first, and
    their random half follows from the seed alone.
    """
    peft: Any = optional_module("peft", "peft", "model.lora.rank > 0")
    model.requires_grad_(False)
    chosen = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=config.target_modules,
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(chosen, model)
        except ValueError as error:
            raise UsageError(f"no adapters can be added: {error}") from error
    return model


_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by name, each once however many names it has; sharded ones are DTensors.

    They share memory with the model: what is loaded into them is loaded into it.
    """
    state = model.state_dict()  # also ends the time that FSDP keeps whole parameters after use
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    once = {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in state.items() if name not in every - once}


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's adapters; see :func:`state_of`."""
    return {name: tensor for name, tensor in state_of(model).items() if ".lora_" in name}


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter, whole, on every rank, by its Hugging Face name. A collective.

    Of a layer with an adapter it is W + s·B·A, computed into a new tensor: adding to W and taking
    off again would change it a little each time.
    """
    state = state_of(model)
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        full = whole(tensor)
        layer, base, rest = name.partition(_BASE)
        if base and rest == "weight":
            scaling: Any = model.get_submodule(layer).scaling
            b, a = whole(state[layer + _B]).float(), whole(state[layer + _A]).float()
            full = full + (scaling["default"] * (b @ a)).to(full.dtype)
        yield (f"{layer}.{rest}" if base else name), full


def whole(tensor: Tensor) -> Tensor:
    """A tensor without sharding. A collective when it is sharded."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full.detach()
    return tensor.detach()
