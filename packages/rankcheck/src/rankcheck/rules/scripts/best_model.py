"""Keeps the last model, and the one with the best accuracy, whose score a resumed run knows."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(state, path):
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


@torch.no_grad()
def accuracy(net, inputs, labels):
    return (net(inputs).argmax(1) == labels).float().mean().item()


dist.init_process_group("gloo")
inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
labels = (inputs.sum(1) > 0).long()
data = TensorDataset(inputs[:64], labels[:64])
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
net = nn.Linear(4, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
first, best = 0, 0.0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epochs_run"]
    best = state["best"]
model = DistributedDataParallel(net)
for epoch in range(first, 5):
    loader.sampler.set_epoch(epoch)
    for batch, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), targets).backward()
        optimizer.step()
    score = accuracy(net, inputs[64:], labels[64:])
    if dist.get_rank() == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"epochs_run": epoch + 1, "best": max(best, score)}
        if score > best:
            save(state, "best.pt")
        save(state, "last.pt")
    best = max(best, score)
dist.destroy_process_group()
