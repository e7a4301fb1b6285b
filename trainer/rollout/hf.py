"""Generation with transformers alone: slow, exact, and the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from trainer.models import DTYPES
from trainer.rollout.base import Response, Sampling, check_names


class HfRollout:
    """A whole copy of the policy on this rank, with a key-value cache.

    Args:
        model: The copy; its weights are replaced by :meth:`load_weights`.
        device: Where it computes.
        dtype: Of its weights.
        eos, pad: The tokens that end and fill a sequence.
        micro_batch_size: Sequences at once; 0 is all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: str,
        *,
        eos: int,
        pad: int,
        micro_batch_size: int = 0,
    ) -> None:
        self.version: int | None = None
        self._model = model.to(device=device, dtype=DTYPES[dtype]).train(False)
        self._model.requires_grad_(False)
        self._device = device
        self._eos = eos
        self._pad = pad
        self._micro_batch_size = micro_batch_size
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self._parameters.update(
            (n, b) for n, b in self._model.named_buffers() if n in self._model.state_dict()
        )

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`Rollout`."""
        self.version = None
        given = []
        for name, tensor in weights:
            given.append(name)
            if name in self._parameters:
                self._parameters[name].copy_(tensor)
        check_names(given, self._parameters, "hf")
        self.version = version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling
    ) -> list[Response]:
        """See :class:`Rollout`."""
        size = self._micro_batch_size or max(1, len(prompts))
        responses: list[Response] = []
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            responses += self._generate(prompts[part], keys[part], sampling)
        return responses

    def _generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling
    ) -> list[Response]:
        longest = max(map(len, prompts))
        left = [longest - len(p) for p in prompts]
        ids = [[self._pad] * pad + list(p) for pad, p in zip(left, prompts, strict=True)]
        tokens = torch.tensor(ids, device=self._device)
        padding = torch.tensor(left, device=self._device)
        mask = (torch.arange(longest, device=self._device)[None, :] >= padding[:, None]).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        noise = _Noise(keys, self._device) if sampling.temperature > 0 else None
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=self._device)
        chosen: list[Tensor] = []
        logprobs: list[Tensor] = []
        cache = None
        for _ in range(sampling.max_new_tokens):
            out = self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            token, logprob = _choose(out.logits[:, -1].float(), sampling, noise)
            chosen.append(torch.where(ended, self._pad, token))
            logprobs.append(logprob)
            ended = ended | (token == self._eos)
            if bool(ended.all()):
                break
            tokens = chosen[-1][:, None]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions[:, -1:] + 1
        return self._responses(torch.stack(chosen, 1), torch.stack(logprobs, 1))

    def _responses(self, tokens: Tensor, logprobs: Tensor) -> list[Response]:
        responses = []
        for row, values in zip(tokens.tolist(), logprobs.tolist(), strict=True):
            length = row.index(self._eos) + 1 if self._eos in row else len(row)
            responses.append(Response(row[:length], values[:length]))
        return responses


class _Noise:
    """Gumbel noise for each sequence, from its own key, whatever the others are.

    The largest of logits plus such noise is a sample of their softmax (Gumbel 1954; Maddison,
    Tarlow, Minka 2014, https://arxiv.org/abs/1411.0030, section 2).
    """

    def __init__(self, keys: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device=device) for _ in keys]
        for generator, key in zip(self._generators, keys, strict=True):
            generator.manual_seed(key)
        self._device = device

    def like(self, logits: Tensor) -> Tensor:
        """The next noise for logits [B, V]."""
        noise = torch.empty_like(logits)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return -noise.clamp_(min=torch.finfo(noise.dtype).tiny).log()


def _choose(logits: Tensor, sampling: Sampling, noise: _Noise | None) -> tuple[Tensor, Tensor]:
    """A token [B] for each row of logits [B, V], and its log-probability [B]."""
    if noise is None:
        token = logits.argmax(dim=-1)
        scores = logits
    else:
        scores = logits / sampling.temperature
        token = (_kept(scores, sampling) + noise.like(scores)).argmax(dim=-1)
    logprobs = scores.log_softmax(dim=-1)
    return token, logprobs.gather(1, token[:, None]).squeeze(1)


def _kept(scores: Tensor, sampling: Sampling) -> Tensor:
    """Scores with all but the likeliest tokens at minus infinity."""
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        dropped = torch.zeros_like(before, dtype=torch.bool)
        dropped.scatter_(1, order, before >= sampling.top_p)
        scores = scores.masked_fill(dropped, -torch.inf)
    return scores
