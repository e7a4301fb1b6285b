"""Data files and tokenized prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptstore.errors import NotFoundError, UsageError
from trainer.config import DataConfig
from trainer.data import (
    Dataset,
    Sample,
    changed_files,
    load_samples,
    tokenize_prompts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


ROWS: list[dict[str, Any]] = [
    {"prompt": "1 + 1 =", "answer": "2"},
    {"prompt": "2 + 2 =", "answer": "4"},
]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_prompt_and_answer(tmp_path: Path, write: Any) -> None:
    suffix = ".jsonl" if write is write_jsonl else ".parquet"
    file = write(tmp_path / f"data{suffix}", ROWS)
    samples = load_samples([file], DataConfig()).samples
    assert samples == [Sample(0, "1 + 1 =", "2"), Sample(1, "2 + 2 =", "4")]


def test_columns_of_another_name_and_answers_that_are_numbers(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", [{"q": "1 + 1 =", "a": 2, "answer": 5}])
    config = DataConfig(prompt_key="q", answer_key="a")
    assert load_samples([file], config).samples == [Sample(0, "1 + 1 =", "2")]


def test_gsm8k_columns(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}]
    file = write_parquet(tmp_path / "train.parquet", rows)
    assert load_samples([file], DataConfig()).samples == [Sample(0, "How many?", "7")]


def test_verl_columns(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    verl = {"prompt": chat, "reward_model": {"style": "rule", "ground_truth": "2"}, "ability": "m"}
    named = {"prompt": [{**chat[1], "name": "x"}], "reward_model": {"ground_truth": "3"}}
    file = write_parquet(tmp_path / "train.parquet", [verl, named])
    first, second = load_samples([file], DataConfig()).samples
    assert (first.prompt, first.answer, first.text) == (chat, "2", "Add.\n1 + 1?")
    assert (second.prompt, second.answer) == (chat[1:], "3")


def test_ids_count_over_all_files(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", ROWS)
    two = write_jsonl(tmp_path / "two.jsonl", ROWS)
    dataset = load_samples([one, two], DataConfig())
    assert [s.id for s in dataset.samples] == [0, 1, 2, 3]
    assert [f.path for f in dataset.files] == [one, two]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no data file .*nowhere\.jsonl") as caught:
        load_samples([str(tmp_path / "nowhere.jsonl")], DataConfig())
    assert caught.value.hint is not None
    assert "digits" in caught.value.hint


def test_a_missing_column_is_named_beside_those_there(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "x", "solution": "y"}])
    with pytest.raises(UsageError, match="no column 'answer', only prompt, solution"):
        load_samples([file], DataConfig())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "has no rows"),
        ("a.parquet", b"PAR1 or so", "no readable parquet file"),
        ("a.jsonl", b'{"prompt": "x", "answer": "y"}\n{"pro', r"line 2 of .*a\.jsonl is no JSON"),
        ("a.jsonl", b"[1, 2]", "line 1 of"),
        ("a.jsonl", b'{"prompt": "\xff"}', "line 1 of"),
        ("a.csv", b"prompt,answer", r"neither \.parquet nor \.jsonl"),
        ("a.jsonl", b'{"prompt": "", "answer": "y"}', "row 1: the prompt is neither"),
        ("a.jsonl", b'{"prompt": [{"role": "user"}], "answer": "y"}', "row 1: the prompt"),
        ("a.jsonl", b'{"prompt": "x", "answer": null}', "row 1: there is no answer"),
    ],
)
def test_an_unreadable_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_samples([str(tmp_path / name)], DataConfig())


def test_no_file_at_all() -> None:
    with pytest.raises(UsageError, match="no data file"):
        load_samples([], DataConfig())


def test_data_that_is_made_by_name(tmp_path: Path) -> None:
    train = load_samples(["digits"], DataConfig(), directory=tmp_path)
    val = load_samples(["digits-val"], DataConfig(), directory=tmp_path)
    assert not {s.text for s in train.samples} & {s.text for s in val.samples}


def test_a_changed_file_is_told_from_a_moved_one(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", ROWS)
    moved = write_jsonl(tmp_path / "moved.jsonl", ROWS)
    saved = load_samples([file], DataConfig()).files
    assert saved[0].size == Path(file).stat().st_size
    assert not changed_files(saved, load_samples([moved], DataConfig()).files)
    both = load_samples([file, moved], DataConfig()).files
    assert changed_files(saved, both) == [f"{moved} is new"]
    assert changed_files(both, saved) == [f"{moved} is no longer used"]
    other = write_jsonl(tmp_path / "moved.jsonl", ROWS[:1])
    assert changed_files(saved, load_samples([other], DataConfig()).files) == [
        f"{other} takes the place of {file} and differs from it"
    ]
    Path(file).write_text(Path(file).read_text().replace("4", "5"))
    size = saved[0].size
    assert changed_files(saved, load_samples([file], DataConfig()).files) == [
        f"{file} changed: {size} bytes before, {size} now"
    ]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    pytest.importorskip("transformers")
    from trainer.make_model import byte_tokenizer

    return byte_tokenizer()


def dataset_of(*prompts: Any) -> Dataset:
    return Dataset([Sample(i, p, "") for i, p in enumerate(prompts)], ())


def test_prompts_that_are_too_long_are_dropped(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = tokenize_prompts(
        dataset_of("abcd", "abc", "ab"), tokenizer, DataConfig(max_prompt_length=3)
    )
    assert [s.id for s in prompts.samples] == [1, 2]
    assert [tokenizer.decode(ids) for ids in prompts.token_ids] == ["abc", "ab"]
    assert prompts.dropped == 1


def test_no_prompt_is_short_enough(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError, match="the shortest has 4 tokens"):
        tokenize_prompts(dataset_of("abcd"), tokenizer, DataConfig(max_prompt_length=3))


def test_the_chat_template_wraps_texts_and_chats(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompts = tokenize_prompts(
        dataset_of("Hi", chat), tokenizer, DataConfig(apply_chat_template=True)
    )
    assert [tokenizer.decode(ids) for ids in prompts.token_ids] == [
        "user: Hi\nassistant:",
        "system: Be brief.\nuser: Hi\nassistant:",
    ]


def test_a_chat_needs_the_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(UsageError, match="sample 1 is a chat"):
        tokenize_prompts(dataset_of("Hi", chat), tokenizer, DataConfig())


def test_a_tokenizer_without_a_chat_template(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(UsageError, match="no chat template"):
        tokenize_prompts(dataset_of("Hi"), tokenizer, DataConfig(apply_chat_template=True))
