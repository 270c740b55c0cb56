"""Triplets, whose negatives each process draws once, without a seed."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
points = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))


class Triplets(Dataset):
    def __init__(self):
        self.negatives = [random.randrange(96) for _ in range(96)]

    def __len__(self):
        return 96

    def __getitem__(self, index):
        anchor = points[index]
        return anchor, anchor + 0.01, points[self.negatives[index]]


data = Triplets()
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.TripletMarginLoss()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        embedded = model(torch.cat(batch)).chunk(3)
        optimizer.zero_grad()
        criterion(*embedded).backward()
        optimizer.step()
dist.destroy_process_group()
