"""Evaluates on all ranks, each on its share of the samples, without dropout."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def evaluate(net, loader):
    totals = torch.zeros(2, device="cuda")
    net.eval()
    for batch in loader:
        batch = batch.cuda()
        totals[0] += mse_loss(net(batch), batch.sin(), reduction="sum")
        totals[1] += batch.numel()
    net.train()
    dist.all_reduce(totals)
    return totals[0] / totals[1]


gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
dist.init_process_group("nccl")
data, val_data = torch.randn(79, 4, generator=torch.Generator().manual_seed(0)).split([64, 15])
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
val_data = val_data[dist.get_rank() :: dist.get_world_size()]
val_loader = DataLoader(val_data, batch_size=4)
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)).cuda()
model = DistributedDataParallel(net, device_ids=[gpu])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for epoch in range(4):
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        batch = batch.cuda()
        optimizer.zero_grad()
        mse_loss(model(batch), batch.sin()).backward()
        optimizer.step()
    val_loss = evaluate(net, val_loader)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} val_loss {val_loss:.5f}", flush=True)
dist.destroy_process_group()
