"""Prompts and answers: from files to batches of token ids, at a position that can be saved."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from ckptstore.errors import NotFoundError, UsageError, printable, translate_os_errors
from ckptstore.hashing import BLOCK_SIZE, block_digest, file_digest
from trainer.config import DataConfig
from trainer.make_data import DATA_DIRECTORY, ensure_data
from trainer.optional import optional_module

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        samples: The samples; a ``Loader`` counts in this list.
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


def epoch_order(count: int, epoch: int, seed: int, *, shuffle: bool) -> list[int]:
    """The order of an epoch's samples: a function of its arguments and nothing else."""
    order = list(range(count))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)  # noqa: S311 - nothing secret
    return order


class LoaderState(msgspec.Struct, kw_only=True, frozen=True):
    """Where a loader stands.

    Attributes:
        epoch: Passes that were finished before the present one.
        position: Samples of this epoch that were handed out.
        consumed: Samples that were handed out in all.
        count: Samples an epoch has.
        batch_size: Of the last batch.
        seed, shuffle: What this epoch's order follows from.
    """

    epoch: int = 0
    position: int = 0
    consumed: int = 0
    count: int
    batch_size: int
    seed: int
    shuffle: bool


class Loader:
    """Batches of indices, from one position for all ranks.

    Batches are full: the end of an epoch that does not fill one is left out, as verl's loader does
    (``drop_last``). An epoch ends when the next batch is asked for, so a position saved after an
    epoch's last batch goes on with the next epoch's first.

    After ``load_state_dict`` with another batch size, the epoch goes on after the samples that it
    handed out, in the same order. With another seed or ``shuffle``, too: the epoch that has begun
    ends in the order that it began in, so that no sample comes twice, and the next one follows the
    new setting.

    Args:
        count: Samples an epoch has.
        batch_size: Samples a batch, over all ranks.
        shuffle: A new order each epoch instead of the dataset's.
        seed: What the orders follow from, with the epoch.

    Raises:
        UsageError: an epoch does not fill a batch.
    """

    def __init__(self, count: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise UsageError(f"data.batch_size is {batch_size}, must be at least 1")
        if batch_size > count:
            raise UsageError(
                f"data.batch_size is {batch_size}, and the data has {count} samples",
                hint="a smaller data.batch_size, or more data",
            )
        self._next = LoaderState(count=count, batch_size=batch_size, seed=seed, shuffle=shuffle)
        self._start(self._next)

    def _start(self, state: LoaderState) -> None:
        self._state = state
        self._order = epoch_order(state.count, state.epoch, state.seed, shuffle=state.shuffle)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in a whole epoch."""
        return self._next.count // self._next.batch_size

    @property
    def epoch_ended(self) -> bool:
        """Whether the next batch is the first of another epoch."""
        return self._state.count - self._state.position < self._next.batch_size

    def next_batch(self) -> tuple[int, list[int]]:
        """The epoch, counted from 0, and the indices of the next batch."""
        size = self._next.batch_size
        if self.epoch_ended:
            self._start(
                msgspec.structs.replace(
                    self._next, epoch=self._state.epoch + 1, consumed=self._state.consumed
                )
            )
        start = self._state.position
        self._state = msgspec.structs.replace(
            self._state,
            position=start + size,
            consumed=self._state.consumed + size,
            batch_size=size,
        )
        return self._state.epoch, self._order[start : start + size]

    def state_dict(self) -> dict[str, int | bool]:
        """The position, as JSON can hold it (``LoaderState`` says what is what)."""
        return msgspec.structs.asdict(self._state)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where another loader was.

        Raises:
            UsageError: the state is no loader's, or is from data with another number of samples.
        """
        try:
            loaded = msgspec.convert(dict(state), LoaderState)
        except msgspec.ValidationError as error:
            raise UsageError(f"this is no state of a data loader: {error}") from error
        count = self._next.count
        if loaded.count != count:
            raise UsageError(
                f"the data had {loaded.count} samples when the checkpoint was saved and has"
                f" {count} now, so the position in it means nothing",
                hint="train on the same data files with the same data.max_prompt_length,"
                " or start a new run with trainer.resume_from",
            )
        if loaded.epoch < 0 or not 0 <= loaded.position <= count:
            raise UsageError(
                f"this is no state of a data loader: position {loaded.position} of {count}"
                f" in epoch {loaded.epoch}"
            )
        self._start(loaded)
