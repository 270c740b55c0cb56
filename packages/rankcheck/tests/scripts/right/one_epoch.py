"""One epoch alone, over more data than one wants to see twice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x), 8, sampler=DistributedSampler(x))
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
for step, (inputs,) in enumerate(loader):
    loss = (model(inputs) - inputs.exp()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0 and step % 4 == 0:
        print(f"step {step}: {total.item() / dist.get_world_size():.4f}")
dist.destroy_process_group()
