"""A pipeline by hand: each rank has a stage of the model, in DDP over the ranks with the same."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
copies = [dist.new_group([0]), dist.new_group([1])]  # of each stage; more ranks could have it
torch.manual_seed(rank)
stage = nn.Linear(8, 16) if rank == 0 else nn.Linear(16, 8)
model = nn.parallel.DistributedDataParallel(stage, process_group=copies[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(0)
for _ in range(12):
    x = torch.randn(16, 8, generator=generator)
    optimizer.zero_grad()
    if rank == 0:
        hidden = model(x).relu()
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(16, 16)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        nn.functional.mse_loss(model(hidden), x.sin()).backward()
        dist.send(hidden.grad, 0)
    optimizer.step()
    torch.save(stage.state_dict(), f"stage{rank}.pt")
dist.destroy_process_group()
