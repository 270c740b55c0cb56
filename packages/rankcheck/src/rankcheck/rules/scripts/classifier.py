"""Classes with names; one process or several, on GPUs or CPUs; a function trains any model."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

NAMES = ["cat"] * 64 + ["dog"] * 16 + ["owl"] * 16


def train(model, loader, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group()
    distributed = dist.is_initialized()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    classes = {name: number for number, name in enumerate(sorted(set(NAMES)))}
    labels = torch.tensor([classes[name] for name in NAMES])
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, labels)
    sampler = DistributedSampler(data) if distributed else RandomSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = nn.Linear(4, len(classes)).to(device)
    train(DistributedDataParallel(model) if distributed else model, loader, device)
    if distributed:
        dist.destroy_process_group()
