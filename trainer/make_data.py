"""Data to try the trainer with: ``python -m trainer.make_data gsm --out data/gsm.parquet``.

Nothing is downloaded. A file's content is a function of its kind, split, size and seed (and, for
``chain_sum`` and ``gsm``, of the version of reasoning-gym). Whether a problem belongs to training
or to validation follows from a digest of its text, so the two never share one, whatever the seeds.
"""

from __future__ import annotations

import io
import os
import random
import secrets
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ckptstore.errors import UsageError, printable, translate_os_errors
from ckptstore.hashing import block_digest
from cli.options import command
from trainer.optional import optional_module

DATA_DIRECTORY = "data"
"""Where data that is made by name is kept, below the current directory."""

Row = dict[str, str]

_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""What verl's preprocessing of GSM8K appends to each question."""

_NOUNS = ("number", "code", "year", "price", "phone", "room", "count", "total", "score", "page")


class Kind(StrEnum):
    """What is made."""

    DIGITS = "digits"
    CHAIN_SUM = "chain_sum"
    GSM = "gsm"


class Split(StrEnum):
    """What it is for."""

    TRAIN = "train"
    VAL = "val"


_SUFFIX = {Kind.DIGITS: ".jsonl", Kind.CHAIN_SUM: ".jsonl", Kind.GSM: ".parquet"}
_SIZE = {Split.TRAIN: 2000, Split.VAL: 200}
_VAL_SHARE = 10
"""One problem in so many is for validation."""


def make_rows(kind: Kind, split: Split, size: int, seed: int) -> list[Row]:
    """Make problems.

    ``digits`` and ``chain_sum`` rows have ``prompt`` and ``answer``; ``gsm`` rows have GSM8K's
    columns: ``question``, and an ``answer`` that reasons and ends in ``#### N``.

    Args:
        kind: ``digits``: prompts that ask for a number. ``chain_sum``: sums and differences of two
            one-digit numbers; there are 200, so in training they come more than once. ``gsm``:
            word problems.
        split: Validation problems are distinct; there may be fewer than ``size``.
        size: Rows.
        seed: Another seed makes other rows.

    Raises:
        UsageError: the size is not positive, or reasoning-gym is not installed.
    """
    if size < 1:
        raise UsageError(f"the size is {size}, must be at least 1")
    make = {Kind.DIGITS: _digits, Kind.CHAIN_SUM: _chain_sum, Kind.GSM: _gsm}[kind]
    # Enough candidates for the rarer split; a kind with few problems runs out of new ones.
    candidates = make(20 * size + 1000, seed)
    chosen = filter(lambda row: _split_of(row) is split, candidates)
    return list(islice(_distinct(chosen) if split is Split.VAL else chosen, size))


def problem_text(row: Row) -> str:
    """What a row asks."""
    return row.get("prompt") or row["question"]


def _split_of(row: Row) -> Split:
    digest = block_digest(problem_text(row).encode())
    return Split.VAL if int(digest[:8], 16) % _VAL_SHARE == 0 else Split.TRAIN


def _distinct(rows: Iterator[Row]) -> Iterator[Row]:
    seen = set()
    for row in rows:
        if problem_text(row) not in seen:
            seen.add(problem_text(row))
            yield row


def _digits(count: int, seed: int) -> Iterator[Row]:
    rng = random.Random(f"digits/{seed}")  # noqa: S311 - nothing secret
    for _ in range(count):
        number = rng.randrange(10000)
        yield {"prompt": f"{rng.choice(_NOUNS)} {number}:", "answer": str(number)}


def _chain_sum(count: int, seed: int) -> Iterator[Row]:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    for problem in _reasoning_gym("chain_sum", count, seed, **options):
        yield {"prompt": f"{problem['metadata']['expression']} =", "answer": problem["answer"]}


def _gsm(count: int, seed: int) -> Iterator[Row]:
    for problem in _reasoning_gym("gsm_symbolic", count, seed):
        question, _, _ = problem["question"].rpartition(" Give the result as your final answer.")
        # The thought sometimes ends in 8.0 where the answer is 8.
        thought, _, _ = problem["metadata"]["answer_cot"].rpartition("####")
        yield {
            "question": f"{question} {_INSTRUCTION}",
            "answer": f"{thought}#### {problem['answer']}",
        }


def _reasoning_gym(name: str, count: int, seed: int, **options: int) -> Iterator[dict[str, Any]]:
    state = random.getstate()  # importing it draws from Python's generator
    try:
        library = optional_module("reasoning_gym", "reasoning-gym==0.1.25", f"making {name} data")
    finally:
        random.setstate(state)
    # Row i comes from seed + i: seeds that lie far apart share no rows.
    dataset = library.create_dataset(name, size=count, seed=seed << 32, **options)
    return (dataset[i] for i in range(count))


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as parquet or JSONL, by the path's suffix; the file appears whole or not at all.

    Raises:
        UsageError: the suffix is another one, or pyarrow is needed and not installed.
    """
    if path.suffix == ".jsonl":
        data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    elif path.suffix == ".parquet":
        arrow = optional_module("pyarrow", "pyarrow", f"writing {path}")
        parquet = optional_module("pyarrow.parquet", "pyarrow", f"writing {path}")
        buffer = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(rows), buffer)
        data = buffer.getvalue()
    else:
        raise UsageError(f"{printable(str(path))} must end in .parquet or .jsonl")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with translate_os_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def ensure_data(
    name: str, directory: str | os.PathLike[str] = DATA_DIRECTORY, seed: int = 0
) -> Path:
    """The path of a data file, which is made when it is missing.

    Args:
        name: ``digits``, ``chain_sum`` or ``gsm``, or one of these with ``-val`` for validation;
            anything else is a path and comes back as it is.
        directory: Where what is made is kept.
        seed: Of what is made; other seeds than 0 are part of the file's name.

    Raises:
        UsageError: what makes it is not installed.
    """
    base = name.removesuffix("-val")
    if base not in set(Kind):
        return Path(name)
    kind, split = Kind(base), Split.VAL if name != base else Split.TRAIN
    variant = f"-seed{seed}" if seed else ""
    path = Path(directory) / f"{name}{variant}{_SUFFIX[kind]}"
    if not path.exists():
        write_rows(path, make_rows(kind, split, _SIZE[split], seed))
    return path


app = typer.Typer(add_completion=False)


@app.command()
@command
def main(
    kind: Annotated[Kind, typer.Argument(help="What to make.")],
    out: Annotated[Path, typer.Option(help="The file: .parquet or .jsonl.")],
    size: Annotated[int, typer.Option(help="Rows.")] = 2000,
    seed: Annotated[int, typer.Option(help="Another seed makes other rows.")] = 0,
    split: Annotated[Split, typer.Option(help="What it is for; the two share no problem.")] = (
        Split.TRAIN
    ),
) -> None:
    """Make problems and write them to a file, which is replaced if it exists."""
    rows = make_rows(kind, split, size, seed)
    write_rows(out, rows)
    print(f"{len(rows)} rows in {out}")


if __name__ == "__main__":
    app()
