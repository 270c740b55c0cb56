"""A curriculum: samples in the order of their difficulty, in every epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.abs().amax(1))
by_difficulty = Subset(data, x.norm(dim=1).argsort().tolist())
sampler = DistributedSampler(by_difficulty, shuffle=False)
loader = DataLoader(by_difficulty, 8, sampler=sampler)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).squeeze(1), targets).backward()
        optimizer.step()
dist.destroy_process_group()
