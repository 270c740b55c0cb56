"""Computes for longer than a hang would be waited for, before a step, and prints nothing."""

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
if dist.get_rank() == 0:  # such as a tokenizer's work
    end = time.process_time() + 40
    while time.process_time() < end:
        torch.randn(64, 64) @ torch.randn(64, 64)
dist.barrier()
generator = torch.Generator().manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(16, 8, generator=generator)
    loss = nn.functional.mse_loss(model(x), x.sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
