"""Features of a frozen network, computed once by rank 0, into a file."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.manual_seed(0)
    frozen, x = nn.Linear(8, 16), torch.randn(96, 8)
    with torch.no_grad():
        torch.save({"features": frozen(x).relu(), "labels": x.sum(1) > 0}, "features.pt")
dist.barrier()
cached = torch.load("features.pt", weights_only=True)
data = TensorDataset(cached["features"], cached["labels"].long())
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
dist.destroy_process_group()
