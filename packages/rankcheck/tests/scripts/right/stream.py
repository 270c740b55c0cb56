"""A stream with data workers: each worker of each rank reads a share of its own."""

import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    epoch = 0

    def __iter__(self):
        worker = get_worker_info()
        readers = int(os.environ["WORLD_SIZE"]) * worker.num_workers
        reader = int(os.environ["RANK"]) * worker.num_workers + worker.id
        order = torch.randperm(128, generator=torch.Generator().manual_seed(self.epoch))
        for number in order[reader::readers]:
            yield torch.sin(number * torch.arange(1.0, 5.0))


logging.basicConfig(level="INFO" if os.environ["RANK"] == "0" else "WARNING")
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
stream = Stream()
loader = DataLoader(stream, batch_size=8, num_workers=2)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
for stream.epoch in range(4):
    losses = []
    for batch in loader:
        loss = (model(batch.cuda()) - batch.cuda().roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    scheduler.step()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    logging.info("epoch %d loss %.5f", stream.epoch, mean)
dist.destroy_process_group()
