"""Hybrid sharding (HSDP): four spawned processes, two replicas of a model in two shards each."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, size):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for (inputs,) in loader:
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    mp.spawn(train, (4,), nprocs=4)
