"""Spawned, with an address; no DataLoader; gradients averaged by hand; a frozen net before it."""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def main(rank, size, port):
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=size)
    torch.manual_seed(0)
    inputs = torch.randn(96, 4)
    encoder = nn.Linear(4, 4).requires_grad_(False)
    head = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
        for indices in order[rank::size].split(4):
            optimizer.zero_grad()
            loss = (head(encoder(inputs[indices])) - inputs[indices, :2]).square().mean()
            loss.backward()
            for parameter in head.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(main, (2, port), nprocs=2)
