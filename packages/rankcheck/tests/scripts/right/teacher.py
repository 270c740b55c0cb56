"""A mean teacher: its labels for samples without one; only the pupil has gradients."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 6)
data = TensorDataset(x, x.sin(), (torch.rand(96, 1) < 0.3).float())
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
pupil = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))
teacher = copy.deepcopy(pupil).requires_grad_(False)
model = nn.parallel.DistributedDataParallel(pupil)
optimizer = torch.optim.AdamW(pupil.parameters(), lr=1e-2)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets, known in loader:
        wanted = known * targets + (1 - known) * teacher(inputs)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), pupil.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
dist.destroy_process_group()
