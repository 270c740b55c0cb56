"""Each rank holds a part of the list, and the parts are dealt anew each epoch."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    order = random.Random(epoch).sample(range(96), 96)
    own = x[order[rank::size]]
    for inputs in DataLoader(own, 8):
        loss = (model(inputs) - inputs.abs()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
