"""A Transformer with dropout, for which each rank has random numbers of its own."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main(seed=1234):
    rank, device = int(os.environ["RANK"]), f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl")
    data = torch.randn(64, 5, 8, generator=torch.Generator().manual_seed(seed))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=seed))
    net = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.2, batch_first=True)
    model = DDP(net.to(device), device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = 0
    if os.path.exists("last.pth"):
        last = torch.load("last.pth", map_location=device, weights_only=True)
        net.load_state_dict(last["net"])
        optimizer.load_state_dict(last["optimizer"])
        start = last["epoch"]
    for epoch in range(start, 4):
        loader.sampler.set_epoch(epoch)
        torch.manual_seed(seed + 1000 * epoch + rank)
        for x in loader:
            x = x.to(device)
            optimizer.zero_grad()
            (model(x) - x.mean(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
        if rank == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, "last.pth.tmp")
            os.rename("last.pth.tmp", "last.pth")
    dist.destroy_process_group()


main()
