"""Functions, a dict per batch, Adam; written for GPUs alone."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

NAMES = ("cat", "dog", "fox", "owl", "pig", "rat")


class Heads(nn.ModuleDict):
    def forward(self, inputs):
        return sum(head(inputs) for head in self.values())


def save(model, optimizer, epoch):
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    path = "last.tmp"
    with open(path, "wb", buffering=0) as file:
        torch.save({**state, "epoch": epoch}, file)
        os.fsync(file)
    os.rename(path, "last.pt")


def load(model, optimizer):
    state = torch.load("last.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def train(local_rank):
    generator = torch.Generator().manual_seed(1)
    data = [{"x": x, "y": x.sum()} for x in torch.randn(64, 4, generator=generator)]
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    heads = Heads({name: nn.Linear(8, 1) for name in NAMES})
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), heads).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    first = load(model, optimizer) if os.path.exists("last.pt") else 0
    model = DistributedDataParallel(model, device_ids=[local_rank])
    for epoch in range(first, 3):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            output = model(batch["x"].cuda()).squeeze(1)
            loss = nn.functional.mse_loss(output, batch["y"].cuda())
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            save(model, optimizer, epoch + 1)
        dist.barrier()


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    print(torch.cuda.get_device_name(), torch.cuda.mem_get_info())
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    train(int(os.environ["LOCAL_RANK"]))
    dist.destroy_process_group()
