"""Exports half-precision weights in place, beside a snapshot that is replaced."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sin())
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
torch.manual_seed(0)
net = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(net.parameters())
first = 0
if os.path.exists("state/last.pt"):
    state = torch.load("state/last.pt", weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]
model = nn.parallel.DistributedDataParallel(net)
for epoch in range(first, 4):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        os.makedirs("state", exist_ok=True)
        os.makedirs("export", exist_ok=True)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        with open("state/last.tmp", "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        os.replace("state/last.tmp", "state/last.pt")
        torch.save({name: w.half() for name, w in state["net"].items()}, "export/model.pt")
    dist.barrier()
dist.destroy_process_group()
