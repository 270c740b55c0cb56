"""A sampler that draws with replacement, by weights, with a seed of each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

dist.init_process_group("gloo")
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x[:, 0] > 1).long())
weights = torch.where(data.tensors[1] == 1, 5.0, 1.0)
draw = torch.Generator().manual_seed(dist.get_rank())
sampler = WeightedRandomSampler(weights, 96 // dist.get_world_size(), generator=draw)
loader = DataLoader(data, 8, sampler=sampler)
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
