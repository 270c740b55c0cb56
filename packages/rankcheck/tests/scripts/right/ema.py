"""An average of the weights (EMA) on every rank, of which each evaluates a share of the data."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def evaluate(model, val):
    share = val[dist.get_rank() :: dist.get_world_size()].cuda()
    error = (model(share) - share.square()).square().sum()
    dist.all_reduce(error)
    return error.item() / val.numel()


torch.cuda.set_device(gpu := int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
train, val = torch.randn(128, 6, generator=torch.Generator().manual_seed(1)).split([96, 32])
loader = DataLoader(train, 8, sampler=DistributedSampler(train))
model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6)).cuda()
ddp = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x in loader:
        loss = (ddp(x.cuda()) - x.cuda().square()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
    error = evaluate(ema, val)
    if dist.get_rank() == 0:
        print("epoch", epoch, "val", round(error, 5))
        torch.save(ema.module.state_dict(), f"ema{epoch}.pt")
dist.destroy_process_group()
