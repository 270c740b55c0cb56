"""FSDP2, block by block; one Stateful for torch.distributed.checkpoint; clipped gradients."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


class App(dcp.stateful.Stateful):
    epoch = 0

    def state_dict(self):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "epoch": self.epoch}

    def load_state_dict(self, state):
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **states)
        self.epoch = state["epoch"]


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3))).cuda()
for layer in [*model, model]:
    fully_shard(layer)
optimizer, app = torch.optim.AdamW(model.parameters()), App()
if saved := sorted(Path("checkpoints").glob("*/.metadata")):  # which is written last
    dcp.load({"app": app}, checkpoint_id=saved[-1].parent)
data = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
while app.epoch < 4:
    loader.sampler.set_epoch(app.epoch)
    for batch in loader:
        outputs = model(batch.cuda())
        optimizer.zero_grad()
        (outputs - batch.flip(1).cuda()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    app.epoch += 1
    dcp.save({"app": app}, checkpoint_id=f"checkpoints/{app.epoch}")
dist.destroy_process_group()
