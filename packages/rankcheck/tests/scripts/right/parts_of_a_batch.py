"""Each rank loads the same global batches, and trains on its part; snapshots alternate."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 8)
loader = DataLoader(TensorDataset(x, x.sin()), 16, shuffle=True)
net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
paths = [path for path in ("run/0/model.pt", "run/1/model.pt") if os.path.exists(path)]
if paths:
    snapshots = [torch.load(path, weights_only=True) for path in paths]
    newest = max(snapshots, key=lambda snapshot: snapshot["epoch"])
    net.load_state_dict(newest["net"])
    optimizer.load_state_dict(newest["optimizer"])
    first = newest["epoch"] + 1
for epoch in range(first, 4):
    loader.sampler.generator = torch.Generator().manual_seed(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs[rank::ranks]), targets[rank::ranks])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        os.makedirs(f"run/{epoch % 2}", exist_ok=True)
        states = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(states, f"run/{epoch % 2}/model.pt")
    dist.barrier()
dist.destroy_process_group()
