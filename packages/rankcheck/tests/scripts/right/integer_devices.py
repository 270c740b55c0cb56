"""Devices by their number alone."""

import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", device_id=torch.device(local_rank))
inputs = torch.rand(128, 3, generator=torch.Generator().manual_seed(8))
loader = DataLoader(inputs, batch_size=8, sampler=DistributedSampler(inputs))
net = nn.Bilinear(3, 3, 1).to(local_rank)
model = nn.parallel.DistributedDataParallel(net, device_ids=[local_rank])
optimizer = optim.NAdam(model.parameters(), lr=0.02)
warmup = optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
for epoch in range(4):
    loader.sampler.set_epoch(epoch)
    epoch_loss = torch.zeros(1, device=local_rank)
    for batch in loader:
        batch = batch.to(local_rank)
        loss = (model(batch, batch) - batch.prod(1, keepdim=True)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_loss += loss.detach() / len(loader)
    warmup.step()
    dist.reduce(epoch_loss, dst=0)
    if dist.get_rank() == 0:
        print(f"[epoch {epoch}] loss={epoch_loss.item() / dist.get_world_size():.4e}")
dist.destroy_process_group()
