"""Gradients accumulated over four micro-batches; the last group of an epoch is smaller.

The layer is computed again in the backward pass, as some checkpointing by hand does.
"""

import os
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class Again(torch.autograd.Function):
    @staticmethod
    def forward(context, batch, weight, bias):
        context.save_for_backward(batch, weight, bias)
        return nn.functional.linear(batch, weight, bias)

    @staticmethod
    def backward(context, gradient):
        batch, *parameters = context.saved_tensors
        with torch.enable_grad():
            output = nn.functional.linear(batch, *parameters)
        return None, *torch.autograd.grad(output, parameters, gradient)


class Recomputed(nn.Linear):
    def forward(self, batch):
        return Again.apply(batch, self.weight, self.bias)


def train_group(model, optimizer, group):
    size = sum(len(batch) for batch in group)
    for number, batch in enumerate(group, 1):
        with nullcontext() if number == len(group) else model.no_sync():
            batch = batch.cuda()
            error = (model(batch) - batch.tanh()).square().sum()
        (error / size).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    data = torch.randn(88, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = nn.parallel.DistributedDataParallel(Recomputed(4, 4).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(6):
        loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        while group := list(islice(batches, 4)):
            train_group(model, optimizer, group)
    dist.destroy_process_group()
