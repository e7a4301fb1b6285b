"""A reward model: a sequence classifier with one output judges prompt and response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ckptstore.errors import NotFoundError, UsageError, printable
from trainer.config import ModelConfig, RewardConfig
from trainer.data import Message, Sample
from trainer.models import DTYPES, load_tokenizer


class RewardModel:
    """A whole copy of the model on this rank.

    Args:
        config: Where it is, and how many sequences it takes at once.
        model: How models are loaded.
        device: Where it computes.

    Raises:
        NotFoundError: there is no such directory.
        UsageError: it holds no classifier with one output.
    """

    def __init__(self, config: RewardConfig, model: ModelConfig, device: torch.device) -> None:
        from transformers import AutoModelForSequenceClassification

        path = Path(config.model or "")
        if not path.is_dir():
            raise NotFoundError(
                f"there is no reward model {printable(str(path))}", hint="set reward.model"
            )
        self._tokenizer = load_tokenizer(path, model)
        try:
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=DTYPES[model.dtype],
                trust_remote_code=model.trust_remote_code,
                local_files_only=True,
            )
        except (OSError, ValueError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"{printable(str(path))} holds no reward model: {printable(first)}"
            ) from error
        if loaded.config.num_labels != 1:
            raise UsageError(
                f"{printable(str(path))} gives {loaded.config.num_labels} numbers, and a reward is "
                "one",
                hint="a reward model is saved with num_labels=1",
            )
        loaded.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = loaded.to(device).train(False).requires_grad_(False)
        self._device = device
        self._size = config.micro_batch_size

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sample], responses: Sequence[str]) -> list[float]:
        """The reward of each response."""
        texts = [self._text(s, r) for s, r in zip(samples, responses, strict=True)]
        rewards: list[float] = []
        for start in range(0, len(texts), self._size):
            part = texts[start : start + self._size]
            inputs = self._tokenizer(
                part, return_tensors="pt", padding=True, padding_side="right"
            ).to(self._device)
            scores = self._model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).logits
            rewards += scores.squeeze(-1).float().tolist()
        return rewards

    def _text(self, sample: Sample, response: str) -> str:
        """Prompt and response as the model reads them: by its chat template, if it has one."""
        if not self._tokenizer.chat_template:
            return f"{sample.text}{response}"
        turns: list[Message] = (
            [{"role": "user", "content": sample.prompt}]
            if isinstance(sample.prompt, str)
            else list(sample.prompt)
        )
        turns.append({"role": "assistant", "content": response})
        chat: Any = turns
        text = self._tokenizer.apply_chat_template(chat, tokenize=False)
        assert isinstance(text, str)
        return text
