import os

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(4, 3)


def train(loader):
    model = torch.compile(torch.nn.Linear(3, 1).to(device))
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device])
    for inputs in loader:
        model(inputs.to(device)).sum().backward()


device = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(device)
torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", device))
train(DataLoader(Subset(Subset(torch.ones(9, 3), [6, 7, 8]), [1, 2]), 2))
train(DataLoader(Stream(), 2))
torch.distributed.destroy_process_group()
