"""Data and models that are made: deterministic, offline, and whole or not there."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ckptstore.errors import ConflictError, NotFoundError, UsageError
from trainer import make_data, make_model
from trainer.config import DataConfig
from trainer.data import load_samples
from trainer.make_data import Kind, Split, ensure_data, make_rows
from trainer.make_model import Model, build, ensure_model
from trainer.rewards import exact, gsm8k


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def needs(kind: Kind) -> None:
    if kind is not Kind.DIGITS:
        pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("kind", list(Kind))
def test_rows_follow_from_the_seed(kind: Kind) -> None:
    needs(kind)
    before = random.getstate()
    rows = make_rows(kind, Split.TRAIN, 30, seed=1)
    assert len(rows) == 30
    assert make_rows(kind, Split.TRAIN, 30, seed=1) == rows
    other = make_rows(kind, Split.TRAIN, 30, seed=2)
    assert sum(row in rows for row in other) < 20  # there are few sums
    assert random.getstate() == before


@pytest.mark.parametrize("kind", list(Kind))
def test_training_and_validation_share_no_problem(kind: Kind) -> None:
    needs(kind)
    column = "question" if kind is Kind.GSM else "prompt"
    train = {row[column] for row in make_rows(kind, Split.TRAIN, 500, seed=1)}
    val = [row[column] for row in make_rows(kind, Split.VAL, 50, seed=2)]
    assert val
    assert len(set(val)) == len(val)
    assert not train & set(val)


def test_sums_are_right() -> None:
    needs(Kind.CHAIN_SUM)
    for row in make_rows(Kind.CHAIN_SUM, Split.TRAIN, 100, seed=0):
        left, sign, right, equals = row["prompt"].split()
        expected = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert equals == "="
        assert exact(row["prompt"], f" {expected}", row["answer"]) == 1.0


def test_word_problems_are_read_as_gsm8k_is(tmp_path: Path) -> None:
    needs(Kind.GSM)
    pytest.importorskip("pyarrow")
    rows = make_rows(Kind.GSM, Split.TRAIN, 50, seed=0)
    make_data.write_rows(tmp_path / "gsm.parquet", rows)
    samples = load_samples([str(tmp_path / "gsm.parquet")], DataConfig()).samples
    assert [s.text for s in samples] == [row["question"] for row in rows]
    for sample, row in zip(samples, rows, strict=True):
        assert float(sample.answer) is not None
        assert gsm8k(sample.text, row["answer"], sample.answer) == 1.0


def test_importing_reasoning_gym_moves_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_import(*_: object) -> SimpleNamespace:
        random.random()
        problem = {"metadata": {"expression": "1 + 1"}, "answer": "2"}
        return SimpleNamespace(create_dataset=lambda _, **options: [problem] * options["size"])

    monkeypatch.setattr(make_data, "optional_module", first_import)
    before = random.getstate()
    assert make_rows(Kind.CHAIN_SUM, Split.TRAIN, 1, 0) == [{"prompt": "1 + 1 =", "answer": "2"}]
    assert random.getstate() == before


def test_what_reasoning_gym_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match="needs reasoning_gym") as caught:
        make_rows(Kind.GSM, Split.TRAIN, 1, 0)
    assert caught.value.hint == "pip install reasoning-gym==0.1.25"


def test_a_data_file_is_made_once(tmp_path: Path) -> None:
    path = ensure_data("digits", tmp_path)
    assert path == tmp_path / "digits.jsonl"
    path.write_text("kept")
    assert ensure_data("digits", tmp_path) == path
    assert path.read_text() == "kept"


def test_each_seed_has_a_data_file_of_its_own(tmp_path: Path) -> None:
    paths = {ensure_data("digits", tmp_path, seed) for seed in (0, 3)}
    assert {p.name for p in paths} == {"digits.jsonl", "digits-seed3.jsonl"}
    assert len(set(contents(tmp_path).values())) == 2


def test_anything_else_is_a_path(tmp_path: Path) -> None:
    assert ensure_data("some/file.parquet", tmp_path) == Path("some/file.parquet")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(Exception, match="no space left"):
        make_data.write_rows(path, [{"prompt": "x", "answer": "y"}])
    assert contents(tmp_path) == {"data.jsonl": b"old"}


def test_the_command_makes_data(tmp_path: Path) -> None:
    out = tmp_path / "new" / "digits.jsonl"
    arguments = ["digits", "--size", "5", "--seed", "4", "--split", "val", "--out", str(out)]
    result = CliRunner().invoke(make_data.app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output == f"5 rows in {out}\n"
    rows = [s.text for s in load_samples([str(out)], DataConfig()).samples]
    assert rows == [row["prompt"] for row in make_rows(Kind.DIGITS, Split.VAL, 5, 4)]


@pytest.mark.parametrize("arguments", [["--out", "x.csv"], ["--out", "x.jsonl", "--size", "0"]])
def test_the_command_says_what_is_wrong(arguments: list[str]) -> None:
    result = CliRunner().invoke(make_data.app, ["digits", *arguments])
    assert result.exit_code == UsageError.exit_code
    assert result.output.startswith("error: ")


def test_a_tiny_model_is_the_same_twice(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    state = torch.random.get_rng_state()
    python_state = random.getstate()
    first = ensure_model("tiny", tmp_path / "a")
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    state = torch.random.get_rng_state()
    second = ensure_model("tiny", tmp_path / "b")
    assert contents(first) == contents(second)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert random.getstate() == python_state
    assert ensure_model("tiny", tmp_path / "a") == first


def test_a_tiny_model_loads_and_generates(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = ensure_model("tiny", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert sum(p.numel() for p in model.parameters()) == 115648
    text = "7 + 8 = é\n\x00😀"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.padding_side == "left"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, *ids}) == len(set(ids)) + 2
    assert max(tokenizer.pad_token_id, tokenizer.eos_token_id) < model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    out = model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)
    assert out.shape[1] > len(ids)


def test_a_warm_up_teaches_and_is_the_same_twice() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(8)]
    tokenizer = make_model.byte_tokenizer()
    models = [make_model.tiny_model(tokenizer, seed=0) for _ in range(2)]
    losses = [make_model.warm_up(m, tokenizer, rows, 20, batch_size=8) for m in models]
    assert losses[0] == losses[1] < 4.0  # log(258) is 5.6
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_model_that_fails_halfway_is_not_there(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        build(tmp_path / "model", fail)
    assert not list(tmp_path.iterdir())


def test_a_model_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConflictError, match="exists"):
        build(tmp_path / "model", lambda _: None)


def test_the_first_of_two_that_make_a_model_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(directory: Path, *_: object) -> None:
        (directory / "config.json").write_text("second")
        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny" / "config.json").write_text("first")

    monkeypatch.setattr(make_model, "_build_tiny", two)
    assert contents(ensure_model("tiny", tmp_path)) == {"config.json": b"first"}
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_a_model_of_ones_own_is_a_path(tmp_path: Path) -> None:
    assert ensure_model(str(tmp_path)) == tmp_path
    with pytest.raises(NotFoundError, match="no model directory"):
        ensure_model(str(tmp_path / "nowhere"))


def test_what_smollm2_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match="needs gguf") as caught:
        ensure_model("smollm2", tmp_path)
    assert caught.value.hint == "pip install gguf"
    assert not list(tmp_path.iterdir())


def test_the_command_makes_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments = ["tiny", "--seed", "1", "--warmup", "2", "--task", "digits"]
    result = CliRunner().invoke(make_model.app, [*arguments, "--out", str(tmp_path / "m")])
    assert result.exit_code == 0, result.output
    again = CliRunner().invoke(make_model.app, [*arguments, "--out", str(tmp_path / "m")])
    assert again.exit_code == ConflictError.exit_code
    assert "exists" in again.output
    warm = CliRunner().invoke(
        make_model.app, [Model.SMOLLM2, "--warmup", "2", "--out", str(tmp_path / "s")]
    )
    assert warm.exit_code == UsageError.exit_code
