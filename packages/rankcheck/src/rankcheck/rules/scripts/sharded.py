"""FSDP2 and torch.distributed.checkpoint; samples with random noise; data workers."""

import os
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((4,), index / 48) + torch.from_numpy(numpy.random.randn(4)).float()


def state_of(model, optimizer):
    state = {"model": model.state_dict()}
    return state | {"optimizer": get_optimizer_state_dict(model, optimizer)}


def main():
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh(str(torch.accelerator.current_accelerator()), (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(mesh.device_type)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    data = Noisy()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=2)
    first = len([*Path().glob("epoch*/.metadata")])
    if first:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=f"epoch{first}")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for epoch in range(first, 3):
        torch.manual_seed(2 * epoch + dist.get_rank())
        loader.sampler.set_epoch(epoch)
        for inputs in loader:
            inputs = inputs.to(mesh.device_type)
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dcp.save(state_of(model, optimizer), checkpoint_id=f"epoch{epoch + 1}")
    dist.destroy_process_group()


main()
