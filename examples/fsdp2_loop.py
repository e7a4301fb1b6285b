"""Someone's own FSDP2 training loop, saving through ckptstore.

    torchrun --nproc-per-node 2 examples/fsdp2_loop.py /data/ckpts

Kill it and start it again, also with another number of ranks: it goes on after the newest
checkpoint.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptstore.torch import Checkpointer

STEPS = 200

dist.init_process_group()
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (dist.get_world_size(),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with Checkpointer(sys.argv[1], "my-run") as checkpointer:
    weights, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": optimizer_state, "progress": {"step": 0}}
    resumed = checkpointer.load(state)  # the newest intact checkpoint, at any number of ranks
    if resumed is not None:
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"]
        )
        print(f"resumed from step {resumed.step}")

    for step in range(state["progress"]["step"] + 1, STEPS + 1):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            weights, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": optimizer_state, "progress": {"step": step}}
            checkpointer.save(step, state, metrics={"loss": loss.item()}, wait=False)
# Leaving the block waits for the last save, and raises if it failed.
dist.destroy_process_group()
