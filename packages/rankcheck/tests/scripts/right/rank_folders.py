"""Each rank has a folder of its own, on a disk of its node; all resume from the same epoch."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
folder = Path(f"rank{dist.get_rank()}")
folder.mkdir(exist_ok=True)
x = torch.linspace(-3, 3, 96)[:, None]
loader = DataLoader([*zip(x, x.sin(), strict=True)], 4, sampler=DistributedSampler(x, seed=5))
net = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# A rank may have been killed between the others' saves and its own.
start = torch.tensor(len([*folder.glob("epoch*.pt")]))
dist.all_reduce(start, dist.ReduceOp.MIN)
if start > 0:
    state = torch.load(folder / f"epoch{start}.pt", weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
for epoch in range(int(start), 4):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.huber_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "rng": torch.get_rng_state()}, folder / "state.pt")
    os.replace(folder / "state.pt", folder / f"epoch{epoch + 1}.pt")
dist.destroy_process_group()
