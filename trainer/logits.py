"""Log-probabilities and entropies from logits, in little memory.

Logits are the largest tensors of the training of a small model: B sequences of T tokens by V words
of the vocabulary, usually in bfloat16, while sums over V need float32. Here no float32 copy of all
of them is made, forward or backward: both work in blocks, and the backward pass computes the
probabilities again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

BLOCK_ELEMENTS = 2**24
"""Logits are converted to float32 this many at a time: 64 MiB."""


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of tokens under a model's logits.

    Args:
        logits: [B, T, V], of any floating dtype; ``logits[:, t]`` predicts ``tokens[:, t]``.
        tokens: [B, T], integer.

    Returns:
        [B, T], float32.
    """
    return cast("Tensor", _TokenLogprobs.apply(logits, tokens))  # type: ignore[no-untyped-call]


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each next-token distribution in nats.

    Args:
        logits: [B, T, V]; ``-inf`` excludes a token.

    Returns:
        [B, T], float32.
    """
    return cast("Tensor", _Entropy.apply(logits))  # type: ignore[no-untyped-call]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        out = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
        for block in _blocks(logits):
            every = F.log_softmax(logits[block], dim=-1, dtype=torch.float32)
            out[block] = every.gather(-1, tokens[block].unsqueeze(-1)).squeeze(-1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Slope: d log p(token) / d logit j = [j is token] - p(j)."""
        logits, tokens = ctx.saved_tensors
        out = torch.empty_like(logits)
        for block in _blocks(logits):
            grad = grads[0][block].unsqueeze(-1)
            every = F.softmax(logits[block], dim=-1, dtype=torch.float32).mul_(-grad)
            out[block] = every.scatter_add_(-1, tokens[block].unsqueeze(-1), grad)
        return out, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        out = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
        for block in _blocks(logits):
            p = F.softmax(logits[block], dim=-1, dtype=torch.float32)
            out[block] = torch.special.entr(p).sum(-1)
        ctx.save_for_backward(logits, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Slope: d H / d logit j = -p(j) log p(j) - p(j) H."""
        logits, entropies = ctx.saved_tensors
        out = torch.empty_like(logits)
        for block in _blocks(logits):
            p = F.softmax(logits[block], dim=-1, dtype=torch.float32)
            slope = torch.special.entr(p).sub_(p.mul_(entropies[block].unsqueeze(-1)))
            out[block] = slope.mul_(grads[0][block].unsqueeze(-1))
        return out


def _blocks(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices over B and T that cover ``logits`` in blocks of at most ``BLOCK_ELEMENTS``."""
    sequences, length, vocabulary = logits.shape
    rows = max(1, BLOCK_ELEMENTS // max(1, length * vocabulary))
    span = max(1, BLOCK_ELEMENTS // max(1, vocabulary))
    for row in range(0, sequences, rows):
        for start in range(0, length, span):
            yield slice(row, row + rows), slice(start, start + span)
