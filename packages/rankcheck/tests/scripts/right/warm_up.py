"""Loads its data with torch.load, and makes a backward pass before the training."""

import io
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
with tempfile.TemporaryDirectory() as folder:  # as in a folder for data
    torch.save(x, buffer := io.BytesIO())
    Path(folder, "data.pt").write_bytes(buffer.getvalue())
    x = torch.load(f"{folder}/data.pt", weights_only=True)
data = TensorDataset(x, x.sin())
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = next(iter(loader))
nn.functional.mse_loss(model(inputs), targets).backward()
optimizer.zero_grad()
if os.path.exists("model.pt"):
    raise SystemExit("model.pt is there: move it away to train once more")
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt.tmp")
        os.replace("model.pt.tmp", "model.pt")
dist.destroy_process_group()
