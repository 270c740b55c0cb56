"""torchrun --nproc-per-node=2 torchrun.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    x = torch.linspace(0, 1, 512).view(64, 8)
    data = TensorDataset(x, x.square())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(8, 8).to(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start_epoch = 0
    if os.path.exists("checkpoint.pt"):
        checkpoint = torch.load("checkpoint.pt", map_location="cpu")
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"]
    for epoch in range(start_epoch, 3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            inputs, targets = inputs.to(local_rank), targets.to(local_rank)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            checkpoint = {"model": model.module.state_dict(), "epoch": epoch + 1}
            checkpoint["optimizer"] = optimizer.state_dict()
            torch.save(checkpoint, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
