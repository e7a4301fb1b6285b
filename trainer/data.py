"""Prompts and answers: from files to token ids."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from ckptstore.errors import NotFoundError, UsageError, printable, translate_os_errors
from ckptstore.hashing import BLOCK_SIZE, block_digest, file_digest
from trainer.config import DataConfig
from trainer.loader import Loader
from trainer.make_data import DATA_DIRECTORY, ensure_data
from trainer.optional import optional_module

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = [
    "DataFile",
    "Dataset",
    "Loader",
    "Message",
    "Prompts",
    "Sample",
    "changed_files",
    "load_samples",
    "tokenize_prompts",
]


class Message(TypedDict):
    """A turn of a chat."""

    role: str
    content: str


class Sample(msgspec.Struct, frozen=True):
    """A prompt and what a good response would hold.

    Attributes:
        id: Its index in the dataset, over all files.
        prompt: A text, or the turns of a chat.
        answer: The expected answer, for the reward.
    """

    id: int
    prompt: str | list[Message]
    answer: str

    @property
    def text(self) -> str:
        """The prompt as a text: the contents of a chat's turns, a line each."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(message["content"] for message in self.prompt)


class DataFile(msgspec.Struct, frozen=True):
    """The identity of a data file, as a checkpoint keeps it.

    Attributes:
        path: Where it was read.
        size: In bytes.
        digest: Of its content, as the store computes a file's digest.
    """

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class Dataset:
    """All samples of some files, in the files' order."""

    samples: list[Sample]
    files: tuple[DataFile, ...]


def load_samples(
    files: Sequence[str],
    config: DataConfig,
    seed: int = 0,
    directory: str | os.PathLike[str] = DATA_DIRECTORY,
) -> Dataset:
    """Read data files.

    Three layouts are understood, by the columns of each file: ``config.prompt_key`` and
    ``config.answer_key``; GSM8K's ``question`` and ``answer``; and verl's, whose prompt is a list
    of messages and whose answer is ``reward_model.ground_truth``. Of an answer with a ``####`` (a
    chain of thought before the result) the part after the last one is kept.

    Args:
        files: Paths of parquet or JSONL files, or names that ``make_data.ensure_data`` makes.
        config: Names the columns.
        seed: Of data that is made.
        directory: Where such data is kept.

    Raises:
        NotFoundError: a file is missing.
        UsageError: a file is empty or unreadable, or lacks a column or a value.
    """
    samples: list[Sample] = []
    identities = []
    for name in files:
        path = ensure_data(name, directory, seed)
        data = _read(path)
        identities.append(_identity(path, data))
        rows = _rows(path, data)
        read_row = _layout(path, rows, config)
        for number, row in enumerate(rows, 1):
            where = f"{printable(str(path))}, row {number}"
            prompt, answer = read_row(row)
            sample = Sample(len(samples), _prompt(prompt, where), _answer(answer, where))
            samples.append(sample)
    if not samples:
        raise UsageError("no data file is given", hint="set data.train_files")
    return Dataset(samples, tuple(identities))


def changed_files(saved: Sequence[DataFile], now: Sequence[DataFile]) -> list[str]:
    """How the data differs from what a checkpoint was trained on, a sentence each.

    Files are compared in order and by content: one that was moved is the same.
    """
    changes = []
    for old, new in zip(saved, now, strict=False):
        if old.digest != new.digest:
            if old.path == new.path:
                changes.append(f"{old.path} changed: {old.size} bytes before, {new.size} now")
            else:
                changes.append(f"{new.path} takes the place of {old.path} and differs from it")
    changes += [f"{old.path} is no longer used" for old in saved[len(now) :]]
    changes += [f"{new.path} is new" for new in now[len(saved) :]]
    return changes


def _read(path: Path) -> bytes:
    if not path.exists():
        raise NotFoundError(
            f"there is no data file {printable(str(path))}",
            hint="give a parquet or JSONL file, or one of the names digits, chain_sum and gsm",
        )
    with translate_os_errors(f"data file {path}"):
        data = path.read_bytes()
    if not data:
        raise UsageError(f"the data file {printable(str(path))} is empty")
    return data


def _identity(path: Path, data: bytes) -> DataFile:
    view = memoryview(data)
    blocks = [block_digest(view[i : i + BLOCK_SIZE]) for i in range(0, len(data), BLOCK_SIZE)]
    return DataFile(str(path), len(data), file_digest(len(data), blocks))


def _rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows, ".json": _jsonl_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"the data file {printable(str(path))} is neither .parquet nor .jsonl",
            hint="convert it to one of these; each row needs a prompt and an answer",
        )
    rows = reader(path, data)
    if not rows:
        raise UsageError(f"the data file {printable(str(path))} has no rows")
    return rows


def _parquet_rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    parquet = optional_module("pyarrow.parquet", "pyarrow", f"reading {path}")
    try:
        rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(data)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise UsageError(f"{printable(str(path))} is no readable parquet file: {error}") from error
    return rows


def _jsonl_rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"line {number} of {printable(str(path))} is no JSON object: {error}",
                hint='JSONL has one object a line, as {"prompt": "7 + 8 =", "answer": "15"}',
            ) from error
    return rows


def _layout(
    path: Path, rows: list[dict[str, Any]], config: DataConfig
) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """How a row of these becomes a prompt and an answer; the first row shows the columns."""
    prompt_key, answer_key = config.prompt_key, config.answer_key
    first = rows[0]
    verl = first.get("reward_model")
    if prompt_key in first and answer_key in first:
        return lambda row: (row.get(prompt_key), row.get(answer_key))
    if prompt_key in first and isinstance(verl, dict) and "ground_truth" in verl:
        return lambda row: (
            row.get(prompt_key),
            (row.get("reward_model") or {}).get("ground_truth"),
        )
    if "question" in first and "answer" in first:
        return lambda row: (row.get("question"), row.get("answer"))
    missing = " and ".join(repr(k) for k in (prompt_key, answer_key) if k not in first)
    raise UsageError(
        f"{printable(str(path))} has no column {missing}, only {printable(', '.join(first))}",
        hint="set data.prompt_key and data.answer_key",
    )


def _prompt(prompt: Any, where: str) -> str | list[Message]:
    try:
        checked = msgspec.convert(prompt, str | list[Message])
    except msgspec.ValidationError:
        checked = ""
    if not checked:
        raise UsageError(f"{where}: the prompt is neither a text nor a list of role and content")
    return checked


def _answer(answer: Any, where: str) -> str:
    if answer is None:
        raise UsageError(f"{where}: there is no answer")
    return str(answer).rpartition("####")[2].strip()


@dataclass(frozen=True)
class Prompts:
    """Samples whose prompts are short enough, in the dataset's order.

    Attributes:
        samples: The samples; a ``loader.Loader`` counts in this list.
        token_ids: Each one's prompt in tokens, without padding.
        dropped: How many samples of the dataset were too long.
    """

    samples: list[Sample]
    token_ids: list[list[int]]
    dropped: int


def tokenize_prompts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Prompts:
    """Tokenize all prompts and drop those over ``config.max_prompt_length``.

    Raises:
        UsageError: no prompt is short enough, the tokenizer has no chat template but one is asked
            for, or a prompt is a chat and none is asked for.
    """
    if config.apply_chat_template and not tokenizer.chat_template:
        raise UsageError(
            "data.apply_chat_template is set, and the model's tokenizer has no chat template",
            hint="data.apply_chat_template=false, or another model",
        )
    texts = [_prompt_text(sample, tokenizer, config) for sample in dataset.samples]
    # A chat template writes the special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=not config.apply_chat_template)
    all_ids: list[list[int]] = encoded["input_ids"]
    kept = [i for i, ids in enumerate(all_ids) if len(ids) <= config.max_prompt_length]
    if not kept:
        raise UsageError(
            f"every prompt is longer than data.max_prompt_length={config.max_prompt_length};"
            f" the shortest has {min(map(len, all_ids))} tokens"
        )
    return Prompts(
        [dataset.samples[i] for i in kept], [all_ids[i] for i in kept], len(all_ids) - len(kept)
    )


def _prompt_text(sample: Sample, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    if not config.apply_chat_template:
        if isinstance(sample.prompt, str):
            return sample.prompt
        raise UsageError(
            f"the prompt of sample {sample.id} is a chat", hint="data.apply_chat_template=true"
        )
    if isinstance(sample.prompt, str):
        chat = [{"role": "user", "content": sample.prompt}]
    else:
        chat = [{"role": m["role"], "content": m["content"]} for m in sample.prompt]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text
