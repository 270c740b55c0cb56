"""A short list, twice, so that an epoch is longer; its length is odd."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(33, 5, generator=torch.Generator().manual_seed(0))
data = ConcatDataset([TensorDataset(x)] * 2)
loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
model = nn.parallel.DistributedDataParallel(nn.Linear(5, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _epoch in range(2):
    for (inputs,) in loader:
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
