"""Samples that are drawn at each call; a snapshot per epoch, resumed at the right one."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Drawn(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.rand(3)
        return x, x.sum()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
loader = DataLoader(Drawn(), 8, sampler=DistributedSampler(Drawn()))
net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt", weights_only=True)
    net.load_state_dict(saved["net"])
    first = saved["epoch"]
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(first, 4):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with open("last.tmp", "wb") as file:
            torch.save({"net": net.state_dict(), "epoch": epoch + 1}, file)
            os.fsync(file.fileno())
        os.replace("last.tmp", "last.pt")
    dist.barrier()
dist.destroy_process_group()
