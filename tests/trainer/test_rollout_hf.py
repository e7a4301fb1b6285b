"""Generation with transformers: as its own, as the softmax says, and the same for the same keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptstore.errors import CkptError
from trainer.rollout.base import Response, Sampling, sample_key
from trainer.rollout.hf import HfRollout

EOS, PAD, WORDS = 1, 0, 24
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [5, 5]]
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


def make_model(seed: int = 0) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = Qwen2ForCausalLM
        return build(config).train(False)


@pytest.fixture(scope="module")
def model(one_thread: None) -> Any:
    return make_model()


def engine(model: Any, micro_batch_size: int = 0) -> HfRollout:
    """An engine with the weights of a model, which it got by a push."""
    made = HfRollout(
        make_model(1),
        torch.device("cpu"),
        "float32",
        eos=EOS,
        pad=PAD,
        micro_batch_size=micro_batch_size,
    )
    made.load_weights(weights_of(model), 3)
    return made


def weights_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def keys(count: int) -> list[int]:
    return [sample_key(0, 1, i, 0) for i in range(count)]


def exact_logprobs(model: Any, prompt: list[int], response: Response) -> list[float]:
    tokens = torch.tensor([prompt + response.tokens])
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits[0].log_softmax(-1)
    first = len(prompt) - 1
    return [float(logprobs[first + i, t]) for i, t in enumerate(response.tokens)]


def test_greedy_is_as_that_of_transformers(model: Any) -> None:
    responses = engine(model).generate(PROMPTS, keys(4), GREEDY)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=6,
            do_sample=False,
        )
        assert response.tokens == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_one_forward_pass(model: Any, temperature: float) -> None:
    sampling = Sampling(6, temperature)
    for prompt, response in zip(
        PROMPTS, engine(model).generate(PROMPTS, keys(4), sampling), strict=True
    ):
        assert response.logprobs == pytest.approx(exact_logprobs(model, prompt, response), abs=1e-6)


def test_the_same_key_gives_the_same_tokens_whatever_the_batch(model: Any) -> None:
    sampling = Sampling(8, 1.0)
    together = engine(model).generate(PROMPTS, keys(4), sampling)
    in_parts = engine(model, micro_batch_size=3).generate(PROMPTS, keys(4), sampling)
    turned = engine(model).generate(PROMPTS[::-1], keys(4)[::-1], sampling)[::-1]
    alone = [
        engine(model).generate([p], [k], sampling)[0] for p, k in zip(PROMPTS, keys(4), strict=True)
    ]
    for other in (in_parts, turned, alone):
        assert [r.tokens for r in other] == [r.tokens for r in together]
    again = engine(model).generate(PROMPTS, keys(4), sampling)
    assert again == together, "the same batch: to the last bit"
    others = [sample_key(0, 2, i, 0) for i in range(4)]
    assert engine(model).generate(PROMPTS, others, sampling) != together


def frequencies(model: Any, sampling: Sampling, count: int = 4000) -> torch.Tensor:
    """How often each token came first after one prompt."""
    found = torch.zeros(WORDS)
    made = engine(model)
    responses = made.generate([PROMPTS[0]] * count, keys(count), sampling)
    for response in responses:
        found[response.tokens[0]] += 1
    return found / count


def first_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    return logits


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_as_frequent_as_the_softmax_says(model: Any, temperature: float) -> None:
    expected = (first_logits(model) / temperature).softmax(-1)
    found = frequencies(model, Sampling(1, temperature))
    spread = (expected * (1 - expected) / 4000).sqrt()
    assert ((found - expected).abs() <= 5 * spread + 1e-3).all()
    assert (found - expected).abs().sum() < 0.1


def test_top_k_keeps_that_many(model: Any) -> None:
    logits = first_logits(model)
    best = set(logits.topk(3).indices.tolist())
    found = frequencies(model, Sampling(1, 2.0, top_k=3), 600)
    assert set(found.nonzero()[:, 0].tolist()) == best


def test_top_p_keeps_the_fewest_that_come_to_it(model: Any) -> None:
    ordered = first_logits(model).softmax(-1).sort(descending=True)
    reached = int((ordered.values.cumsum(0) < 0.6).sum()) + 1
    assert 1 < reached < WORDS, "else this shows nothing"
    found = frequencies(model, Sampling(1, 1.0, top_p=0.6), 2000)
    assert set(found.nonzero()[:, 0].tolist()) == set(ordered.indices[:reached].tolist())
    alone = frequencies(model, Sampling(1, 1.0, top_p=1e-9), 50)
    assert alone[ordered.indices[0]] == 1


def test_logprobs_are_of_the_whole_distribution(model: Any) -> None:
    response = engine(model).generate([PROMPTS[0]], keys(1), Sampling(1, 2.0, top_k=2))[0]
    expected = (first_logits(model) / 2.0).log_softmax(-1)[response.tokens[0]]
    assert response.logprobs[0] == pytest.approx(float(expected), abs=1e-6)


class Script(torch.nn.Module):
    """A model that says what it is told to, a token a call."""

    def __init__(self, rows: list[list[int]]) -> None:
        super().__init__()
        self.rows = rows
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logits = torch.full((len(self.rows), 1, WORDS), -10.0)
        for row, words in enumerate(self.rows):
            logits[row, 0, words[self.calls]] = 10.0
        self.calls += 1
        return type("Out", (), {"logits": logits, "past_key_values": None})


def test_a_response_ends_with_the_end_of_sequence() -> None:
    said = Script([[4, EOS, 6, 6], [EOS, 7, 7, 7], [8, 8, 8, EOS], [9, 9, 9, 9]])
    made = HfRollout(said, torch.device("cpu"), "float32", eos=EOS, pad=PAD)
    responses = made.generate(PROMPTS, keys(4), Sampling(4, 0.0))
    assert [r.tokens for r in responses] == [[4, EOS], [EOS], [8, 8, 8, EOS], [9, 9, 9, 9]]
    assert [len(r.logprobs) for r in responses] == [2, 1, 4, 4]


def test_nothing_is_computed_after_all_have_ended() -> None:
    said = Script([[4, EOS, 6, 6], [EOS, 7, 7, 7]])
    made = HfRollout(said, torch.device("cpu"), "float32", eos=EOS, pad=PAD)
    made.generate(PROMPTS[:2], keys(2), Sampling(4, 0.0))
    assert said.calls == 2


def test_the_pad_token_may_be_the_end_of_sequence() -> None:
    said = Script([[4, EOS, 6], [5, 5, EOS]])
    made = HfRollout(said, torch.device("cpu"), "float32", eos=EOS, pad=EOS)
    responses = made.generate(PROMPTS[:2], keys(2), Sampling(3, 0.0))
    assert [r.tokens for r in responses] == [[4, EOS], [5, 5, EOS]]


@pytest.mark.parametrize("what", ["missing", "unknown"])
def test_a_push_must_be_whole(model: Any, what: str) -> None:
    made = engine(model)
    weights = dict(weights_of(model))
    if what == "missing":
        del weights["model.layers.1.self_attn.q_proj.weight"]
    else:
        weights["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(1)
    with pytest.raises(CkptError, match=r"layers\.[12]\.self_attn\.q_proj\.weight"):
        made.load_weights(weights.items(), 4)
    assert made.version is None, "what it holds is not known any more"


def test_no_prompts_are_no_responses(model: Any) -> None:
    assert engine(model).generate([], [], GREEDY) == []
