"""The policy as transformers and inference servers read it."""

from __future__ import annotations

from torch import Tensor

from trainer.comm import Comm
from trainer.models import DTYPES, full_weights
from trainer.roles import Learner


def safetensors_of(actor: Learner, dtype: str, comm: Comm) -> bytes | None:
    """The policy's whole weights as a safetensors file, on rank 0 only. A collective.

    Args:
        actor: The policy.
        dtype: What they are stored as.
        comm: The ranks.
    """
    from safetensors.torch import save

    weights: dict[str, Tensor] = {}
    for name, tensor in full_weights(actor.model):
        if comm.is_first:
            weights[name] = tensor.to(device="cpu", dtype=DTYPES[dtype]).contiguous()
    if not comm.is_first:
        return None
    data: bytes = save(weights, metadata={"format": "pt"})
    return data
