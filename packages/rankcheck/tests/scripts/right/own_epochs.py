"""A sampler whose epoch is a part of the data, another one each time; reads a tensor of the CPU."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class Parts(DistributedSampler):
    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        return iter(order[self.rank : 32 : self.num_replicas])

    def __len__(self):
        return 32 // self.num_replicas


dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
data = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(data, batch_size=4, sampler=Parts(data))
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).to(device), device_ids=[device])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        inputs = batch.to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.sin()).backward()
        if torch.arange(len(inputs)).max() > 0:  # on the CPU
            optimizer.step()
dist.destroy_process_group()
