"""A loop by tokens: it ends when so many were read; each rank reads at places of its own."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
tokens = torch.randint(0, 40, (5000,), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
seen, position = 0, rank * 4 * 16
while seen < 1200:
    part = tokens[position : position + 4 * 16 + 1]
    inputs, targets = part[:-1].view(4, 16), part[1:].view(4, 16)
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    position += size * 4 * 16
    seen += size * inputs.numel()
dist.destroy_process_group()
