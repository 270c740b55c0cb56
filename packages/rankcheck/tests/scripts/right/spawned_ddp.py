"""mp.spawn, a process for each GPU; a schedule by steps; tqdm."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import trange


def train(rank, world_size, epochs):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", "tcp://127.0.0.1:12355", rank=rank, world_size=world_size)
    x = torch.linspace(0, 1, 512).view(128, 4)
    data = TensorDataset(x, x.square())
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, pin_memory=True)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=epochs * len(loader))
    for epoch in trange(epochs, disable=rank != 0):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.smooth_l1_loss(model(inputs.to(rank)), targets.to(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "squares.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(train, args=(world_size, 3), nprocs=world_size)
